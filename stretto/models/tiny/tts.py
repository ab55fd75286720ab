"""Qwen3-TTS checkpoints, of each kind that is published.

transformers has no class for them, so the names and shapes of their weights are those that our own
loaders ask for, and the reference implementation is the test that they are all. Only the codec's
encoder, which is Mimi's, comes from transformers.

    directory/
      config.json  generation_config.json  model.safetensors  tokenizer.json ...
      speech_tokenizer/
        config.json  preprocessor_config.json  model.safetensors
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from stretto.models.code2wav import Code2Wav
from stretto.models.qwen3_tts.speaker_encoder import SpeakerEncoder
from stretto.models.qwen3_tts.spec import (
    MODEL_TYPE,
    SPEECH_TOKENIZER,
    TOKENIZER_TYPE,
    ModelKind,
    TtsSpec,
    read_spec,
)
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.tiny.recipe import (
    CODE_GROUPS,
    CODEBOOK,
    CODEC_EMBEDDING_STD,
    CODEC_VOCABULARY,
    HEAD_DIM,
    LAYER_GAIN,
    LOGIT_STD,
    MAX_POSITIONS,
    RESIDUAL_UNIT_GAIN,
    WAVEFORM_GAIN,
    generator,
    vector_mean_and_std,
)
from stretto.models.tiny.tokenizer import TEXT_VOCABULARY, tokenizer_config, train_tokenizer
from stretto.models.weights import DeclaredParameters, Shape

KINDS: tuple[str, ...] = get_args(ModelKind)
DEFAULT_KIND = "custom_voice"


@dataclass(frozen=True, kw_only=True)
class TtsSize:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    text_hidden: int
    predictor_layers: int
    predictor_intermediate: int
    codec_hidden: int
    codec_layers: int
    codec_heads: int
    codec_intermediate: int
    codebook_dim: int
    latent_dim: int
    decoder_dim: int


TTS_SIZES = {
    # No two widths are equal that are not so in the published models.
    "tiny": TtsSize(
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate=512,
        text_hidden=320,
        predictor_layers=3,
        predictor_intermediate=384,
        codec_hidden=128,
        codec_layers=4,
        codec_heads=4,
        codec_intermediate=256,
        codebook_dim=96,
        latent_dim=224,
        decoder_dim=192,
    )
}

# Published are two sizes. In the larger the code predictor is narrower than the Talker, and only
# that one designs voices; the smaller one takes no instructions.
MODEL_SIZE = {"custom_voice": "1b7", "voice_design": "1b7", "base": "0b6"}
NARROWER = {"1b7": 64, "0b6": 0}

# Qwen3-TTS's own ids: the codec vocabulary is small enough to be kept as it is.
CODEC_IDS = {
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_think_id": 2154,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
}
LANGUAGES = {
    "english": 2050,
    "german": 2053,
    "chinese": 2055,
    "japanese": 2058,
    "beijing_dialect": 2074,
}
SPEAKERS = {"vivian": 3065, "ryan": 3061, "dylan": 2878}
DIALECTS = {"vivian": False, "ryan": False, "dylan": "beijing_dialect"}

# What the encoder gives beyond the codes that are spoken; the published one has 32.
ENCODER_CODE_GROUPS = 20


def write_tts(directory: Path, *, size: str, kind: str, seed: int) -> None:
    tokenizer = train_tokenizer()
    config = _config(TTS_SIZES[size], kind, tokenizer)
    codec_config = _codec_config(TTS_SIZES[size])
    spec = read_spec(config, codec_config, str(directory))
    codec = directory / SPEECH_TOKENIZER
    codec.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    for path, content in (
        (directory / "config.json", config),
        (directory / "generation_config.json", GENERATION_CONFIG),
        (
            directory / "tokenizer_config.json",
            tokenizer_config(processor_class="Qwen3TTSProcessor", model_max_length=MAX_POSITIONS),
        ),
        (codec / "config.json", codec_config),
        (codec / "preprocessor_config.json", PREPROCESSOR_CONFIG),
    ):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(_weights(_model_shapes(spec), seed), directory / "model.safetensors")
    save_file(_codec_weights(spec, seed), codec / "model.safetensors")


# Configuration

GENERATION_CONFIG = {
    "do_sample": False,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.05,
    "subtalker_dosample": False,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    # It never ends by itself: ten seconds of sound.
    "max_new_tokens": 125,
}
PREPROCESSOR_CONFIG = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "sampling_rate": 24000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "chunk_length_s": None,
    "overlap": None,
}


def _config(size: TtsSize, kind: str, tokenizer: Tokenizer) -> dict[str, Any]:
    token_id = tokenizer.get_vocab()
    model_size = MODEL_SIZE[kind]
    predictor = {
        **_decoder_config(size, size.hidden - NARROWER[model_size], size.predictor_layers),
        "intermediate_size": size.predictor_intermediate,
        "vocab_size": CODEBOOK,
        "num_code_groups": CODE_GROUPS,
        "rope_scaling": None,
    }
    has_speakers = kind == "custom_voice"
    talker = {
        **_decoder_config(size, size.hidden, size.layers),
        "intermediate_size": size.intermediate,
        "code_predictor_config": predictor,
        "vocab_size": CODEC_VOCABULARY,
        "text_vocab_size": TEXT_VOCABULARY,
        "text_hidden_size": size.text_hidden,
        "num_code_groups": CODE_GROUPS,
        "rope_scaling": {
            "rope_type": "default",
            "type": "default",
            "interleaved": True,
            # Time, height and width share half a head.
            "mrope_section": [12, 10, 10],
        },
        "position_id_per_seconds": 13,
        "spk_id": SPEAKERS if has_speakers else {},
        "spk_is_dialect": DIALECTS if has_speakers else {},
        "codec_language_id": LANGUAGES,
        **CODEC_IDS,
    }
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "tokenizer_type": TOKENIZER_TYPE,
        "tts_model_size": model_size,
        "tts_model_type": kind,
        "talker_config": talker,
        "im_start_token_id": token_id["<|im_start|>"],
        "im_end_token_id": token_id["<|im_end|>"],
        "assistant_token_id": token_id["assistant"],
        "user_token_id": token_id["user"],
        "tts_pad_token_id": token_id["<tts_pad>"],
        "tts_bos_token_id": token_id["<tts_text_bos>"],
        "tts_eos_token_id": token_id["<tts_text_eod>"],
    }
    if kind == "base":
        config["speaker_encoder_config"] = {
            "mel_dim": 128,
            "enc_dim": size.hidden,
            "enc_channels": [64, 64, 64, 64, 192],
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_attention_channels": 24,
            "enc_res2net_scale": 8,
            "enc_se_channels": 16,
            "sample_rate": 24000,
        }
    return config


def _decoder_config(size: TtsSize, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _codec_config(size: TtsSize) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": TOKENIZER_TYPE,
        "encoder_valid_num_quantizers": CODE_GROUPS,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "encode_downsample_rate": 1920,
        "decode_upsample_rate": 1920,
        "decoder_config": {
            "codebook_dim": size.codebook_dim,
            "codebook_size": CODEBOOK,
            "num_quantizers": CODE_GROUPS,
            "latent_dim": size.latent_dim,
            "hidden_size": size.codec_hidden,
            "intermediate_size": size.codec_intermediate,
            "num_hidden_layers": size.codec_layers,
            "num_attention_heads": size.codec_heads,
            "num_key_value_heads": size.codec_heads,
            # Wider than the hidden size asks for, as published.
            "head_dim": HEAD_DIM,
            "sliding_window": 72,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": size.decoder_dim,
        },
        "encoder_config": {
            "model_type": "mimi",
            "sampling_rate": 24000,
            "audio_channels": 1,
            "num_filters": 8,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "upsampling_ratios": [8, 6, 5, 4],
            "upsample_groups": 64,
            "codebook_size": CODEBOOK,
            "codebook_dim": 32,
            "vector_quantization_hidden_dimension": 32,
            "num_quantizers": ENCODER_CODE_GROUPS,
            "num_semantic_quantizers": 1,
            "rope_theta": 10000.0,
            "sliding_window": 250,
        },
    }


# Weights

# A row of text has been through the projection, whose SiLU halves what passes; with this it weighs
# about as much as a frame's codes, so that both are heard.
TEXT_EMBEDDING_STD = 2.0
# Codes of the encoder depend on the sound if each codebook is about as wide as what is left of it.
ENCODER_CODEBOOK_STD = 0.5
SPEAKER_INPUT = "speaker_encoder.blocks.0.conv.weight"
# A row for a voice is about as long as one for a speaker.
SPEAKER_OUTPUT_GAIN = 0.2


def _model_shapes(spec: TtsSpec) -> dict[str, Shape]:
    declared = DeclaredParameters()
    Talker(declared, spec.talker)
    if spec.speaker_encoder is not None:
        SpeakerEncoder(declared, spec.speaker_encoder)
    return declared.shapes


def _codec_shapes(spec: TtsSpec) -> dict[str, Shape]:
    declared = DeclaredParameters()
    Code2Wav(declared, spec.code2wav)
    quantizer = spec.code2wav.quantizer
    assert quantizer is not None
    dim = quantizer.codebook_dim
    # Part of the published files, and of no use to decode with.
    unused = {
        f"decoder.quantizer.{group}.input_proj.weight": (dim // 2, dim, 1)
        for group in ("rvq_first", "rvq_rest")
    }
    return {**declared.shapes, **unused, **_encoder_shapes(spec)}


def _encoder_shapes(spec: TtsSpec) -> dict[str, Shape]:
    from stretto.models.qwen3_tts.codec_encoder import empty_encoder

    encoder = empty_encoder(spec.codec_encoder)
    return {f"encoder.{name}": tuple(t.shape) for name, t in encoder.state_dict().items()}


def _weights(shapes: dict[str, Shape], seed: int) -> dict[str, Tensor]:
    weights = {name: _drawn(name, shape, seed) for name, shape in shapes.items()}
    # A code with the logit 0 is thousands of times less likely than the likeliest: the Talker all
    # but never draws its end.
    weights["talker.codec_head.weight"][CODEBOOK:] = 0.0
    if SPEAKER_INPUT in weights:
        # Blind to loudness, the same for all bands, so that the row depends on the voice.
        weights[SPEAKER_INPUT] -= weights[SPEAKER_INPUT].mean((1, 2), keepdim=True)
    return weights


def _codec_weights(spec: TtsSpec, seed: int) -> dict[str, Tensor]:
    weights = {name: _drawn(name, shape, seed) for name, shape in _codec_shapes(spec).items()}
    # Filters that sum to nothing let no constant through, which SnakeBeta makes plenty of.
    last = f"decoder.decoder.{len(spec.code2wav.upsample_rates) + 2}.conv"
    filters = weights[f"{last}.weight"]
    weights[f"{last}.weight"] = (filters - filters.mean(-1, keepdim=True)) * WAVEFORM_GAIN
    weights[f"{last}.bias"].zero_()
    return weights


def _drawn(name: str, shape: Shape, seed: int) -> Tensor:
    path, _, own = name.rpartition(".")
    if own == "initialized":
        return torch.ones(shape)
    tensor = torch.empty(shape)
    if own == "cluster_usage":
        return tensor.uniform_(0.5, 1.5, generator=generator(seed, name))
    if len(shape) == 1:
        mean, std = vector_mean_and_std(path, own)
    else:
        mean, std = 0.0, _std(name, shape)
    return tensor.normal_(mean, std, generator=generator(seed, name))


def _std(name: str, shape: Shape) -> float:
    """Values that keep activations at the size of one from layer to layer."""
    if name.endswith("embed_sum"):
        return ENCODER_CODEBOOK_STD
    if "codec_embedding" in name or name.endswith("embedding_sum"):
        # The sum of a frame's codes weighs one.
        return CODEC_EMBEDDING_STD
    if "text_embedding" in name:
        return TEXT_EMBEDDING_STD
    return _gain(name) / math.sqrt(_fan_in(name, shape))


def _gain(name: str) -> float:
    if "head" in name:
        return LOGIT_STD
    if name.startswith("talker."):
        is_layer_output = "o_proj" in name or "down_proj" in name
        return LAYER_GAIN if is_layer_output else 1.0
    if name.startswith("speaker_encoder.fc."):
        return SPEAKER_OUTPUT_GAIN
    if name.startswith("decoder.decoder."):
        is_residual_unit = name.endswith(("conv1.conv.weight", "conv2.conv.weight"))
        return RESIDUAL_UNIT_GAIN if is_residual_unit else 1.0
    return 1.0


def _fan_in(name: str, shape: Shape) -> int:
    """How many inputs an output is the sum of."""
    is_upsampling = name.startswith("decoder.upsample.") and ".0.conv." in name
    if is_upsampling:
        return shape[0]
    if name.startswith("decoder.decoder.") and name.endswith("block.1.conv.weight"):
        # Transposed, with a kernel of two strides.
        return 2 * shape[0]
    return math.prod(shape[1:])
