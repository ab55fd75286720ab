"""Qwen3-Omni checkpoints, through transformers' own classes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from stretto.models.tiny.recipe import (
    CODE2WAV_EMBEDDING_STD,
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


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    experts_per_token: int
    expert_intermediate: int


@dataclass(frozen=True, kw_only=True)
class OmniSize:
    thinker: DecoderSize
    talker: DecoderSize
    code_predictor_layers: int
    code_predictor_intermediate: int
    code2wav_hidden: int
    code2wav_layers: int
    code2wav_heads: int
    code2wav_intermediate: int
    decoder_dim: int
    max_shard: str


_TINY_DECODER = DecoderSize(
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    experts=8,
    experts_per_token=2,
    expert_intermediate=128,
)

OMNI_SIZES = {
    "tiny": OmniSize(
        thinker=_TINY_DECODER,
        talker=_TINY_DECODER,
        code_predictor_layers=4,
        code_predictor_intermediate=512,
        code2wav_hidden=256,
        code2wav_layers=4,
        code2wav_heads=4,
        code2wav_intermediate=512,
        decoder_dim=192,
        max_shard="2GB",
    ),
    "small": OmniSize(
        thinker=DecoderSize(
            hidden=768,
            layers=12,
            heads=12,
            kv_heads=4,
            experts=16,
            experts_per_token=4,
            expert_intermediate=384,
        ),
        talker=DecoderSize(
            hidden=512,
            layers=10,
            heads=8,
            kv_heads=2,
            experts=16,
            experts_per_token=4,
            expert_intermediate=256,
        ),
        code_predictor_layers=5,
        code_predictor_intermediate=1024,
        code2wav_hidden=512,
        code2wav_layers=8,
        code2wav_heads=8,
        code2wav_intermediate=1024,
        decoder_dim=768,
        # Several files and an index, as published checkpoints have.
        max_shard="200MB",
    ),
}

# Qwen3-Omni's own ids: the codec vocabulary is small enough to be kept as it is.
CODEC_IDS = {
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
}
SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}


def write_omni(directory: Path, *, size: str, seed: int) -> None:
    tokenizer = train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_weights(directory, OMNI_SIZES[size], tokenizer, seed)
    # After the weights, because transformers puts a generation_config.json of its own beside them.
    for name, content in _companion_files(tokenizer).items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Configuration


def _omni_config(size: OmniSize, tokenizer: Tokenizer) -> dict[str, Any]:
    token_id = tokenizer.get_vocab()
    media_ids = {
        "audio_token_id": token_id["<|audio_pad|>"],
        "image_token_id": token_id["<|image_pad|>"],
        "video_token_id": token_id["<|video_pad|>"],
        "audio_start_token_id": token_id["<|audio_start|>"],
        # transformers reads it for every prompt, also one of text alone, and does not declare it.
        "vision_start_token_id": token_id["<|vision_start|>"],
        "position_id_per_seconds": 13,
    }
    thinker = {
        "text_config": {
            **_decoder_config(size.thinker, TEXT_VOCABULARY),
            "eos_token_id": token_id["<|im_end|>"],
            "pad_token_id": token_id["<|endoftext|>"],
        },
        # The towers have the real ones' structure and next to no width.
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "output_dim": size.thinker.hidden,
            "downsample_hidden_size": 16,
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": size.thinker.hidden,
            # As deep as the layer the Talker listens to, so that the order of the two shows.
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "audio_end_token_id": token_id["<|audio_end|>"],
        "vision_end_token_id": token_id["<|vision_end|>"],
        "user_token_id": token_id["user"],
        **media_ids,
    }
    talker = {
        "text_config": {
            **_decoder_config(size.talker, CODEC_VOCABULARY),
            "shared_expert_intermediate_size": size.talker.expert_intermediate,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": size.talker.hidden,
            "intermediate_size": size.code_predictor_intermediate,
            "num_hidden_layers": size.code_predictor_layers,
            "num_attention_heads": size.talker.heads,
            "num_key_value_heads": size.talker.kv_heads,
            "head_dim": HEAD_DIM,
            "num_code_groups": CODE_GROUPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "num_code_groups": CODE_GROUPS,
        "thinker_hidden_size": size.thinker.hidden,
        "accept_hidden_layer": size.thinker.layers // 2,
        "spatial_merge_size": 2,
        "speaker_id": SPEAKERS,
        **CODEC_IDS,
        **media_ids,
    }
    code2wav = {
        "codebook_size": CODEBOOK,
        "num_quantizers": CODE_GROUPS,
        "hidden_size": size.code2wav_hidden,
        "intermediate_size": size.code2wav_intermediate,
        "num_hidden_layers": size.code2wav_layers,
        "num_attention_heads": size.code2wav_heads,
        "num_key_value_heads": size.code2wav_heads,
        "decoder_dim": size.decoder_dim,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return {
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": code2wav,
        "enable_audio_output": True,
        "im_start_token_id": token_id["<|im_start|>"],
        "im_end_token_id": token_id["<|im_end|>"],
        "system_token_id": token_id["system"],
        "user_token_id": token_id["user"],
        "assistant_token_id": token_id["assistant"],
        "tts_pad_token_id": token_id["<tts_pad>"],
        "tts_bos_token_id": token_id["<tts_text_bos>"],
        "tts_eos_token_id": token_id["<tts_text_eod>"],
    }


def _decoder_config(size: DecoderSize, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD_DIM,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "moe_intermediate_size": size.expert_intermediate,
        "norm_topk_prob": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            # Time, height and width share half a head.
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    }


# Weights


def _write_weights(directory: Path, size: OmniSize, tokenizer: Tokenizer, seed: int) -> None:
    # Takes seconds to import, and whoever finds the checkpoint in the cache does not need it.
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    config = Qwen3OmniMoeConfig(**_omni_config(size, tokenizer))
    # On the meta device the model's own initialisation costs nothing; every value is drawn below.
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                mean, std = _mean_and_std(path, module, name, parameter)
                parameter.normal_(mean, std, generator=generator(seed, f"{path}.{name}"))
        # A token with the logit 0 is thousands of times less likely than the likeliest: the Thinker
        # all but never writes its end, nor the Talker a codec end.
        model.thinker.lm_head.weight[_unwritten_ids(tokenizer)] = 0.0
        model.talker.codec_head.weight[CODEBOOK:] = 0.0
        # Filters that sum to nothing let no constant through, which SnakeBeta makes plenty of.
        waveform_conv = model.code2wav.decoder[-1].conv
        waveform_conv.weight -= waveform_conv.weight.mean(dim=-1, keepdim=True)
        waveform_conv.weight *= WAVEFORM_GAIN
        waveform_conv.bias.zero_()
    model.save_pretrained(directory, max_shard_size=size.max_shard)


def _unwritten_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids beyond the words, special or unused, and characters that would ring a terminal's bell."""
    num_words = tokenizer.get_vocab_size(with_added_tokens=False)
    texts = [tokenizer.decode([token_id]) for token_id in range(num_words)]
    controls = [
        token_id
        for token_id, text in enumerate(texts)
        if text.isascii() and not text.isprintable() and text not in "\t\n"
    ]
    return [*controls, *range(num_words, TEXT_VOCABULARY)]


