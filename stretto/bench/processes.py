"""What processes have used, from /proc: CPU time, and memory with shared pages shared out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# Fields of /proc/PID/stat behind the command's name: parent, user time, system time.
PARENT, USER, SYSTEM = 1, 11, 12


def cpu_s(pid: int) -> float:
    """CPU time used so far, user and system; 0 for a process that has gone."""
    fields = _stat(pid)
    if fields is None:
        return 0.0
    return (int(fields[USER]) + int(fields[SYSTEM])) / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[PARENT]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss_mb(pids: Sequence[int]) -> float:
    """Resident memory of all together; a page that several share counts once."""
    kilobytes = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
