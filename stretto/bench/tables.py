"""Tables for the terminal and for a document, and what a reader must know of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


class Table(msgspec.Struct, frozen=True):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"{self.title}\n\n{body}"


def show(tables: Sequence[Table], console: Console) -> None:
    from rich.table import Table as Shown

    for table in tables:
        shown = Shown(*table.columns, title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def machine() -> str:
    """Processor, cores, versions, and how busy it is: figures are worth as much as the quiet."""
    import torch

    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    processor = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    return (
        f"{processor}, {cores} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f} when the run began"
    )


class Section:
    """Where a command's tables stand in a document: a file, or the part between two marks in it.

    <!-- bench ablation tiny -->
    ...
    <!-- end -->
    """

    def __init__(self, path: Path, name: str) -> None:
        """Raises ConfigError when the file is there and has no such part, before any work."""
        self._path = path
        self._begin, self._end = f"<!-- {name} -->", "<!-- end -->"
        if path.is_file() and self._begin not in path.read_text():
            raise ConfigError(
                f"{path}: there is no line {self._begin!r}; the tables go between it and the next "
                f"{self._end!r}"
            )

    def write(self, command: str, about: str, tables: Sequence[Table]) -> None:
        body = "\n\n".join([f"    {command}", about, *(table.markdown() for table in tables)])
        part = f"{self._begin}\n\n{body}\n\n{self._end}"
        if not self._path.is_file():
            self._path.write_text(f"{part}\n")
            return
        before, _, rest = self._path.read_text().partition(self._begin)
        _, _, after = rest.partition(self._end)
        self._path.write_text(before + part + after)
