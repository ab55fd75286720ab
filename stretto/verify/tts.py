"""Qwen3-TTS against its reference, the `qwen-tts` package: each task of the checkpoint's kind.

A text that comes in pieces must give the codes of the whole text, in every mode.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.api import Answer, Omni, collect
from stretto.models.qwen3_tts.spec import ModelKind
from stretto.pipeline.tts_frontend import TtsFrontend, Voice
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
from stretto.verify.qwen_tts import load_reference, reference_codes

TEXT = "Computers can learn to speak with very small models."
SAMPLE_TEXT = "It is what was said before."
SAMPLE_RATE = 24000
# Where the pieces of a text are cut: within words and between them.
PIECE_CHARS = 7


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One way to have a text read out, in our words; the reference's follow from them."""

    name: str
    instructions: str | None = None
    language: str | None = None
    # A voice to speak like, and what is said in its sample.
    cloned: bool = False
    sample_text: str | None = None
    text_first: bool
    in_pieces: bool = False


def tasks_of(kind: ModelKind, *, instructed: bool) -> tuple[Task, ...]:
    """What a kind of checkpoint is asked for."""
    match kind:
        case "custom_voice":
            how = "Very happy." if instructed else None
            return (
                Task(name="text first", text_first=True),
                Task(name="text beside", text_first=False),
                Task(name="in pieces", text_first=False, in_pieces=True),
                Task(name="told how", instructions=how, language="auto", text_first=True),
            )
        case "voice_design":
            old = "An old man, out of breath."
            return (
                Task(name="text first", instructions=old, text_first=True),
                Task(name="text beside", instructions=old, text_first=False),
                Task(name="in pieces", instructions=old, text_first=False, in_pieces=True),
            )
        case "base":
            return (
                Task(name="speaker", cloned=True, text_first=False),
                Task(name="continued", cloned=True, sample_text=SAMPLE_TEXT, text_first=False),
                Task(name="text first", cloned=True, sample_text=SAMPLE_TEXT, text_first=True),
                Task(name="in pieces", cloned=True, text_first=False, in_pieces=True),
            )


def sample_sound() -> np.ndarray:
    """Two seconds of something that is not silence, float32."""
    rng = np.random.default_rng(7)
    time = np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE
    tone = 0.3 * np.sin(2 * np.pi * (140 + 40 * np.sin(2 * np.pi * 1.5 * time)) * time)
    return (tone + 0.01 * rng.standard_normal(len(time))).astype(np.float32)


def verify_tts(
    model: str, *, cache_dir: Path, reference_dir: Path, on_result: OnResult
) -> list[CaseResult]:
    """Raises ConfigError when the reference is not in `reference_dir`."""
    results: list[CaseResult] = []
    references: dict[str, Reference] = {}
    for mode in modes():
        with Omni(
            model,
            inline=mode.inline,
            async_chunk=mode.async_chunk,
            cache_dir=cache_dir,
            flags=settings_of(mode, "talker"),
        ) as omni:
            if not references:
                references = reference_answers(omni, reference_dir)
            for concurrency in CONCURRENCY:
                for task, answer in _answers(omni, concurrency):
                    reference = references[task.name]
                    result = compared(mode, concurrency, task.name, answer, reference)
                    results.append(result)
                    on_result(result)
    return results


def reference_answers(omni: Omni, reference_dir: Path) -> dict[str, Reference]:
    """What the reference says, by the task's name."""
    frontend = _frontend(omni)
    spec = frontend.spec
    model = load_reference(omni.model.directory, reference_dir)
    references = {}
    for task in _tasks(omni):
        asked: dict[str, Any] = {}
        if spec.model_kind == "custom_voice":
            asked["speaker"] = next(iter(spec.talker.speakers))
        if spec.model_kind != "base":
            asked["instruct"] = task.instructions
        if task.cloned:
            asked |= {"ref_audio": (sample_sound(), SAMPLE_RATE), "ref_text": task.sample_text}
        codes, audio = reference_codes(
            model,
            TEXT,
            kind=spec.model_kind,
            language=task.language,
            non_streaming_mode=task.text_first,
            repetition_penalty=REPETITION_PENALTY,
            # Its last token gives no frame.
            max_new_tokens=MAX_FRAMES + 1,
            **asked,
        )
        references[task.name] = Reference((), codes, audio)
    return references


def _frontend(omni: Omni) -> TtsFrontend:
    assert isinstance(omni.frontend, TtsFrontend)
    return omni.frontend


def _tasks(omni: Omni) -> tuple[Task, ...]:
    frontend = _frontend(omni)
    return tasks_of(frontend.spec.model_kind, instructed=frontend.takes_instructions)


def _answers(omni: Omni, concurrency: int) -> list[tuple[Task, Answer]]:
    """Each task's answer; with several at once, different tasks side by side."""
    tasks = _tasks(omni)
    answers: list[tuple[Task, Answer]] = []
    if concurrency == 1:
        for task in tasks:
            if task.in_pieces:
                answers.append((task, collect(list(omni.speak(_pieces(), **_settings(task))))))
            else:
                answers.append((task, omni.generate(TEXT, **_settings(task))))
        return answers
    whole = [task for task in tasks if not task.in_pieces]
    asked = list(itertools.islice(itertools.cycle(whole), concurrency))
    together = omni.generate_each([(TEXT, _settings(task)) for task in asked])
    return list(zip(asked, together, strict=True))


def _pieces() -> list[str]:
    return [TEXT[at : at + PIECE_CHARS] for at in range(0, len(TEXT), PIECE_CHARS)]


def _settings(task: Task) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "instructions": task.instructions,
        "language": task.language,
        "text_first": None if task.in_pieces else task.text_first,
        "sampling": {
            "temperature": 0.0,
            "repetition_penalty": REPETITION_PENALTY,
            "max_tokens": MAX_FRAMES,
        },
        "return_codes": True,
    }
    if task.cloned:
        settings["voice"] = Voice(
            samples=sample_sound(), sample_rate=SAMPLE_RATE, text=task.sample_text
        )
    return settings
