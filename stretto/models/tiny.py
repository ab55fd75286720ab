"""Random-weight checkpoints of the real architectures, small enough for a laptop and a test.

Such a checkpoint is complete: weights, configs, tokenizer and chat template in the published
Hugging Face layout. Whatever can load the real model can load it. It says nothing sensible, but
it says it decisively and for ever: greedy text depends on the prompt, speech on the text, the
waveform is audible and not clipped, and the end tokens are as good as never drawn, so that
`max_tokens` decides the length.

This module decides the sizes, the token ids and the spread of the weights. It knows the config
classes of transformers, and nothing of how stretto runs a model.

    cache_dir/
      qwen3-omni-tiny-v2/            published by a rename: whole, or not there
      qwen3-omni-tiny-v2.x7c2/       a process at work on the same
        checkpoint/
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from stretto.errors import CheckpointError

# Part of a cached folder's name: raise it with any change that makes other files than before.
RECIPE_VERSION = 2

# What `cached_checkpoint` can make: its name, then the architecture and the size.
CACHED_CHECKPOINTS: dict[str, tuple[str, str]] = {
    "tiny": ("qwen3-omni", "tiny"),
    "small": ("qwen3-omni", "small"),
}


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

HEAD_DIM = 64
TEXT_VOCABULARY = 3072
CODEC_VOCABULARY = 3072
CODEBOOK = 2048
CODE_GROUPS = 16
# An 8,000-token prompt and its answer.
MAX_POSITIONS = 16384

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


def make_checkpoint(directory: Path, *, arch: str, size: str, seed: int) -> None:
    """Write a checkpoint with weights drawn from `seed` into a new or an empty directory."""
    if arch != "qwen3-omni":
        raise CheckpointError(f"unknown architecture {arch!r}; there is: qwen3-omni")
    if size not in OMNI_SIZES:
        raise CheckpointError(f"unknown size {size!r}; there are: {', '.join(OMNI_SIZES)}")
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty; name a new directory or empty this one")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_omni_weights(directory, OMNI_SIZES[size], tokenizer, seed)
    # After the weights, because transformers puts a generation_config.json of its own beside them.
    for name, content in _companion_files(tokenizer).items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def cached_checkpoint(name: str, *, cache_dir: Path) -> Path:
    """The checkpoint of this name, made on first use; several processes may ask at once."""
    if name not in CACHED_CHECKPOINTS:
        raise CheckpointError(
            f"unknown checkpoint {name!r}; there are: {', '.join(CACHED_CHECKPOINTS)}"
        )
    arch, size = CACHED_CHECKPOINTS[name]
    published = cache_dir / f"{arch}-{size}-v{RECIPE_VERSION}"
    if published.is_dir():
        return published
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f"{published.name}.") as scratch:
        unpublished = Path(scratch) / "checkpoint"
        make_checkpoint(unpublished, arch=arch, size=size, seed=0)
        try:
            # The rename publishes: a reader sees the whole checkpoint or none.
            unpublished.rename(published)
        except OSError:
            # A folder with content is never replaced: another process was first with the same.
            if not published.is_dir():
                raise
    return published


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

# Logits with this standard deviation make a softmax over some thousand tokens as sharp as that of
# a trained model: about thirty candidates count, and greedy is not decided by rounding.
LOGIT_STD = 3.0
# Greater than 1, so that attention looks at some positions and not at the mean of all: a wrong
# key or position must show in the tokens.
QUERY_KEY_NORM = 2.0
# What a decoder layer adds to its input. With 1 a dozen layers drown the input, and greedy text
# runs in circles.
LAYER_GAIN = 0.5
# A Talker input is the sum of 16 code rows and a text row; the codes together weigh one.
CODEC_EMBEDDING_STD = CODE_GROUPS**-0.5
# Code2Wav takes the mean of 16 code rows.
CODE2WAV_EMBEDDING_STD = CODE_GROUPS**0.5
# With twelve residual units of this gain the waveform leaves the last but one layer at a standard
# deviation of 2 (1.9 to 2.4 over sizes and seeds) and peaks at four times that.
RESIDUAL_UNIT_GAIN = 0.5
WAVEFORM_GAIN = 0.05


def _write_omni_weights(directory: Path, size: OmniSize, tokenizer: Tokenizer, seed: int) -> None:
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
                parameter.normal_(mean, std, generator=_generator(seed, f"{path}.{name}"))
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


def _generator(seed: int, name: str) -> torch.Generator:
    """Each parameter has its own, so that one more layer leaves all others as they were."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def _mean_and_std(
    path: str, module: nn.Module, name: str, parameter: nn.Parameter
) -> tuple[float, float]:
    """Values that keep activations at the size of one from layer to layer."""
    if name in ("alpha", "beta"):
        # The logarithms of SnakeBeta's frequency and magnitude.
        return 0.0, 0.3
    if name in ("scale", "gamma"):
        return 0.3, 0.1
    if name == "bias":
        return 0.0, 0.02
    if path.endswith(("q_norm", "k_norm")):
        return QUERY_KEY_NORM, 0.1
    if parameter.ndim == 1:
        return 1.0, 0.1
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


# Tokenizer

