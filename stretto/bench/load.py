"""When requests are sent: all at once, at random times, never more than so many at a time.

    open loop     arrival times are drawn before the run; a slow server does not slow them down
    closed loop   all arrive at once (rate inf), and `max_concurrency` lets some through

A request's clock starts when it is let through. It ends as an `Outcome`, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from stretto.bench.datasets import Prompt
from stretto.metrics import Timeline


class StageMetrics(msgspec.Struct, frozen=True):
    """One stage's own word about a request, where a server was asked for it."""

    num_tokens_in: int | None = None
    num_tokens_out: int | None = None
    stage_gen_time_ms: float | None = None
    vllm_ttft_ms: float | None = None
    vllm_tpot_ms: float | None = None
    vllm_itls_ms: list[float] | None = None


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended. `error` None: with its end event, and with sound if it asked for it."""

    prompt: Prompt
    timeline: Timeline
    error: str | None = None
    text: str = ""
    # By stage number, where the server told.
    stages: dict[str, StageMetrics] = {}


class Load(msgspec.Struct, frozen=True):
    """`wall_s` runs from the first sending to the last end."""

    outcomes: list[Outcome]
    wall_s: float


def arrival_times(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first at 0.

    `rate` per second on average. Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is more even.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return [float(at) for at in times - times[0]]


async def run_load(
    prompts: Sequence[Prompt],
    ask: Callable[[Prompt], Awaitable[Outcome]],
    *,
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[Outcome], None],
) -> Load:
    """Asks each prompt at its time; the outcomes in the order of the prompts."""
    began_s = time.perf_counter()
    gate: contextlib.AbstractAsyncContextManager[object] = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def one(prompt: Prompt, at_s: float) -> Outcome:
        await asyncio.sleep(began_s + at_s - time.perf_counter())
        async with gate:
            outcome = await ask(prompt)
        on_done(outcome)
        return outcome

    pairs = zip(prompts, arrivals, strict=True)
    outcomes = await asyncio.gather(*(one(prompt, at_s) for prompt, at_s in pairs))
    sent_s = min(outcome.timeline.sent_s for outcome in outcomes)
    return Load(outcomes, max(outcome.timeline.ended_s for outcome in outcomes) - sent_s)


def peak_concurrency(timelines: Sequence[Timeline]) -> int:
    """The most requests that were under way at one time."""
    edges = [(t.sent_s, 1) for t in timelines] + [(t.ended_s, -1) for t in timelines]
    now = peak = 0
    for _, change in sorted(edges):
        now += change
        peak = max(peak, now)
    return peak
