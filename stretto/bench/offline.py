"""Requests to a pipeline in this program, without a server: the workload, and one request's times.

A workload fixes what is asked and what comes back: so many prompt tokens, text tokens and frames,
no more and no fewer, whatever the weights say. Then times of different modes can be compared.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.api import AsyncOmni
from stretto.bench.datasets import RandomWords
from stretto.errors import ConfigError, RequestFailed
from stretto.events import AudioDelta, Failed, Finished, TextDelta
from stretto.metrics import Timeline


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the whole prompt, template included; text tokens and frames of the answer."""

    input_len: int
    output_len: int
    frames: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "frames"):
            if msgspec.structs.asdict(self)[name] < 1:
                raise ConfigError(f"{name} must be 1 or more")

    def options(self, seed: int) -> dict[str, Any]:
        """How a request is sampled: as deployed, its lengths fixed."""
        length = self.output_len
        text = {"ignore_eos": True, "min_tokens": length, "max_tokens": length, "seed": seed}
        speech = {"ignore_eos": True, "max_tokens": self.frames}
        return {"sampling": text, "talker_sampling": speech}


class Asked(msgspec.Struct, frozen=True):
    """One answer. Times by time.monotonic(), as in traces; `codes` int16 [frames, codebooks]."""

    request_id: str
    timeline: Timeline
    token_ids: tuple[int, ...]
    num_frames: int
    codes: np.ndarray | None


class Prompts:
    """Random prompts of an exact number of tokens, template included, for one model."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        self._words = RandomWords(Path(omni.frontend.tokenizer_file))
        self._template_tokens = self._count(self._words.text(1, seed=0)) - 1

    def text(self, num_tokens: int, *, seed: int) -> str:
        """Raises ConfigError when the template alone is longer."""
        own = num_tokens - self._template_tokens
        if own < 1:
            raise ConfigError(
                f"a prompt of {num_tokens} tokens was asked for; the chat template alone has "
                f"{self._template_tokens}"
            )
        text = self._words.text(own, seed=seed)
        assert self._count(text) == num_tokens, "the template joined tokens"
        return text

    def _count(self, text: str) -> int:
        return len(self._omni.prepare(text).prompt_token_ids)


async def ask_exactly(
    omni: AsyncOmni, text: str, workload: Workload, options: dict[str, Any]
) -> Asked:
    """Sends a request and hears it to its end.

    Raises:
        RequestFailed: it failed, or its answer has other lengths than the workload's. Besides, what
            `submit` raises.
    """
    timeline = Timeline(time.monotonic())
    handle = omni.submit(text, **options)
    token_ids: list[int] = []
    codes: list[np.ndarray] = []
    num_frames = 0
    async for event in handle:
        now_s = time.monotonic()
        match event:
            case TextDelta():
                token_ids += event.token_ids
                timeline.text_arrived(now_s, len(event.token_ids))
            case AudioDelta():
                num_frames += event.num_frames
                timeline.sound_arrived(now_s, len(event.samples), event.sample_rate)
                if event.codes is not None:
                    codes.append(event.codes)
            case Finished():
                timeline.ended_s = now_s
            case Failed(error=error):
                raise error
    if (len(token_ids), num_frames) != (workload.output_len, workload.frames):
        raise RequestFailed(
            f"{len(token_ids)} tokens and {num_frames} frames came, not {workload.output_len} and "
            f"{workload.frames}: the run would compare unlike work"
        )
    whole = np.concatenate(codes) if codes else None
    return Asked(handle.request_id, timeline, tuple(token_ids), num_frames, whole)
