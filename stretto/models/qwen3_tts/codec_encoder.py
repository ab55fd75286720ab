"""Sound to codes: the encoder of the 12 Hz codec, which is Mimi's, as transformers has it.

Only voices that are cloned from a recording need it, once each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.errors import CheckpointError
from stretto.models.qwen3_tts.spec import CodecEncoderSpec
from stretto.models.weights import Checkpoint, ParameterSource


def empty_encoder(spec: CodecEncoderSpec) -> Any:
    """transformers' Mimi without what it decodes with; its weights are not the checkpoint's yet."""
    # Takes seconds to import, and who clones no voice does without.
    from transformers import MimiConfig, MimiModel

    config = MimiConfig(**spec.mimi_config)
    # The codec was trained with transformers of before this window; the reference looks as far
    # back as there is.
    config.sliding_window = config.max_position_embeddings
    model: Any = MimiModel(config)
    model.upsample = model.decoder_transformer = model.decoder = None
    return model.eval().requires_grad_(False)


class CodecEncoder:
    def __init__(self, directory: Path, spec: CodecEncoderSpec, *, device: torch.device) -> None:
        """`directory` is the speech tokenizer's own.

        Raises:
            CheckpointError: its config is not Mimi's, or its tensors are not the config's.
        """
        self.spec = spec
        try:
            self._model = empty_encoder(spec)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{directory}: encoder_config: {error}") from error
        checkpoint = Checkpoint(directory, dtype=torch.float32, device=device)
        self._model.load_state_dict(checkpoint.load(self._tensors))
        self._model.to(device)
        self._device = device

    def _tensors(self, source: ParameterSource) -> dict[str, Tensor]:
        return {
            name: source.take(f"encoder.{name}", *own.shape)
            for name, own in self._model.state_dict().items()
        }

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Samples [n] at the spec's rate to int64 [frames, codebooks]; a started frame counts."""
        spec = self.spec
        encoded = self._model.encode(
            samples.to(self._device)[None, None],
            num_quantizers=spec.num_codebooks,
            return_dict=True,
        )
        num_frames = -(-len(samples) // spec.samples_per_frame)
        codes: Tensor = encoded.audio_codes[0, :, :num_frames]
        return codes.T
