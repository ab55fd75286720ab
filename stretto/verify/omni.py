"""Qwen3-Omni against transformers' `generate`: greedy, one request at a time, decoded in one shot.

An answer of one token, which `generate` cannot speak, must be spoken alike in every mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto.api import Answer, Omni
from stretto.pipeline.omni_frontend import Options
from stretto.verify.cases import (
    CONCURRENCY,
    MAX_FRAMES,
    REPETITION_PENALTY,
    CaseResult,
    OnResult,
    Reference,
    compared,
    modes,
    settings_of,
)

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


def verify_omni(model: str, *, cache_dir: Path, on_result: OnResult) -> list[CaseResult]:
    results: list[CaseResult] = []
    references: dict[str, Reference] = {}
    single: Reference | None = None

    def note(result: CaseResult) -> None:
        results.append(result)
        on_result(result)

    for mode in modes():
        with Omni(
            model,
            inline=mode.inline,
            async_chunk=mode.async_chunk,
            cache_dir=cache_dir,
            flags=settings_of(mode, "thinker", "talker"),
        ) as omni:
            if not references:
                references = transformers_references(omni)
            for concurrency in CONCURRENCY:
                for question, answer in _answers(omni, concurrency):
                    reference = references[question.name]
                    note(compared(mode, concurrency, question.name, answer, reference))
            answer = omni.generate(SINGLE.text, **_settings(SINGLE))
            if single is None:
                assert answer.codes is not None, "an answer of one token was not spoken"
                single = Reference(answer.token_ids, answer.codes, answer.audio)
            note(compared(mode, 1, SINGLE.name, answer, single))
    return results


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
