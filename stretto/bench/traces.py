"""What a trace says: how long steps are and what lies between them, what each hop cost.

step     one call of a runner        gap    from its end to the next one's beginning, where
                                            the loop had not to wait for work in between
busy     the sum of a stage's steps  hop    one chunk: put, under way, got
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stretto.trace import Span, read_trace


class Hop(msgspec.Struct, frozen=True):
    """A chunk that was put and got; `flight_ns` is from the begin of put to the end of get."""

    edge: str
    request_id: str
    index: int
    num_bytes: int
    began_ns: int
    put_ns: int
    get_ns: int
    flight_ns: int
    # Of both threads; without what they wait for each other.
    cpu_us: float


class Trace:
    """The spans of one pipeline, sorted by what they are."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """`spans` in order of their beginning."""
        self.steps: dict[str, list[Span]] = {}
        self.requests: list[Span] = []
        self.sounds: list[Span] = []
        self.texts: list[Span] = []
        puts: dict[str, Span] = {}
        self.hops: list[Hop] = []
        for span in spans:
            match span.name:
                case "step":
                    self.steps.setdefault(span.process, []).append(span)
                case "request":
                    self.requests.append(span)
                case "audio":
                    self.sounds.append(span)
                case "text":
                    self.texts.append(span)
                case "put":
                    puts[span.args["key"]] = span
        for span in spans:
            if span.name == "get" and span.args["key"] in puts:
                self.hops.append(_hop(puts[span.args["key"]], span))
        self.hops.sort(key=lambda hop: hop.began_ns)

    def steps_within(self, stage: str, began_ns: int, ended_ns: int) -> list[Span]:
        steps = self.steps.get(stage, [])
        first = bisect.bisect_left(steps, began_ns, key=lambda span: span.began_ns)
        last = bisect.bisect_left(steps, ended_ns, key=lambda span: span.began_ns)
        return steps[first:last]

    def hops_of(self, edge: str, request_ids: set[str]) -> list[Hop]:
        return [hop for hop in self.hops if hop.edge == edge and hop.request_id in request_ids]


def load_trace(path: Path) -> Trace:
    return Trace(read_trace(path))


def step_gaps_ms(steps: Sequence[Span]) -> list[float]:
    """From each step to the next; 0 where the next was launched before the end."""
    return [
        max(0, later.began_ns - earlier.ended_ns) / 1e6
        for earlier, later in itertools.pairwise(steps)
        if not later.args["after_wait"]
    ]


def busy_s(steps: Sequence[Span]) -> float:
    """The time in which a step ran; where steps overlap it counts once."""
    total, until = 0, 0
    for step in steps:
        total += max(0, step.ended_ns - max(step.began_ns, until))
        until = max(until, step.ended_ns)
    return total / 1e9


def _hop(put: Span, get: Span) -> Hop:
    # {request_id}_{stage_id}_{chunk_id}
    request_id, _, index = put.args["key"].rsplit("_", 2)
    return Hop(
        edge=f"{put.process}->{get.process}",
        request_id=request_id,
        index=int(index),
        num_bytes=put.args["bytes"],
        began_ns=put.began_ns,
        put_ns=put.ended_ns - put.began_ns,
        get_ns=get.ended_ns - get.began_ns,
        flight_ns=get.ended_ns - put.began_ns,
        cpu_us=put.args["cpu_us"] + get.args["cpu_us"],
    )
