"""What a comparison is made of: modes, references, results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from stretto.api import Answer

CODEC_CHUNKS = (1, 3, 25)
CONCURRENCY = (1, 4)
# float32 sums in another order: errors seen are below 2e-5 (FACTS, "Code2Wav, stateful").
AUDIO_TOLERANCE = 1e-4
# Small enough that a long prompt takes several prefill chunks.
PREFILL_CHUNK_TOKENS = 48
MAX_FRAMES = 40
REPETITION_PENALTY = 1.05


class Reference(msgspec.Struct, frozen=True):
    """What the reference gave. `codes` int16 [frames, codebooks], `audio` float32 [samples]."""

    token_ids: tuple[int, ...]
    codes: np.ndarray
    audio: np.ndarray


class Mode(msgspec.Struct, frozen=True):
    inline: bool
    async_chunk: bool
    codec_chunk_frames: int

    @property
    def label(self) -> str:
        stages = "inline" if self.inline else "processes"
        chunking = "async_chunk" if self.async_chunk else "one chunk"
        return f"{stages}, {chunking}, {self.codec_chunk_frames} frames"


class CaseResult(msgspec.Struct, frozen=True):
    mode: Mode
    concurrency: int
    question: str
    text_equal: bool
    codes_equal: bool
    samples_equal: bool
    audio_max_abs_diff: float

    @property
    def passed(self) -> bool:
        return (
            self.text_equal
            and self.codes_equal
            and self.samples_equal
            and self.audio_max_abs_diff <= AUDIO_TOLERANCE
        )

    @property
    def label(self) -> str:
        return f"{self.question}: {self.mode.label}, {self.concurrency} at once"


class Summary(msgspec.Struct, frozen=True):
    """The last line of `stretto verify`, as JSON."""

    text_equal: bool
    codes_equal: bool
    audio_max_abs_diff: float
    samples_equal: bool
    cases: int
    failed: list[str]


OnResult = Callable[[CaseResult], None]


def modes() -> Iterator[Mode]:
    for inline, async_chunk, frames in itertools.product(
        (True, False), (True, False), CODEC_CHUNKS
    ):
        yield Mode(inline, async_chunk, frames)


def settings_of(mode: Mode, *stages: str) -> dict[str, Any]:
    """Deployment settings of a mode: in float32 on the CPU, chunks as it says.

    `stages` are the autoregressive ones; the vocoder follows on the last of them.
    """
    cpu = {"devices": "cpu", "dtype": "float32"}
    drawing = {**cpu, "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS}
    codec = {"codec_chunk_frames": mode.codec_chunk_frames}
    return {
        "stages": {**dict.fromkeys(stages, drawing), "code2wav": cpu},
        "connectors": {f"{stages[-1]}->code2wav": {"codec": codec}},
    }


def compared(
    mode: Mode, concurrency: int, question: str, answer: Answer, reference: Reference
) -> CaseResult:
    codes = answer.codes if answer.codes is not None else np.zeros((0, 0), np.int16)
    samples_equal = answer.audio.shape == reference.audio.shape
    common = min(len(answer.audio), len(reference.audio))
    difference = np.abs(answer.audio[:common] - reference.audio[:common])
    return CaseResult(
        mode=mode,
        concurrency=concurrency,
        question=question,
        text_equal=answer.token_ids == reference.token_ids,
        codes_equal=bool(np.array_equal(codes, reference.codes)),
        samples_equal=samples_equal,
        audio_max_abs_diff=float(difference.max(initial=0.0)),
    )


def summarize(results: list[CaseResult]) -> Summary:
    return Summary(
        text_equal=all(result.text_equal for result in results),
        codes_equal=all(result.codes_equal for result in results),
        audio_max_abs_diff=float(f"{max(r.audio_max_abs_diff for r in results):.3g}"),
        samples_equal=all(result.samples_equal for result in results),
        cases=len(results),
        failed=[result.label for result in results if not result.passed],
    )
