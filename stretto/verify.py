"""Whether stretto gives what transformers gives: every mode against `generate`, on any checkpoint.

    reference   transformers' generate, greedy, one request at a time; its codes decoded in one shot
    compared    inline and process stages x async_chunk on and off x codec chunks 1, 3, 25
                x 1 and 4 requests at once

Text ids and all codebooks must be equal, samples equal in number and within `AUDIO_TOLERANCE`.
An answer of one token, which `generate` cannot speak, must be spoken alike in every mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from stretto.api import Answer, Omni
from stretto.pipeline.omni_frontend import Options

CODEC_CHUNKS = (1, 3, 25)
CONCURRENCY = (1, 4)
# float32 sums in another order: errors seen are below 2e-5 (FACTS, "Code2Wav, stateful").
AUDIO_TOLERANCE = 1e-4
# Small enough that the long prompt takes several prefill chunks.
PREFILL_CHUNK_TOKENS = 48
MAX_FRAMES = 40
REPETITION_PENALTY = 1.05

SHORT = "Computers can learn to speak with very small models."
LONG = " ".join(
    f"This is sentence number {number} of a prompt that is read in several pieces."
    for number in ("one", "two", "three", "four", "five", "six", "seven", "eight")
)
BRIEF = "Hello there, my friend."


class Question(msgspec.Struct, frozen=True):
    """A prompt and how long its answer may be."""

    name: str
    text: str
    max_tokens: int


QUESTIONS = (
    Question("short", SHORT, 32),
    Question("long prompt", LONG, 24),
    Question("two tokens", BRIEF, 2),
)
SINGLE = Question("one token", BRIEF, 1)


class Reference(msgspec.Struct, frozen=True):
    """What transformers gave. `codes` int16 [frames, codebooks], `audio` float32 [samples]."""

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


def verify(
    model: str, *, cache_dir: Path, on_result: Callable[[CaseResult], None]
) -> list[CaseResult]:
    """All cases on one checkpoint, in float32 on the CPU; `on_result` hears of each as it ends."""
    results: list[CaseResult] = []
    references: dict[str, Reference] = {}
    single: Reference | None = None

    def note(result: CaseResult) -> None:
        results.append(result)
        on_result(result)

    for inline, async_chunk, frames in itertools.product(
        (True, False), (True, False), CODEC_CHUNKS
    ):
        mode = Mode(inline, async_chunk, frames)
        with Omni(
            model, inline=inline, async_chunk=async_chunk, cache_dir=cache_dir, flags=_flags(frames)
        ) as omni:
            if not references:
                references = transformers_references(omni)
            for concurrency in CONCURRENCY:
                for question, answer in _answers(omni, concurrency):
                    note(_result(mode, concurrency, question, answer, references[question.name]))
            answer = omni.generate(SINGLE.text, **_settings(SINGLE))
            if single is None:
                assert answer.codes is not None, "an answer of one token was not spoken"
                single = Reference(answer.token_ids, answer.codes, answer.audio)
            note(_result(mode, 1, SINGLE, answer, single))
    return results


def summarize(results: list[CaseResult]) -> Summary:
    return Summary(
        text_equal=all(result.text_equal for result in results),
        codes_equal=all(result.codes_equal for result in results),
        audio_max_abs_diff=float(f"{max(r.audio_max_abs_diff for r in results):.3g}"),
        samples_equal=all(result.samples_equal for result in results),
        cases=len(results),
        failed=[result.label for result in results if not result.passed],
    )


def transformers_references(omni: Omni) -> dict[str, Reference]:
    """What transformers' `generate` gives for `QUESTIONS`, by name."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        omni.model.directory, dtype=torch.float32, local_files_only=True
    )
    return {question.name: _reference(model, omni, question) for question in QUESTIONS}


def _reference(model: Any, omni: Omni, question: Question) -> Reference:
    request = omni.frontend.prepare(question.text, Options(**_settings(question)))
    assert request.speech is not None
    prompt = torch.tensor([request.prompt_token_ids])
    with captured_codes(model.code2wav) as captured:
        sequences, _ = model.generate(
            input_ids=prompt,
            speaker=request.speech.speaker,
            return_audio=True,
            thinker_max_new_tokens=question.max_tokens,
            thinker_eos_token_id=list(request.sampling.stop_token_ids),
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_repetition_penalty=REPETITION_PENALTY,
            # Its last token gives no frame.
            talker_max_new_tokens=MAX_FRAMES + 1,
        )
    (codes,) = captured
    with torch.inference_mode():
        # Not `generate`'s own sound: that is decoded in pieces, short of samples at each border.
        audio = model.code2wav(codes)[0, 0].float().numpy()
    return Reference(
        token_ids=tuple(sequences[0, prompt.shape[1] :].tolist()),
        codes=codes[0].T.to(torch.int16).numpy(),
        audio=audio,
    )


@contextmanager
def captured_codes(code2wav: Any) -> Iterator[list[torch.Tensor]]:
    """The codes that `generate` hands to the vocoder, [1, codebooks, frames] each."""
    captured: list[torch.Tensor] = []
    decode = code2wav.chunked_decode

    def listen(codes: torch.Tensor, **options: Any) -> torch.Tensor:
        captured.append(codes)
        waveform: torch.Tensor = decode(codes, **options)
        return waveform

    code2wav.chunked_decode = listen
    try:
        yield captured
    finally:
        del code2wav.chunked_decode


def _flags(codec_chunk_frames: int) -> dict[str, Any]:
    """Settings of a run: greedy, in float32 on the CPU, chunks as given."""
    stage = {"devices": "cpu", "dtype": "float32", "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS}
    return {
        "stages": {
            "thinker": stage,
            "talker": stage,
            "code2wav": {"devices": "cpu", "dtype": "float32"},
        },
        "connectors": {"talker->code2wav": {"codec": {"codec_chunk_frames": codec_chunk_frames}}},
    }


def _settings(question: Question) -> dict[str, Any]:
    return {
        "sampling": {"temperature": 0.0, "max_tokens": question.max_tokens},
        "talker_sampling": {
            "temperature": 0.0,
            "repetition_penalty": REPETITION_PENALTY,
            "max_tokens": MAX_FRAMES,
        },
        "return_codes": True,
    }


def _answers(omni: Omni, concurrency: int) -> list[tuple[Question, Answer]]:
    """Each question's answer; with several at once, different questions side by side."""
    if concurrency == 1:
        return [
            (question, omni.generate(question.text, **_settings(question)))
            for question in QUESTIONS
        ]
    asked = list(itertools.islice(itertools.cycle(QUESTIONS), concurrency))
    answers = omni.generate_each([(question.text, _settings(question)) for question in asked])
    return list(zip(asked, answers, strict=True))


def _result(
    mode: Mode, concurrency: int, question: Question, answer: Answer, reference: Reference
) -> CaseResult:
    codes = answer.codes if answer.codes is not None else np.zeros((0, 0), np.int16)
    samples_equal = answer.audio.shape == reference.audio.shape
    common = min(len(answer.audio), len(reference.audio))
    difference = np.abs(answer.audio[:common] - reference.audio[:common])
    return CaseResult(
        mode=mode,
        concurrency=concurrency,
        question=question.name,
        text_equal=answer.token_ids == reference.token_ids,
        codes_equal=bool(np.array_equal(codes, reference.codes)),
        samples_equal=samples_equal,
        audio_max_abs_diff=float(difference.max(initial=0.0)),
    )