def _mean_and_std(
    path: str, module: nn.Module, name: str, parameter: nn.Parameter
) -> tuple[float, float]:
    """Values that keep activations at the size of one from layer to layer."""
    if parameter.ndim == 1:
        return vector_mean_and_std(path, name)
    if isinstance(module, nn.Embedding):
        if path.startswith("talker."):
            return 0.0, CODEC_EMBEDDING_STD
        if path.startswith("code2wav."):
            return 0.0, CODE2WAV_EMBEDDING_STD
        return 0.0, 1.0
    return 0.0, _gain(f"{path}.{name}") * _fan_in(module, parameter) ** -0.5


def _gain(name: str) -> float:
    if "head" in name:
        return LOGIT_STD
    if name.startswith("code2wav."):
        is_residual_unit = name.endswith(("conv1.conv.weight", "conv2.conv.weight"))
        return RESIDUAL_UNIT_GAIN if is_residual_unit else 1.0
    is_layer_output = "o_proj" in name or "down_proj" in name
    return LAYER_GAIN if is_layer_output else 1.0


def _fan_in(module: nn.Module, parameter: nn.Parameter) -> float:
    if isinstance(module, nn.ConvTranspose1d):
        return module.in_channels * module.kernel_size[0] / module.stride[0]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return parameter[0].numel()
    # Linear layers, and experts stacked in front of such.
    return parameter.shape[-1]


# The other files

CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type in ('image', 'image_url') or 'image' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif part.type in ('audio', 'audio_url', 'input_audio') or 'audio' in part -%}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- else -%}
                {{- raise_exception('a part of the content is no text, image, audio or video') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _companion_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    token_id = tokenizer.get_vocab()
    media_tokens = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    vision = {
        "processor_class": "Qwen3OmniMoeProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }
    return {
        "tokenizer_config.json": {
            **tokenizer_config(
                processor_class="Qwen3OmniMoeProcessor", model_max_length=MAX_POSITIONS
            ),
            "chat_template": CHAT_TEMPLATE,
            **media_tokens,
            "extra_special_tokens": media_tokens,
        },
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
        "generation_config.json": {
            "eos_token_id": token_id["<|im_end|>"],
            "pad_token_id": token_id["<|endoftext|>"],
            "do_sample": False,
            # It never ends by itself: 100 tokens and 27 s of sound, the load of the benchmarks.
            "max_new_tokens": 100,
            "talker_max_new_tokens": 340,
        },
        "preprocessor_config.json": {
            **vision,
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "size": {"shortest_edge": 3136, "longest_edge": 12845056},
            "feature_extractor_type": "WhisperFeatureExtractor",
            "sampling_rate": 16000,
            "feature_size": 128,
            "n_fft": 400,
            "hop_length": 160,
            "chunk_length": 300,
            "n_samples": 4800000,
            "nb_max_frames": 30000,
            "dither": 0.0,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
        "video_preprocessor_config.json": {
            **vision,
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        },
    }
