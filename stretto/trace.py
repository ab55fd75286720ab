"""Where the time goes: spans of steps, chunks, puts, gets and materializations, for Perfetto.

    each process   Tracer ── spans in memory ── at its end a part file, one JSON array per line
    the front      merge_parts(...) ──> one Chrome trace (chrome://tracing, ui.perfetto.dev)

A span is a tuple appended to a list: under a microsecond, so a trace can be left on. Time is
CLOCK_MONOTONIC, which all processes of a machine share. A tracer without a file records nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

# Some hundred bytes each: at most a few hundred MB in a process that is traced for hours.
MAX_SPANS = 1_000_000


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`began_ns` and `ended_ns` by time.monotonic_ns(); an instant has both equal."""

    process: str
    thread: str
    name: str
    began_ns: int
    ended_ns: int
    args: dict[str, Any]

    @property
    def duration_ms(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e6


class Tracer:
    """Records the spans of one process. Any thread may record."""

    def __init__(self, process: str, part: Path | None) -> None:
        self.enabled = part is not None
        self._process = process
        self._part = part
        self._spans: list[Span] = []
        self.num_lost = 0

    def span(self, name: str, began_ns: int, **args: Any) -> None:
        """A span that began at `began_ns` and ends now, in the calling thread."""
        if not self.enabled:
            return
        if len(self._spans) >= MAX_SPANS:
            self.num_lost += 1
            return
        thread = threading.current_thread().name
        self._spans.append(Span(self._process, thread, name, began_ns, time.monotonic_ns(), args))

    def close(self) -> None:
        """Writes the part file."""
        if self._part is None:
            return
        encoder = msgspec.json.Encoder()
        with self._part.open("wb") as file:
            for span in self._spans:
                file.write(encoder.encode(span) + b"\n")
        self._spans = []
        self.enabled = False


def part_file(trace: Path, process: str) -> Path:
    """Where a process leaves its part of `trace`."""
    return trace.with_name(f"{trace.name}.{process}.part")


def merge_parts(trace: Path, processes: Iterable[str]) -> None:
    """Writes `trace` from the parts that are there, and removes them."""
    parts = [part_file(trace, process) for process in processes]
    spans = [span for part in parts if part.is_file() for span in _read_part(part)]
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str], tuple[int, int]] = {}
    for span in spans:
        key = (span.process, span.thread)
        if key not in numbers:
            numbers[key] = _introduce(key, numbers, events)
        pid, tid = numbers[key]
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "ts": span.began_ns / 1e3,
                "dur": (span.ended_ns - span.began_ns) / 1e3,
                "args": span.args,
            }
        )
    trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    for part in parts:
        part.unlink(missing_ok=True)


def read_trace(trace: Path) -> list[Span]:
    """The spans of a merged trace, in order of their beginning."""
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    spans = [
        Span(
            processes[event["pid"]],
            threads[event["pid"], event["tid"]],
            event["name"],
            round(event["ts"] * 1e3),
            round((event["ts"] + event["dur"]) * 1e3),
            event["args"],
        )
        for event in events
        if event["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: span.began_ns)


def _introduce(
    key: tuple[str, str],
    numbers: dict[tuple[str, str], tuple[int, int]],
    events: list[dict[str, Any]],
) -> tuple[int, int]:
    """Numbers for a process and thread not seen before, and the events that name them."""
    process, thread = key
    known = {name: pid for (name, _), (pid, _) in numbers.items()}
    pid = known[process] if process in known else len(known) + 1
    tid = len(numbers) + 1
    for kind, name in (("process_name", process), ("thread_name", thread)):
        events.append({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
    return pid, tid


def _read_part(part: Path) -> Iterator[Span]:
    decoder = msgspec.json.Decoder(Span)
    with part.open("rb") as file:
        for line in file:
            yield decoder.decode(line)
