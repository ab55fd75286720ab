"""The shape of parrot: Qwen3-Omni's own architecture, made small.

    thinker    3 layers of 256, 4 experts (2 at work), vocabulary of some 600 tokens
    talker     4 layers of 256, 4 experts (2 at work) and a shared one; code predictor 2 layers
    code2wav   2 layers of 192, decoder of 128 channels

The audio and vision towers are as small as the classes allow and are never trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig

from training.parrot.codec import CODEBOOK_SIZE, NUM_CODEBOOKS

HIDDEN = 256
HEAD_DIM = 64
ROPE_THETA = 10_000.0

# The Talker's vocabulary is the 256 sounds of codebook 0 and 1024 more, as in the big model;
# these places among them are ours.
CODEC_VOCABULARY = CODEBOOK_SIZE + 1024
CODEC_PAD = CODEBOOK_SIZE + 100
CODEC_BOS = CODEBOOK_SIZE + 101
CODEC_EOS = CODEBOOK_SIZE + 102
CODEC_NOTHINK = CODEBOOK_SIZE + 107
CODEC_THINK_BOS = CODEBOOK_SIZE + 108
CODEC_THINK_EOS = CODEBOOK_SIZE + 109
SPEAKERS = {
    "chelsie": CODEBOOK_SIZE + 253,
    "ethan": CODEBOOK_SIZE + 254,
    "aiden": CODEBOOK_SIZE + 255,
}


@dataclass(frozen=True)
class TextIds:
    """Token ids that the chat format and the Talker's prompt are made of."""

    im_start: int
    im_end: int
    newline: int
    system: int
    user: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextIds:
        def ids(token: str) -> int:
            return token_id(tokenizer, token)

        return cls(
            im_start=ids("<|im_start|>"),
            im_end=ids("<|im_end|>"),
            newline=tokenizer.encode("\n").ids[0],
            system=ids("system"),
            user=ids("user"),
            assistant=ids("assistant"),
            tts_pad=ids("<tts_pad>"),
            tts_bos=ids("<tts_text_bos>"),
            tts_eos=ids("<tts_text_eod>"),
        )

    def turn(self, role: int, token_ids: list[int]) -> list[int]:
        """One message of a conversation."""
        return [self.im_start, role, self.newline, *token_ids, self.im_end, self.newline]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Raises KeyError if the tokenizer has no such token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def text_vocabulary(tokenizer: Tokenizer) -> int:
    """The tokenizer's size, rounded up to a multiple of 16."""
    return -(-tokenizer.get_vocab_size() // 16) * 16


def parrot_config(tokenizer: Tokenizer) -> Any:
    def ids(token: str) -> int:
        return token_id(tokenizer, token)

    modality_ids = {
        "audio_token_id": ids("<|audio_pad|>"),
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "audio_start_token_id": ids("<|audio_start|>"),
        "position_id_per_seconds": 13,
    }
    thinker = {
        "audio_config": _audio_tower(),
        "vision_config": _vision_tower(),
        "text_config": {
            **_moe_decoder(layers=3),
            "vocab_size": text_vocabulary(tokenizer),
            "bos_token_id": None,
            "eos_token_id": ids("<|im_end|>"),
            "pad_token_id": ids("<|endoftext|>"),
        },
        **modality_ids,
        "vision_end_token_id": ids("<|vision_end|>"),
        "audio_end_token_id": ids("<|audio_end|>"),
        "user_token_id": ids("user"),
    }
    talker = {
        "text_config": {
            **_moe_decoder(layers=4),
            "vocab_size": CODEC_VOCABULARY,
            "shared_expert_intermediate_size": 256,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "num_code_groups": NUM_CODEBOOKS,
            "max_position_embeddings": 256,
            "rope_parameters": _rope(),
        },
        "num_code_groups": NUM_CODEBOOKS,
        "thinker_hidden_size": HIDDEN,
        "accept_hidden_layer": 2,
        "codec_pad_id": CODEC_PAD,
        "codec_bos_id": CODEC_BOS,
        "codec_eos_token_id": CODEC_EOS,
        "codec_nothink_id": CODEC_NOTHINK,
        "codec_think_bos_id": CODEC_THINK_BOS,
        "codec_think_eos_id": CODEC_THINK_EOS,
        "speaker_id": SPEAKERS,
        **modality_ids,
        "spatial_merge_size": 2,
    }
    code2wav = {
        "codebook_size": CODEBOOK_SIZE,
        "num_quantizers": NUM_CODEBOOKS,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 24,
        "layer_scale_initial_scale": 0.1,
        "decoder_dim": 128,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "max_position_embeddings": 4096,
        "rope_parameters": _rope(),
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
        enable_audio_output=True,
        im_start_token_id=ids("<|im_start|>"),
        im_end_token_id=ids("<|im_end|>"),
        tts_pad_token_id=ids("<tts_pad>"),
        tts_bos_token_id=ids("<tts_text_bos>"),
        tts_eos_token_id=ids("<tts_text_eod>"),
        system_token_id=ids("system"),
        user_token_id=ids("user"),
        assistant_token_id=ids("assistant"),
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
    )


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": ROPE_THETA}


def _moe_decoder(*, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            **_rope(),
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }


def _audio_tower() -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": HIDDEN,
        "downsample_hidden_size": 8,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
    }


def _vision_tower() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
