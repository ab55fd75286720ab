"""A Qwen3-TTS checkpoint is described by its own files: all of it is asked for, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from stretto.errors import CheckpointError
from stretto.models.code2wav import Code2Wav
from stretto.models.decoder import DenseConfig
from stretto.models.qwen3_tts.codec_encoder import empty_encoder
from stretto.models.qwen3_tts.speaker_encoder import SpeakerEncoder
from stretto.models.qwen3_tts.spec import TtsSpec, read_spec
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.tiny import cached_checkpoint
from stretto.models.weights import DeclaredParameters
from tests.models.conftest import Tts
from tests.reference_tts import plain_rotary, reference_module

Shapes = dict[str, tuple[int, ...]]

# Part of the codec's files, and of no use to decode with.
UNUSED = {
    "decoder.quantizer.rvq_first.input_proj.weight",
    "decoder.quantizer.rvq_rest.input_proj.weight",
}


def declared_model(spec: TtsSpec) -> Shapes:
    source = DeclaredParameters()
    Talker(source, spec.talker)
    if spec.speaker_encoder is not None:
        SpeakerEncoder(source, spec.speaker_encoder)
    return source.shapes


def declared_codec(spec: TtsSpec) -> Shapes:
    source = DeclaredParameters()
    Code2Wav(source, spec.code2wav)
    encoder = empty_encoder(spec.codec_encoder).state_dict()
    return {**source.shapes, **{f"encoder.{name}": tuple(t.shape) for name, t in encoder.items()}}


def shapes_of(model: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# ---- the published models ------------------------------------------------------------------------


def published_config(model_size: str, kind: str) -> dict[str, Any]:
    """Sizes and ids of the published checkpoints, as their config.json has them."""
    hidden, intermediate = {"0b6": (1024, 3072), "1b7": (2048, 6144)}[model_size]
    attention = {
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 32768,
        "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
        "sliding_window": None,
    }  # fmt: skip
    has_speakers = kind == "custom_voice"
    config: dict[str, Any] = {
        "model_type": "qwen3_tts", "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": model_size, "tts_model_type": kind,
        "im_start_token_id": 151644, "im_end_token_id": 151645, "assistant_token_id": 77091,
        "tts_pad_token_id": 151671, "tts_bos_token_id": 151672, "tts_eos_token_id": 151673,
        "talker_config": {
            **attention, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": 28, "vocab_size": 3072, "text_vocab_size": 151936,
            "text_hidden_size": 2048, "num_code_groups": 16, "position_id_per_seconds": 13,
            "rope_scaling": {
                "interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
                "type": "default",
            },
            "code_predictor_config": {
                **attention, "hidden_size": 1024, "intermediate_size": 3072,
                "num_hidden_layers": 5, "vocab_size": 2048, "num_code_groups": 16,
                "rope_scaling": None,
            },
            "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150,
            "codec_think_id": 2154, "codec_nothink_id": 2155, "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_language_id": {"chinese": 2055, "english": 2050, "beijing_dialect": 2074},
            "spk_id": {"vivian": 3065, "dylan": 2878} if has_speakers else {},
            "spk_is_dialect": (
                {"vivian": False, "dylan": "beijing_dialect"} if has_speakers else {}
            ),
        },
    }  # fmt: skip
    if kind == "base":
        config["speaker_encoder_config"] = {"enc_dim": hidden, "sample_rate": 24000}
    return config


def published_codec_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_tts_tokenizer_12hz", "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000, "output_sample_rate": 24000,
        "decode_upsample_rate": 1920, "encode_downsample_rate": 1920,
        "encoder_config": {
            "_frame_rate": 12.5, "hidden_size": 512, "num_filters": 64, "num_quantizers": 32,
            "codebook_size": 2048, "codebook_dim": 256, "sliding_window": 250,
            "num_hidden_layers": 8, "upsampling_ratios": [8, 6, 5, 4],
        },
        "decoder_config": {
            "codebook_dim": 512, "codebook_size": 2048, "latent_dim": 1024, "hidden_size": 512,
            "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 64, "num_quantizers": 16,
            "num_semantic_quantizers": 1, "sliding_window": 72, "rope_theta": 10000,
            "rms_norm_eps": 1e-5, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
            "decoder_dim": 1536, "hidden_act": "silu", "attention_bias": False,
        },
    }  # fmt: skip


PUBLISHED = [
    ("0b6", "custom_voice"), ("1b7", "custom_voice"), ("1b7", "voice_design"), ("0b6", "base"),
    ("1b7", "base"),
]  # fmt: skip


@pytest.mark.parametrize(("model_size", "kind"), PUBLISHED)
def test_every_parameter_of_a_published_model_is_mapped_with_its_shape_and_none_is_left(
    model_size: str, kind: str
) -> None:
    config = published_config(model_size, kind)
    spec = read_spec(config, published_codec_config(), "published")
    theirs = reference_module("core.models.configuration_qwen3_tts").Qwen3TTSConfig(**config)
    models = reference_module("core.models.modeling_qwen3_tts")
    with torch.device("meta"), plain_rotary():
        there = shapes_of(models.Qwen3TTSForConditionalGeneration(theirs))
    assert declared_model(spec) == there


def test_every_parameter_of_the_published_codec_is_mapped_with_its_shape_and_none_is_left() -> None:
    config = published_codec_config()
    spec = read_spec(published_config("1b7", "base"), config, "published")
    codec = "core.tokenizer_12hz"
    theirs = reference_module(f"{codec}.configuration_qwen3_tts_tokenizer_v2")
    models = reference_module(f"{codec}.modeling_qwen3_tts_tokenizer_v2")
    with torch.device("meta"), plain_rotary():
        there = shapes_of(
            models.Qwen3TTSTokenizerV2Model(theirs.Qwen3TTSTokenizerV2Config(**config))
        )
    assert set(there) >= UNUSED
    assert declared_codec(spec) == {n: shape for n, shape in there.items() if n not in UNUSED}


@pytest.mark.parametrize(("model_size", "hidden"), [("0b6", 1024), ("1b7", 2048)])
def test_the_published_sizes_are_read_as_they_are(model_size: str, hidden: int) -> None:
    spec = read_spec(published_config(model_size, "base"), published_codec_config(), "published")
    talker = spec.talker
    assert (talker.decoder.hidden_size, talker.decoder.num_layers) == (hidden, 28)
    assert talker.decoder.mlp == DenseConfig(intermediate_size=3 * hidden)
    assert (talker.decoder.num_heads, talker.decoder.num_kv_heads) == (16, 8)
    assert (talker.predictor.hidden_size, talker.predictor.num_layers) == (1024, 5)
    assert (talker.text_hidden_size, talker.text_vocab_size) == (2048, 151936)
    assert (talker.num_codebooks, talker.codebook_size) == (16, 2048)
    assert talker.decoder.rope_theta == 1e6
    assert (spec.model_kind, spec.model_size, spec.sample_rate) == ("base", model_size, 24000)
    assert spec.code2wav.samples_per_frame == 1920
    assert spec.code2wav.samples_missing == 0
    assert spec.speaker_encoder is not None
    assert spec.speaker_encoder.embedding_size == hidden
    assert spec.speaker_encoder.channels == (512, 512, 512, 512, 1536)


def test_speakers_languages_and_dialects_are_read_in_lower_case() -> None:
    config = published_config("1b7", "custom_voice")
    talker = config["talker_config"]
    talker["spk_id"] = {"Vivian": 3065, "Dylan": 2878}
    talker["spk_is_dialect"] = {"Vivian": False, "Dylan": "Beijing_Dialect"}
    talker["codec_language_id"] = {"English": 2050, "Beijing_dialect": 2074}
    spec = read_spec(config, published_codec_config(), "somewhere").talker
    assert spec.speakers == {"vivian": 3065, "dylan": 2878}
    assert spec.languages == {"english": 2050, "beijing_dialect": 2074}
    assert spec.dialects == {"dylan": "beijing_dialect"}


def test_what_is_absent_is_what_the_reference_takes_for_it() -> None:
    """An empty config but for what it cannot do without; its own classes fill in the rest."""
    configurations = reference_module("core.models.configuration_qwen3_tts")
    theirs = configurations.Qwen3TTSTalkerConfig()
    decoder = {"codebook_dim": 512, "num_quantizers": 32}
    spec = read_spec(
        {
            "talker_config": {
                "text_vocab_size": 151936, "vocab_size": 5248,
                "code_predictor_config": {"vocab_size": 4224},
            },
            "tts_model_type": "voice_design", "tts_model_size": "1b7",
            "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        },
        {
            "model_type": "qwen3_tts_tokenizer_12hz", "encoder_valid_num_quantizers": 32,
            "decoder_config": {**decoder, "codebook_size": 4224},
        },
        "somewhere",
    )  # fmt: skip
    ours, predictor = spec.talker.decoder, theirs.code_predictor_config
    assert (ours.hidden_size, ours.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert ours.head_dim == theirs.hidden_size // theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.mlp == DenseConfig(intermediate_size=theirs.intermediate_size)
    assert (ours.rope_theta, ours.rms_norm_eps) == (theirs.rope_theta, theirs.rms_norm_eps)
    assert spec.talker.predictor.num_layers == predictor.num_hidden_layers
    assert spec.talker.predictor.head_dim == predictor.head_dim
    assert spec.talker.num_codebooks == theirs.num_code_groups
    assert spec.talker.codec_ids.eos == theirs.codec_eos_token_id
    assert (
        spec.prompt_ids.tts_bos
        == configurations.Qwen3TTSConfig(talker_config={"spk_id": {}}).tts_bos_token_id
    )
    codec = reference_module("core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
    vocoder = codec.Qwen3TTSTokenizerV2DecoderConfig(**decoder)
    assert spec.code2wav.hidden_size == vocoder.hidden_size
    assert spec.code2wav.latent_dim == vocoder.latent_dim
    assert spec.code2wav.head_dim == vocoder.hidden_size // vocoder.num_attention_heads
    assert spec.code2wav.upsample_rates == vocoder.upsample_rates
    assert spec.code2wav.sliding_window == vocoder.sliding_window


def test_a_spec_survives_the_wire(tts: Tts) -> None:
    sent = msgspec.msgpack.encode(tts.spec)
    assert msgspec.msgpack.decode(sent, type=TtsSpec) == tts.spec


# ---- configs that are not served -----------------------------------------------------------------

Keys = tuple[str, ...]


def tiny_configs(cache_dir: Path, name: str = "tiny-tts-base") -> tuple[Any, Any]:
    directory = cached_checkpoint(name, cache_dir=cache_dir)
    files = (directory / "config.json", directory / "speech_tokenizer" / "config.json")
    config, codec = (json.loads(file.read_text()) for file in files)
    return config, codec


def changed(tree: Any, path: Keys, value: Any) -> None:
    """Sets what is at the path, or takes it away where the value is `...`."""
    for key in path[:-1]:
        tree = tree[key]
    if value is ...:
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


TALKER, PREDICTOR = ("talker_config",), ("talker_config", "code_predictor_config")
SPEAKER = ("speaker_encoder_config",)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("tts_model_type",), "singing", "tts_model_type"),
        (("tts_model_type",), ..., "tts_model_type"),
        (("tts_model_size",), None, "tts_model_size"),
        (("tokenizer_type",), "qwen3_tts_tokenizer_25hz", "qwen3_tts_tokenizer_25hz"),
        (TALKER, ..., "talker_config"),
        ((*TALKER, "text_vocab_size"), ..., "text_vocab_size"),
        ((*TALKER, "hidden_size"), "wide", "hidden_size"),
        ((*TALKER, "hidden_size"), 0, "hidden_size"),
        ((*TALKER, "num_hidden_layers"), 2.5, "num_hidden_layers"),
        ((*TALKER, "hidden_act"), "gelu", "hidden_act is 'gelu'"),
        ((*TALKER, "attention_bias"), True, "attention_bias"),
        ((*TALKER, "use_sliding_window"), True, "use_sliding_window"),
        ((*TALKER, "num_key_value_heads"), 3, "num_key_value_heads is 3"),
        ((*TALKER, "rope_scaling"), {"type": "yarn", "factor": 4.0}, "rope_type"),
        ((*TALKER, "rope_scaling", "type"), "linear", "rope_type"),
        ((*TALKER, "num_code_groups"), 8, "code groups of talker and code predictor"),
        ((*TALKER, "vocab_size"), 4096, "special ids and codebook_size differ: 3072 and 2048"),
        ((*PREDICTOR, "vocab_size"), 1024, "codebook_size of the decoder differ: 1024 and 2048"),
        ((*PREDICTOR, "hidden_act"), "relu", "code predictor: hidden_act"),
        ((*SPEAKER, "enc_dim"), 128, "enc_dim is 128, the talker's hidden_size 256"),
        ((*SPEAKER, "enc_channels"), [64, 64, 64, 192], "as many each"),
        ((*SPEAKER, "enc_channels"), [64, 64, 64, 64, 128], "must be the sum"),
        ((*SPEAKER, "enc_res2net_scale"), 7, "does not divide the 64 channels"),
    ],
)
def test_a_config_that_asks_for_what_is_not_supported_is_refused(
    cache_dir: Path, path: Keys, value: Any, told: str
) -> None:
    config, codec = tiny_configs(cache_dir)
    changed(config, path, value)
    with pytest.raises(CheckpointError, match=told) as refused:
        read_spec(config, codec, "somewhere/tiny")
    assert str(refused.value).startswith("somewhere/tiny")


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("model_type",), "mimi", "model_type is 'mimi'"),
        (("decoder_config",), ..., "decoder_config"),
        (("decoder_config", "codebook_dim"), ..., "codebook_dim"),
        (("decoder_config", "codebook_dim"), 97, "codebook_dim is 97"),
        (("decoder_config", "num_key_value_heads"), 1, "num_key_value_heads"),
        (("decoder_config", "attention_bias"), True, "attention_bias"),
        (("decoder_config", "hidden_act"), "gelu", "hidden_act"),
        (("decoder_config", "num_quantizers"), 8, "num_quantizers of the decoder"),
        (("decoder_config", "upsample_rates"), [8, 5, 4], "decode_upsample_rate .* 1920 and 640"),
        (("decoder_config", "upsampling_ratios"), [2, 0], "upsampling_ratios"),
        (("encoder_valid_num_quantizers",), 8, "encoder_valid_num_quantizers"),
        (("encoder_config",), [], "encoder_config"),
    ],
)
def test_a_codec_that_asks_for_what_is_not_supported_is_refused(
    cache_dir: Path, path: Keys, value: Any, told: str
) -> None:
    config, codec = tiny_configs(cache_dir)
    changed(codec, path, value)
    with pytest.raises(CheckpointError, match=told) as refused:
        read_spec(config, codec, "somewhere/tiny")
    assert str(refused.value).startswith("somewhere/tiny")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*TALKER, "codec_eos_token_id"), 3072),
        ((*TALKER, "codec_think_id"), ...),
        ((*TALKER, "codec_bos_id"), -1),
        ((*TALKER, "spk_id"), {"vivian": 3072}),
        ((*TALKER, "codec_language_id"), {"english": 5000}),
        (("tts_pad_token_id",), 3072),
        (("assistant_token_id",), ...),
        (("im_start_token_id",), -1),
    ],
)
def test_an_id_that_its_vocabulary_has_not_is_refused(
    cache_dir: Path, path: Keys, value: Any
) -> None:
    """Absent counts as the reference's default, which no small vocabulary has."""
    config, codec = tiny_configs(cache_dir)
    changed(config, path, value)
    with pytest.raises(CheckpointError, match=rf"{path[-1]}.* is -?\d+; its vocabulary has"):
        read_spec(config, codec, "somewhere/tiny")