BYTE_PAIR_VOCABULARY = 2944
ROLES = ("system", "user", "assistant")
# Qwen's, in its order, less those for filling in the middle of code.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
# One token each, and part of the text: a reader of the answer gets to see them.
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

PROSE = """\
The harbour was quiet before six in the morning. A woman in a grey coat walked along the wall,
counted the boats, and wrote the number in a small book. There were nineteen of them, one fewer
than on the day before. She did not ask why; she had learned that the sea answers slowly, and
that the people who live beside it answer more slowly still.

"You are early again," said the man who sold coffee from his van. "Would you like the usual?"
"Please," she said, "and something warm to eat, if there is anything left from yesterday."
He laughed. "Nothing is ever left from yesterday. But I can make you toast with honey."

They talked about the weather, as everybody did. It had rained for eleven days, then the wind had
turned, and now the light over the water was so clear that you could see the islands one by one.
The man thought it would hold until Sunday. The woman thought it would not, but she kept it to
herself, because it is pleasant to be wrong about rain, and unpleasant to be right.

What do we know about how children learn to speak? First they listen, for months, long before they
understand a single word. They hear where one sound ends and the next begins; they notice which
sounds come together often, and which never do. Then they try: one syllable, the same one, over and
over, until somebody answers. From there on it goes quickly. At two years they have a few hundred
words, at four they tell stories, at six they argue better than their parents.

A machine can be taught in a similar way, though it needs far more examples. We show it a great
number of sentences and ask it, each time, to guess what follows. Every wrong guess changes it a
little. After a while the guesses get better, and at some point they are good enough that we can
talk with it. It does not know what rain feels like. It knows what people say about rain.

To cook rice, wash it in cold water until the water stays clear, add one and a half times as much
water as rice, bring it to the boil, cover it, and leave it on the lowest heat for twelve minutes.
Do not lift the lid. Let it rest for ten more minutes; then open it, and stir it with a fork.

The train to the north leaves at 7:45 from platform 3 and arrives at 12:10. Tickets cost 42 euros,
or 28 if you book them a week ahead. Change once, at the junction, where you have nine minutes.
If you miss the connection, the next one goes an hour later, and your ticket is still good for it.

I'm not sure what you mean, but I'll do my best to help. Could you tell me a bit more? For example:
how large is the room, how many windows does it have, and which way do they face? It's important,
since the morning sun and the evening sun are quite different things, and we don't want to find out
in July that the bedroom can't be used before midnight.
"""

STEMS = """\
accept act add agree allow answer appear arrange arrive ask attend balance become begin believe
belong borrow bother bring build burn call carry catch change charge check choose claim clean clear
climb close collect come compare complete concern consider contain continue control cook copy
correct cost count cover create cross cut damage dance deal decide deliver depend describe design
destroy develop direct discover discuss divide draw dream dress drink drive drop eat encourage end
enjoy enter escape examine exist expect explain express fail fall feel fight fill find finish fit
fly follow force forget form gather give grow guess handle happen hear help hide hold hope hunt
hurry imagine improve include increase inform intend invite join jump keep kick know laugh lead
learn leave lend lift light like limit link listen live look lose love manage mark matter measure
meet mention mind miss mix move need notice obtain occur offer open operate order own paint pass pay
perform permit pick place plan plant play point pour practise prefer prepare present press prevent
print produce promise protect prove provide pull push put raise reach read realise receive record
reduce refer reflect refuse regard relate remain remember remove repair repeat replace reply report
represent require rest result return reveal ride ring rise roll run save say search seem sell send
separate serve settle shake share shine shoot shout show shut sing sit sleep smell smile solve sort
sound speak spell spend stand start state stay steal stick stop study succeed suffer suggest
supply support suppose surprise survive talk taste teach tell test thank think throw touch train
travel treat trust try turn understand use visit vote wait walk want warn wash waste watch wear
weigh win wish wonder work worry write
"""
ENDINGS = ("", "s", "ed", "ing", "er", "able", "ment", "ful", "ly", "ness", "ation")

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


def _train_tokenizer() -> Tokenizer:
    """Byte pairs over all 256 bytes: any text survives encoding and decoding unchanged."""
    tokenizer = Tokenizer(models.BPE())
    # A newline always stands alone, so that `<|im_start|>assistant\n` is three tokens whatever
    # the answer begins with. No normaliser: NFC, which Qwen has, would change some texts.
    pieces = Regex(r"\n| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_PAIR_VOCABULARY,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def _training_texts() -> Iterator[str]:
    # Often enough that they are merged whole before the vocabulary is full.
    yield from ROLES * 100
    # Prose counts more than the words below, so that common words become single tokens.
    yield from [PROSE] * 10
    for stem, ending in itertools.product(STEMS.split(), ENDINGS):
        yield f" {stem}{ending}"


def _tokenizer_config() -> dict[str, Any]:
    media_tokens = {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    return {
        # Qwen's own class would put its splitting and its normaliser in place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3OmniMoeProcessor",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
        **media_tokens,
        "extra_special_tokens": media_tokens,
    }


# The other files


def _companion_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    token_id = tokenizer.get_vocab()
    vision = {
        "processor_class": "Qwen3OmniMoeProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }
    return {
        "tokenizer_config.json": _tokenizer_config(),
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
