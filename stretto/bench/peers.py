"""The same prompts through transformers' `generate` and through stretto, in one run.

    for each prompt      generate, then stretto: interleaved, so that noise hits both alike
    16 at once           one wave in stretto over the sum of 16 calls of `generate`

Both in float32 on the CPU, greedy, with as many text tokens and frames as asked for, no more and no
fewer; ids and codes of both are compared, so that the times are of the same work. `generate` gives
its sound at its end, so its first packet is its last. It gets the number of threads that is best
for it on this machine: both numbers are tried.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from stretto.api import AsyncOmni
from stretto.bench.offline import Asked, Prompts, Workload, ask_exactly
from stretto.bench.tables import Table, number
from stretto.pipeline.omni_frontend import Options
from stretto.pipeline.pipeline import SAMPLE_RATE
from stretto.verify.cases import REPETITION_PENALTY
from stretto.verify.omni import captured_codes

BATCH = 16
THREADS = (1, 2)
# Enough to tell which number of threads is better, and little: on a busy machine two threads that
# wait for each other were seen to take 50 times as long as one.
TRIAL_TOKENS, TRIAL_FRAMES = 4, 6
# Times slower than the other at once: not tried again.
HOPELESS = 4


class PeersPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`num_prompts` one after the other; then, unless `quick`, `BATCH` at once, `repeats` times."""

    model: str
    workload: Workload
    num_prompts: int = 3
    repeats: int = 3
    quick: bool = False
    async_chunk: bool | None = None


class Side(msgspec.Struct, frozen=True):
    """Medians of one side."""

    e2e_s: float
    ttfp_s: float
    rtf: float


class PeersResult(msgspec.Struct, frozen=True, kw_only=True, tag="peers", tag_field="kind"):
    """The last line of `stretto bench peers`. Ratios are stretto over transformers, of medians.

    `equal` says whether text ids and codes were the same in every pair.
    """

    model: str
    machine: str
    workload: Workload
    num_prompts: int
    transformers_threads: int
    transformers: Side
    stretto: Side
    ttft_s: float
    e2e_ratio: float
    ttfp_ratio: float
    rtf_ratio: float
    equal: bool
    batch16_ratio: float | None = None
    batch16_stretto_s: float | None = None
    batch16_transformers_s: float | None = None


class _Generated(msgspec.Struct, frozen=True):
    """One answer of transformers; `codes` int16 [frames, codebooks]."""

    token_ids: tuple[int, ...]
    codes: np.ndarray
    e2e_s: float
    duration_s: float


class _Transformers:
    """`generate`, driven so that an answer has exactly the workload's lengths."""

    def __init__(self, omni: AsyncOmni) -> None:
        from transformers import Qwen3OmniMoeForConditionalGeneration

        self._omni = omni
        self._threads = THREADS[0]
        self._model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            omni.model.directory, dtype=torch.float32, local_files_only=True
        )

    async def generate(self, text: str, workload: Workload) -> _Generated:
        """In a thread: the pipeline's loop goes on answering its stages."""
        return await asyncio.to_thread(self._generate, text, workload)

    def _generate(self, text: str, workload: Workload) -> _Generated:
        # Each thread has a number of its own, and which one this is only the executor knows.
        torch.set_num_threads(self._threads)
        began_s = time.monotonic()
        request = self._omni.frontend.prepare(text, Options(**_options(workload)))
        assert request.speech is not None
        prompt = torch.tensor([request.prompt_token_ids])
        with captured_codes(self._model.code2wav) as captured:
            sequences, sound = self._model.generate(
                input_ids=prompt,
                speaker=request.speech.speaker,
                return_audio=True,
                thinker_max_new_tokens=workload.output_len,
                thinker_min_new_tokens=workload.output_len,
                thinker_eos_token_id=list(request.sampling.stop_token_ids),
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_repetition_penalty=REPETITION_PENALTY,
                # Its last token gives no frame.
                talker_max_new_tokens=workload.frames + 1,
                talker_min_new_tokens=workload.frames + 1,
            )
        e2e_s = time.monotonic() - began_s
        (codes,) = captured
        return _Generated(
            token_ids=tuple(sequences[0, prompt.shape[1] :].tolist()),
            codes=codes[0].T.to(torch.int16).numpy(),
            e2e_s=e2e_s,
            duration_s=sound.numel() / SAMPLE_RATE,
        )

    async def choose_threads(self, text: str, workload: Workload) -> int:
        """From now on the better of `THREADS`, which it returns."""
        trial = msgspec.structs.replace(
            workload,
            output_len=min(TRIAL_TOKENS, workload.output_len),
            frames=min(TRIAL_FRAMES, workload.frames),
        )
        cores = len(os.sched_getaffinity(0))
        taken = {threads: math.inf for threads in THREADS if threads <= cores}
        # In turn, since the machine may be busy at times; the first call also starts helpers.
        for threads in (*taken, *taken, *taken):
            if math.inf > taken[threads] > HOPELESS * min(taken.values()):
                continue
            self._threads = threads
            taken[threads] = min(taken[threads], (await self.generate(text, trial)).e2e_s)
        self._threads = min(taken, key=lambda threads: taken[threads])
        return self._threads