@pytest.mark.parametrize("dialect", ["klingon", True])
def test_a_dialect_that_is_no_language_is_refused(cache_dir: Path, dialect: Any) -> None:
    config, codec = tiny_configs(cache_dir, "tiny-tts")
    changed(config, (*TALKER, "spk_is_dialect"), {"dylan": dialect})
    with pytest.raises(CheckpointError, match=r"spk_is_dialect\.dylan"):
        read_spec(config, codec, "somewhere/tiny")


def test_custom_voices_without_a_speaker_are_refused(cache_dir: Path) -> None:
    config, codec = tiny_configs(cache_dir, "tiny-tts")
    changed(config, (*TALKER, "spk_id"), {})
    changed(config, (*TALKER, "spk_is_dialect"), {})
    with pytest.raises(CheckpointError, match="names no speaker"):
        read_spec(config, codec, "somewhere/tiny")


def test_every_tensor_of_a_tiny_checkpoint_is_asked_for_and_is_the_references(tts: Tts) -> None:
    model = load_file(tts.directory / "model.safetensors")
    codec = load_file(tts.directory / "speech_tokenizer" / "model.safetensors")
    assert set(model) == set(declared_model(tts.spec))
    assert set(codec) == set(declared_codec(tts.spec)) | UNUSED
    reference = tts.reference.model
    assert {n: tuple(t.shape) for n, t in model.items()} == shapes_of(reference)
    speech_tokenizer = reference.speech_tokenizer.model
    assert {n: tuple(t.shape) for n, t in codec.items()} == shapes_of(speech_tokenizer)
