"""What the speech routes ask of a model, and what they tell it: a text, and how it is to sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from stretto.pipeline.pipeline import PipelineRequest

# A speaker of the checkpoint; a voice made after a description; a voice made after a sample.
TaskType = Literal["CustomVoice", "VoiceDesign", "Base"]


class VoiceSample(msgspec.Struct, frozen=True, kw_only=True):
    """A voice to speak like: either its sound or what a speaker encoder made of such.

    `samples` float32 [n] in -1..1, mono. With `ref_text`, what is said in it, the speech goes on as
    the sample ends; without, only the speaker is taken ("x-vector only").
    """

    # Equal keys, equal sound or embedding: whatever is computed from it may be kept under the key.
    content_key: str
    samples: np.ndarray | None = None
    sample_rate: int = 24000
    speaker_embedding: np.ndarray | None = None
    ref_text: str | None = None


class SpeechInput(msgspec.Struct, frozen=True, kw_only=True):
    """A text to be read out. None or empty: as the model does by itself.

    With `pieces` the text is empty; it comes by the handle's `feed` and `end_text`.
    """

    text: str
    pieces: bool = False
    task_type: TaskType
    speaker: str | None = None
    voice: VoiceSample | None = None
    instructions: str | None = None
    # As the model spells it.
    language: str | None = None
    non_streaming_mode: bool | None = None
    # `max_tokens` and `seed`.
    sampling: Mapping[str, Any] = {}
    initial_codec_chunk_frames: int | None = None
    label: str


class SpeechModel(Protocol):
    """A pipeline that reads texts out."""

    @property
    def kinds(self) -> Sequence[TaskType]:
        """What the checkpoint can do; the first is what a request gets that does not say."""

    @property
    def speakers(self) -> Sequence[str]:
        """Its own, lower case; none where voices are designed or cloned."""

    @property
    def languages(self) -> Sequence[str]:
        """What `language` may be besides auto, in the model's own spelling."""

    def prepare(self, speech: SpeechInput) -> PipelineRequest:
        """For a thread of its own: encoding a new voice takes a while.

        Raises:
            InvalidRequest: names the field at fault.
        """
