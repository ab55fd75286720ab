"""Our own modes against each other: async_chunk off and on, Code2Wav's batch, concurrency.

Every mode has a pipeline of its own, all are up at once, and runs are interleaved, so that what
else the machine does hits all modes alike:

    repeat 1   concurrency 1: mode A, B, C, D    concurrency 4: A, B, C, D    ...
    repeat 2   concurrency 1: mode D, C, B, A    ...

A run is one wave of as many requests as the concurrency. Steps, hops and gaps are read from the
pipelines' traces afterwards, by the times between which a run took place.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from stretto.api import AsyncOmni
from stretto.bench.offline import Asked, Prompts, Workload, ask_exactly
from stretto.bench.processes import cpu_s
from stretto.bench.traces import Trace, load_trace
from stretto.config.deployment import PipelineConfig

VOCODER = "code2wav"
LONG = 0
# Seeds of waves lie this far apart; prompts of a wave count up from its seed.
PROMPTS_PER_WAVE = 10_000
# The first requests after a start meet cold caches; they are short and not counted.
WARM_UP_TOKENS, WARM_UP_FRAMES = 8, 12
# Between two looks at whether stages have done their work ahead.
PREPARED_S = 0.2


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """A way to deploy."""

    async_chunk: bool
    code2wav_batch: int
    async_output: bool = True

    @property
    def label(self) -> str:
        chunk = "on" if self.async_chunk else "off"
        output = "" if self.async_output else ", async output off"
        return f"async_chunk {chunk}, Code2Wav batch {self.code2wav_batch}{output}"

    @property
    def file_name(self) -> str:
        return self.label.replace(", ", "-").replace(" ", "_").lower()

    def flags(self) -> dict[str, Any]:
        stages: dict[str, Any] = {VOCODER: {"max_num_seqs": self.code2wav_batch}}
        if not self.async_output:
            stages |= {name: {"async_output": "off"} for name in ("thinker", "talker")}
        return {"async_chunk": self.async_chunk, "stages": stages}


def modes_of(batches: Sequence[int]) -> list[Mode]:
    """All modes to run; the last batch is the deployed one, which the ratios are taken at."""
    pairs = itertools.product((False, True), batches)
    modes = [Mode(async_chunk=chunk, code2wav_batch=batch) for chunk, batch in pairs]
    return [*modes, Mode(async_chunk=True, code2wav_batch=batches[-1], async_output=False)]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    workload: Workload
    modes: list[Mode]
    concurrency: tuple[int, ...] = (1, 4, 10)
    repeats: int = 3
    long_inputs: tuple[int, ...] = ()
    inline: bool = False

    @property
    def deployed(self) -> Mode:
        """The mode that a user gets: chunking on, the deployed batch."""
        return [mode for mode in self.modes if mode.async_chunk and mode.async_output][-1]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One wave of requests through one mode; `concurrency` LONG: one request, its prompt long."""

    mode: Mode
    concurrency: int
    input_len: int
    began_ns: int
    ended_ns: int
    asked: list[Asked]
    cpu_s: dict[str, float]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan's runs gave; `traces` and `ready_s` are in the order of its modes."""

    runs: list[Run]
    traces: list[Trace]
    ready_s: list[float]
    config: PipelineConfig


async def ablate(
    plan: Plan,
    *,
    cache_dir: Path,
    deploy_config: Path | None = None,
    keep_traces: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Runs the plan; `keep_traces` is a directory for the traces, one file a mode.

    Raises:
        ConfigError, CheckpointError, InvalidRequest: the model cannot be run so.
        RequestFailed: a request failed, or its answer had another length than asked for.
    """
    runs: list[Run] = []
    ready_s: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = keep_traces or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        files = [directory / f"{mode.file_name}.json" for mode in plan.modes]
        async with AsyncExitStack() as stack:
            omnis: list[AsyncOmni] = []
            for mode, file in zip(plan.modes, files, strict=True):
                on_progress(f"starting: {mode.label}")
                omni = AsyncOmni(
                    plan.model,
                    deploy_config=deploy_config,
                    flags=mode.flags(),
                    inline=plan.inline,
                    trace=file,
                    cache_dir=cache_dir,
                )
                began_s = time.monotonic()
                omnis.append(await stack.enter_async_context(omni))
                ready_s.append(time.monotonic() - began_s)
            await _run_all(plan, omnis, runs, on_progress)
        traces = [load_trace(file) for file in files]
    return Measured(runs=runs, traces=traces, ready_s=ready_s, config=omnis[0].model.config)


async def _run_all(
    plan: Plan, omnis: list[AsyncOmni], runs: list[Run], on_progress: Callable[[str], None]
) -> None:
    prompts = Prompts(omnis[0])
    most = max(plan.concurrency)
    warm_up = msgspec.structs.replace(
        plan.workload,
        output_len=min(WARM_UP_TOKENS, plan.workload.output_len),
        frames=min(WARM_UP_FRAMES, plan.workload.frames),
    )
    pairs = list(zip(plan.modes, omnis, strict=True))
    for mode, omni in pairs:
        on_progress(f"warming up: {mode.label}")
        await _run(omni, prompts, warm_up, mode=mode, concurrency=most, seed=0)
    # What a mode's idle stages do ahead would be beside the others' waves.
    for mode, omni in pairs:
        on_progress(f"preparing: {mode.label}")
        while not omni.pipeline.is_prepared:
            await asyncio.sleep(PREPARED_S)
    # Each wave has prompts of its own, the same in every mode: a prefix cache knows none of them.
    seeds = itertools.count(plan.workload.seed + PROMPTS_PER_WAVE, PROMPTS_PER_WAVE)
    for repeat in range(plan.repeats):
        for concurrency, seed in zip(plan.concurrency, seeds, strict=False):
            for mode, omni in pairs if repeat % 2 == 0 else reversed(pairs):
                on_progress(f"repeat {repeat + 1}, {concurrency} at once: {mode.label}")
                run = await _run(
                    omni, prompts, plan.workload, mode=mode, concurrency=concurrency, seed=seed
                )
                runs.append(run)
    deployed, omni = next(pair for pair in pairs if pair[0] == plan.deployed)
    for repeat in range(plan.repeats):
        for input_len, seed in zip(plan.long_inputs, seeds, strict=False):
            on_progress(f"repeat {repeat + 1}, a prompt of {input_len} tokens: {deployed.label}")
            workload = msgspec.structs.replace(plan.workload, input_len=input_len)
            runs.append(
                await _run(omni, prompts, workload, mode=deployed, concurrency=LONG, seed=seed)
            )


async def _run(
    omni: AsyncOmni,
    prompts: Prompts,
    workload: Workload,
    *,
    mode: Mode,
    concurrency: int,
    seed: int,
) -> Run:
    texts = [
        prompts.text(workload.input_len, seed=seed + index) for index in range(max(concurrency, 1))
    ]
    pids = omni.pipeline.stage_pids
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    began_ns = time.monotonic_ns()
    asked = await asyncio.gather(
        *(
            ask_exactly(omni, text, workload, workload.options(seed + index))
            for index, text in enumerate(texts)
        )
    )
    ended_ns = time.monotonic_ns()
    return Run(
        mode=mode,
        concurrency=concurrency,
        input_len=workload.input_len,
        began_ns=began_ns,
        ended_ns=ended_ns,
        asked=asked,
        cpu_s={name: cpu_s(pid) - before[name] for name, pid in pids.items()},
    )
