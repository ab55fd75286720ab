"""What stages hand each other: one frozen struct per purpose, and the chunk that carries them.

    thinker ══ ThinkerPrompt, SpokenTokens ══> talker ══ CodecFrames ══> code2wav
    client ═══ SpokenTokens ═════════════════> talker ══ CodecFrames ══> code2wav

The Talker looks its text rows up by token id, so ids are all that the first edge carries: one id
per decode step, whatever the length of the history.
"""

from __future__ import annotations

import msgspec
import numpy as np


class ThinkerPrompt(msgspec.Struct, frozen=True, tag=True):
    """A piece of the prompt as the Thinker's prefill got to it.

    `user_ids` are the ids of the user's segments in order, int32 [n]. `head_ids` opens the answer
    (`<|im_start|>assistant\\n`), int32 [3], and comes with the last piece only.
    """

    user_ids: np.ndarray
    head_ids: np.ndarray | None = None


class SpokenTokens(msgspec.Struct, frozen=True, tag=True):
    """Ids of the text that is to be spoken, in order, int32 [n]."""

    token_ids: np.ndarray


class CodecFrames(msgspec.Struct, frozen=True, tag=True):
    """Codec frames in order, int16 [n, num_codebooks]; one frame is 80 ms at 12.5 Hz.

    The first of a stream say how many frames its first portion has (`bridges/codec_chunks.py`).
    """

    codes: np.ndarray
    initial_frames: int | None = None


Payload = ThinkerPrompt | SpokenTokens | CodecFrames


class Chunk(msgspec.Struct, frozen=True):
    """One hand-over on one edge. `index` counts 0, 1, 2, ... per request; `last` is the end."""

    request_id: str
    index: int
    last: bool
    payloads: tuple[Payload, ...]


# ---- what a step gave for one request, before a bridge makes payloads of it --------------------


class TextStep(msgspec.Struct, frozen=True):
    """One step of a stage that writes text: prompt positions computed, a token if one was drawn.

    `ends` is None while the answer goes on; then "stop" for an end token or string, "length" for
    a limit.
    """

    num_prompt_tokens: int
    token_id: int | None
    ends: str | None


class SpeechStep(msgspec.Struct, frozen=True):
    """One step of a stage that speaks: its codec frame, int16 [num_codebooks], if it gave one."""

    frame: np.ndarray | None


StageStep = TextStep | SpeechStep
