"""Small vocoders of several shapes, each over the same weights as its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configurations
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference_models

from stretto.models.code2wav import Code2Wav, Code2WavConfig, SplitQuantizerConfig
from tests.models.small import load, save_as, scatter
from tests.reference_tts import plain_rotary, reference_module

# The reference's and ours.
Vocoder = tuple[Any, Code2Wav]

OMNI_SHAPES: dict[str, dict[str, Any]] = {
    "as published, small": {},
    "a window of three": {"sliding_window": 3},
    "other rates": {"upsample_rates": [2, 3], "upsampling_ratios": [3], "decoder_dim": 32},
    "one layer, one codebook": {"num_hidden_layers": 1, "num_quantizers": 1},
    "one ratio": {"upsampling_ratios": [2], "upsample_rates": [4, 2]},
}


def omni_vocoder(directory: Path, changes: dict[str, Any]) -> Vocoder:
    """Qwen3-Omni's."""
    base: dict[str, Any] = {
        "codebook_size": 20, "num_quantizers": 4, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "sliding_window": 8, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
        "decoder_dim": 32, "max_position_embeddings": 8000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **changes,
    }  # fmt: skip
    theirs = configurations.Qwen3OmniMoeCode2WavConfig(**base)
    reference: Any = reference_models.Qwen3OmniMoeCode2Wav(theirs)
    scatter(reference, seed=5)
    # Loud enough to be heard, not so loud that everything is clipped.
    reference.decoder[-1].conv.weight.data *= 0.05
    save_as(directory, reference, "code2wav.")
    config = Code2WavConfig(
        num_codebooks=base["num_quantizers"],
        codebook_size=base["codebook_size"],
        hidden_size=base["hidden_size"],
        num_layers=base["num_hidden_layers"],
        num_heads=base["num_attention_heads"],
        head_dim=base["hidden_size"] // base["num_attention_heads"],
        intermediate_size=base["intermediate_size"],
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=1e4,
        sliding_window=base["sliding_window"],
        upsampling_ratios=tuple(base["upsampling_ratios"]),
        upsample_rates=tuple(base["upsample_rates"]),
        decoder_dim=base["decoder_dim"],
    )
    model = load(directory, lambda source: Code2Wav(source, config), torch.float64)
    return reference.double().eval(), model


TTS_SHAPES: dict[str, dict[str, Any]] = {
    "as published, small": {},
    "a window of three": {"sliding_window": 3},
    "other rates": {"upsample_rates": [2, 3], "upsampling_ratios": [3], "decoder_dim": 32},
    "one layer, two codebooks": {"num_hidden_layers": 1, "num_quantizers": 2},
    "one ratio": {"upsampling_ratios": [2], "upsample_rates": [4, 2]},
    "one width": {"codebook_dim": 32, "latent_dim": 32, "hidden_size": 32, "head_dim": 16},
}


def tts_vocoder(directory: Path, changes: dict[str, Any]) -> Vocoder:
    """The decoder of Qwen3-TTS's 12 Hz tokenizer."""
    base: dict[str, Any] = {
        "codebook_size": 20, "codebook_dim": 24, "num_quantizers": 4, "latent_dim": 40,
        "hidden_size": 32, "intermediate_size": 28, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 8,
        "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "decoder_dim": 32,
        **changes,
    }  # fmt: skip
    configurations = reference_module("core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
    models = reference_module("core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2")
    theirs = configurations.Qwen3TTSTokenizerV2DecoderConfig(**base)
    with plain_rotary():
        reference = models.Qwen3TTSTokenizerV2Decoder(theirs)
    scatter(reference, seed=5)
    for name, parameter in reference.named_parameters():
        if name.endswith("cluster_usage"):
            parameter.data.uniform_(0.5, 1.5)
            # Never used in training: its sum is not divided by nothing.
            parameter.data[3] = 0.0
            reference.get_parameter(name.replace("cluster_usage", "embedding_sum")).data[3] *= 1e-5
    # Loud enough to be heard, not so loud that everything is clipped.
    reference.decoder[-1].conv.weight.data *= 0.02
    save_as(directory, reference, "decoder.")
    config = Code2WavConfig(
        num_codebooks=base["num_quantizers"],
        codebook_size=base["codebook_size"],
        hidden_size=base["hidden_size"],
        num_layers=base["num_hidden_layers"],
        num_heads=base["num_attention_heads"],
        head_dim=base["head_dim"],
        intermediate_size=base["intermediate_size"],
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=1e4,
        sliding_window=base["sliding_window"],
        upsampling_ratios=tuple(base["upsampling_ratios"]),
        upsample_rates=tuple(base["upsample_rates"]),
        decoder_dim=base["decoder_dim"],
        quantizer=SplitQuantizerConfig(
            codebook_dim=base["codebook_dim"], latent_dim=base["latent_dim"]
        ),
    )
    model = load(directory, lambda source: Code2Wav(source, config), torch.float64)
    return reference.double().eval(), model


VOCODERS = {
    **{name: (omni_vocoder, changes) for name, changes in OMNI_SHAPES.items()},
    **{f"12 Hz, {name}": (tts_vocoder, changes) for name, changes in TTS_SHAPES.items()},
}