async def compare(
    plan: PeersPlan,
    *,
    machine: str,
    cache_dir: Path,
    deploy_config: Path | None = None,
    trace: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> PeersResult:
    """Raises what starting and asking raise; RequestFailed when lengths are not as asked for."""
    on_progress(f"starting {plan.model}")
    stage = {"devices": "cpu", "dtype": "float32"}
    # Waves repeat their prompts, and `generate` remembers none.
    entry = {**stage, "enable_prefix_caching": False}
    async with AsyncOmni(
        plan.model,
        deploy_config=deploy_config,
        async_chunk=plan.async_chunk,
        flags={"stages": {"thinker": entry, "talker": stage, "code2wav": stage}},
        trace=trace,
        cache_dir=cache_dir,
    ) as omni:
        peer = _Transformers(omni)
        prompts = Prompts(omni)
        workload = plan.workload
        count = plan.num_prompts if plan.quick else max(plan.num_prompts, BATCH)
        texts = [
            prompts.text(workload.input_len, seed=workload.seed + index) for index in range(count)
        ]
        on_progress("choosing threads for transformers")
        threads = await peer.choose_threads(texts[0], workload)
        generated: list[_Generated] = []
        asked: list[Asked] = []
        for index, text in enumerate(texts[: plan.num_prompts]):
            on_progress(f"prompt {index + 1} of {plan.num_prompts}: transformers")
            generated.append(await peer.generate(text, workload))
            on_progress(f"prompt {index + 1} of {plan.num_prompts}: stretto")
            asked.append(await ask_exactly(omni, text, workload, _options(workload)))
        batch_s: float | None = None
        if not plan.quick:
            for index, text in enumerate(texts[plan.num_prompts :], start=plan.num_prompts):
                on_progress(f"prompt {index + 1} of {count}: transformers")
                generated.append(await peer.generate(text, workload))
            on_progress(f"{BATCH} at once: stretto")
            waves = [await _wave(omni, texts[:BATCH], workload) for _ in range(plan.repeats)]
            batch_s = statistics.median(waves)
    return _result(plan, asked, generated, batch_s, threads=threads, machine=machine)


def _options(workload: Workload) -> dict[str, Any]:
    """Greedy, its lengths fixed as `generate` fixes them: an end may not come before."""
    length = workload.output_len
    return {
        "sampling": {"temperature": 0.0, "min_tokens": length, "max_tokens": length},
        "talker_sampling": {
            "temperature": 0.0,
            "repetition_penalty": REPETITION_PENALTY,
            "ignore_eos": True,
            "max_tokens": workload.frames,
        },
        "return_codes": True,
    }


async def _wave(omni: AsyncOmni, texts: list[str], workload: Workload) -> float:
    """Seconds from the first sending to the last end of requests that run side by side."""
    began_s = time.monotonic()
    await asyncio.gather(*(ask_exactly(omni, text, workload, _options(workload)) for text in texts))
    return time.monotonic() - began_s


def _result(
    plan: PeersPlan,
    asked: list[Asked],
    generated: list[_Generated],
    batch_s: float | None,
    *,
    threads: int,
    machine: str,
) -> PeersResult:
    ours = Side(
        e2e_s=statistics.median(one.timeline.e2el_s for one in asked),
        ttfp_s=statistics.median(one.timeline.ttfp_s or 0.0 for one in asked),
        rtf=statistics.median(one.timeline.rtf or 0.0 for one in asked),
    )
    single = generated[: len(asked)]
    whole_s = statistics.median(one.e2e_s for one in single)
    theirs = Side(
        e2e_s=whole_s,
        ttfp_s=whole_s,
        rtf=statistics.median(one.e2e_s / one.duration_s for one in single),
    )
    serial_s = sum(one.e2e_s for one in generated[:BATCH])
    return PeersResult(
        model=plan.model,
        machine=machine,
        workload=plan.workload,
        num_prompts=plan.num_prompts,
        transformers_threads=threads,
        transformers=theirs,
        stretto=ours,
        ttft_s=statistics.median(one.timeline.ttft_s or 0.0 for one in asked),
        e2e_ratio=round(ours.e2e_s / theirs.e2e_s, 4),
        ttfp_ratio=round(ours.ttfp_s / theirs.ttfp_s, 4),
        rtf_ratio=round(ours.rtf / theirs.rtf, 4),
        equal=all(
            a.token_ids == g.token_ids and a.codes is not None and np.array_equal(a.codes, g.codes)
            for a, g in zip(asked, single, strict=True)
        ),
        batch16_ratio=None if batch_s is None else round(batch_s / serial_s, 4),
        batch16_stretto_s=batch_s,
        batch16_transformers_s=None if batch_s is None else serial_s,
    )


def tables_of(result: PeersResult) -> list[Table]:
    load = result.workload
    theirs, ours = result.transformers, result.stretto
    rows = [
        ("E2E s", number(theirs.e2e_s, 2), number(ours.e2e_s, 2), number(result.e2e_ratio, 3)),
        ("TTFP s", number(theirs.ttfp_s, 2), number(ours.ttfp_s, 3), number(result.ttfp_ratio, 4)),
        ("RTF", number(theirs.rtf, 3), number(ours.rtf, 3), number(result.rtf_ratio, 3)),
    ]
    if result.batch16_ratio is not None:
        rows.append(
            (
                f"{BATCH} requests, s (one by one; at once)",
                number(result.batch16_transformers_s, 1),
                number(result.batch16_stretto_s, 1),
                number(result.batch16_ratio, 3),
            )
        )
    same = "ids and codes of both equal" if result.equal else "ids or codes DIFFER"
    title = (
        f"{result.model}: {load.input_len} prompt tokens, {load.output_len} text tokens, "
        f"{load.frames} frames, greedy, float32; {result.num_prompts} prompts, medians; {same}"
    )
    columns = ("", f"transformers (threads: {result.transformers_threads})", "stretto", "ratio")
    return [Table(title, columns, tuple(rows))]
