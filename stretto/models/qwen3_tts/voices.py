"""A recording of somebody, to what makes the Talker sound like them.

    samples ─> 24 kHz ─┬─> speaker encoder ─> one row in place of a speaker's
                       └─> codec encoder ───> frames that the prompt begins with, if wanted

Whoever has no text to a recording uses the row alone. This module checks the recording; where it
comes from and how long a voice is kept is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch

from stretto.errors import CheckpointError, InvalidRequest
from stretto.models.qwen3_tts.codec_encoder import CodecEncoder
from stretto.models.qwen3_tts.speaker_encoder import SpeakerEncoder
from stretto.models.qwen3_tts.spec import SPEECH_TOKENIZER, TtsSpec
from stretto.models.weights import Checkpoint

# Shorter, there is no voice to hear; longer, the frames would fill the prompt.
SHORTEST_S = 1.0
LONGEST_S = 30.0
LOWEST_RATE = 4_000
HIGHEST_RATE = 384_000


@dataclass(frozen=True)
class ClonedVoice:
    # float32 [H].
    speaker_embedding: np.ndarray
    # int16 [frames, codebooks]; None where only the row was asked for.
    ref_codes: np.ndarray | None


class VoiceEncoder:
    """Both encoders of a checkpoint that clones voices; the codec's is loaded on first use."""

    def __init__(
        self, model_dir: Path, spec: TtsSpec, *, device: torch.device | None = None
    ) -> None:
        """Reads the speaker encoder from a checkpoint's directory.

        Raises:
            CheckpointError: the checkpoint clones no voices, or its tensors are not the model's.
        """
        speaker = spec.speaker_encoder
        if speaker is None:
            raise CheckpointError(
                f"{model_dir}: a {spec.model_kind} checkpoint clones no voices; a base one does"
            )
        self.spec = spec
        self._model_dir = model_dir
        self._device = device or torch.device("cpu")
        checkpoint = Checkpoint(model_dir, dtype=torch.float32, device=self._device)
        self._speaker = checkpoint.load(lambda source: SpeakerEncoder(source, speaker))
        self._codec: CodecEncoder | None = None

    def encode(
        self, samples: np.ndarray, sample_rate: int, *, with_codes: bool = True
    ) -> ClonedVoice:
        """The voice of mono samples, float32 [n] in -1..1. Not for two threads at once.

        Raises:
            InvalidRequest: the recording is too short, too long, or no sound.
        """
        _check(samples, sample_rate)
        heard = self._at(samples, sample_rate, self._speaker.spec.sample_rate)
        with torch.inference_mode():
            row = self._speaker.embed(heard).cpu().numpy()
        if not with_codes:
            return ClonedVoice(row, None)
        if self._codec is None:
            self._codec = CodecEncoder(
                self._model_dir / SPEECH_TOKENIZER, self.spec.codec_encoder, device=self._device
            )
        codes = self._codec.encode(
            self._at(samples, sample_rate, self.spec.codec_encoder.sample_rate)
        )
        return ClonedVoice(row, codes.to(torch.int16).cpu().numpy())

    def _at(self, samples: np.ndarray, sample_rate: int, wanted: int) -> torch.Tensor:
        mono = np.ascontiguousarray(samples, dtype=np.float32)
        if sample_rate != wanted:
            mono = soxr.resample(mono, sample_rate, wanted)
        return torch.from_numpy(mono).to(self._device)


def _check(samples: np.ndarray, sample_rate: int) -> None:
    if not LOWEST_RATE <= sample_rate <= HIGHEST_RATE:
        raise InvalidRequest(
            "ref_audio",
            f"ref_audio has {sample_rate} samples a second; "
            f"{LOWEST_RATE} to {HIGHEST_RATE} are supported",
        )
    if samples.ndim != 1:
        raise InvalidRequest(
            "ref_audio", f"ref_audio has {samples.ndim} axes; mono samples have one"
        )
    duration_s = len(samples) / sample_rate
    if not SHORTEST_S <= duration_s <= LONGEST_S:
        raise InvalidRequest(
            "ref_audio",
            f"ref_audio is {duration_s:.2f} s long; {SHORTEST_S:.0f} to {LONGEST_S:.0f} s are "
            f"needed",
        )
    if not np.isfinite(samples).all():
        raise InvalidRequest("ref_audio", "ref_audio has samples that are no finite numbers")
