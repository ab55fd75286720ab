"""Step 9: the three trained parts as one checkpoint in Hugging Face layout, bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from training.parrot.architecture import parrot_config
from training.parrot.workspace import Workspace, argument_parser, load, open_workspace

_MODALITY_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

# One line each, because white space between the parts would be spoken.
_MEDIA_TEMPLATE = "".join(
    [
        "{%- if c.type == 'image' or c.image is defined or c.image_url is defined %}",
        "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}",
        "{%- elif c.type == 'audio' or c.audio is defined or c.audio_url is defined %}",
        "{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}",
        "{%- elif c.type == 'video' or c.video is defined %}",
        "{{- '<|vision_start|><|video_pad|><|vision_end|>' }}",
        "{%- elif c.text is defined %}{{- c.text }}{%- endif %}",
    ]
)
CHAT_TEMPLATE = "".join(
    [
        "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}",
        "{%- if messages[0].content is string %}{{- messages[0].content }}",
        "{%- else %}{%- for c in messages[0].content %}",
        "{%- if c.text is defined %}{{- c.text }}{%- endif %}",
        "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}",
        "{%- for m in messages %}{%- if m.role != 'system' %}",
        "{{- '<|im_start|>' + m.role + '\\n' }}",
        "{%- if m.content is string %}{{- m.content }}",
        "{%- else %}{%- for c in m.content %}",
        _MEDIA_TEMPLATE,
        "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ]
)


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "errors": "replace",
        "split_special_tokens": False,
        **_MODALITY_TOKENS,
        "extra_special_tokens": _MODALITY_TOKENS,
        "processor_class": "Qwen3OmniMoeProcessor",
    }


def preprocessor_config() -> dict[str, Any]:
    return {
        "dither": 0.0,
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "sampling_rate": 16_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3OmniMoeProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": 12_845_056},
    }


def video_preprocessor_config() -> dict[str, Any]:
    return {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "processor_class": "Qwen3OmniMoeProcessor",
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "do_sample": False,
        "max_new_tokens": 512,
        "talker_do_sample": False,
    }


def assembled_model(workspace: Workspace, tokenizer: Tokenizer) -> Any:
    """The whole model; towers that were never trained are random but always the same."""
    torch.manual_seed(0)
    model: Any = Qwen3OmniMoeForConditionalGeneration(parrot_config(tokenizer))
    speech = load(workspace.talker)["model"]
    talker = {
        name.removeprefix("talker."): weight
        for name, weight in speech.items()
        if name.startswith("talker.")
    }
    model.talker.load_state_dict(talker)
    model.thinker.model.embed_tokens.weight.data = speech["text_embedding.weight"].clone()
    text = load(workspace.thinker)["model"]
    decoder = {
        name.removeprefix("decoder."): weight
        for name, weight in text.items()
        if name.startswith("decoder.") and "embed_tokens" not in name
    }
    model.thinker.model.load_state_dict(decoder, strict=False)
    model.thinker.lm_head.weight.data = text["head.weight"].clone()
    model.code2wav.load_state_dict(load(workspace.code2wav)["model"])
    return model.to(torch.bfloat16).eval()


def write_checkpoint(model: Any, tokenizer_file: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    shutil.copy(tokenizer_file, directory / "tokenizer.json")
    for name, content in (
        ("tokenizer_config.json", tokenizer_config()),
        ("chat_template.json", {"chat_template": CHAT_TEMPLATE}),
        ("preprocessor_config.json", preprocessor_config()),
        ("video_preprocessor_config.json", video_preprocessor_config()),
        ("generation_config.json", generation_config(tokenizer)),
    ):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    options = argument_parser(__doc__ or "").parse_args()
    workspace = open_workspace(options)
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    write_checkpoint(
        assembled_model(workspace, tokenizer), workspace.tokenizer, workspace.checkpoint
    )
    for path in sorted(workspace.checkpoint.iterdir()):
        print(f"{path.stat().st_size:>10,} {path.name}")


if __name__ == "__main__":
    main()
