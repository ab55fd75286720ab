"""The sizes and ids of a Qwen3-TTS checkpoint, as far as serving it needs them.

transformers has no config classes for it, so the checkpoint's own files are read strictly: its
`config.json` and `speech_tokenizer/config.json`. Where a field is absent the default is that of the
reference (the `qwen-tts` package), and what the reference cannot do without has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from stretto.errors import CheckpointError
from stretto.models.code2wav import Code2WavConfig, SplitQuantizerConfig
from stretto.models.decoder import DecoderConfig, DenseConfig
from stretto.models.spec import (
    NUM_SPECIAL_CODEC_IDS,
    CodecIds,
    CodecTalkerSpec,
    DecoderFields,
    PromptIdFields,
    PromptIds,
    Size,
    VocoderFields,
    check_ids,
    converted,
    ids_in,
)

MODEL_TYPE = "qwen3_tts"
TOKENIZER_TYPE = "qwen3_tts_tokenizer_12hz"
# Below a checkpoint's directory: the codec, with files of its own.
SPEECH_TOKENIZER = "speech_tokenizer"

ModelKind = Literal["custom_voice", "voice_design", "base"]


class TtsCodecIds(CodecIds, frozen=True, kw_only=True):
    # In place of `nothink` where a language follows.
    think: int


class TtsTalkerSpec(CodecTalkerSpec, frozen=True, kw_only=True):
    text_vocab_size: int
    text_hidden_size: int
    codec_ids: TtsCodecIds
    # By name in lower case, dialects among them; an id of the Talker's vocabulary each.
    languages: dict[str, int]
    # Speakers of a dialect, and the name in `languages` of it.
    dialects: dict[str, str]


class SpeakerEncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An ECAPA-TDNN: sound to what the Talker takes for a speaker."""

    mel_dim: int
    embedding_size: int
    # By block: the first and the last are plain, those between squeeze and excite.
    channels: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    res2net_scale: int
    squeeze_channels: int
    sample_rate: int


class CodecEncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sound to codes; the network is Mimi's, whose config transformers reads."""

    mimi_config: dict[str, Any]
    num_codebooks: int
    sample_rate: int
    samples_per_frame: int


class TtsSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    model_kind: ModelKind
    # As the checkpoint calls it: "0b6", "1b7".
    model_size: str
    talker: TtsTalkerSpec
    code2wav: Code2WavConfig
    prompt_ids: PromptIds
    # Of what is spoken.
    sample_rate: int
    codec_encoder: CodecEncoderSpec
    # Only in checkpoints that clone voices.
    speaker_encoder: SpeakerEncoderSpec | None


# ---- the files, as far as they are read ----------------------------------------------------------


class _Rope(msgspec.Struct, kw_only=True):
    mrope_section: list[int] | None = None
    rope_type: str | None = None
    # The older spelling, which the reference prefers.
    type: str | None = None


class _Attention(DecoderFields, kw_only=True):
    hidden_size: Size = 1024
    intermediate_size: Size = 2048
    num_hidden_layers: Size = 20
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: _Rope | None = None
    max_position_embeddings: Size = 32768

    def decoder(self, where: str) -> DecoderConfig:
        rope = self.rope_scaling or _Rope()
        return self.decoder_config(
            where,
            DenseConfig(intermediate_size=self.intermediate_size),
            rope_theta=self.rope_theta,
            rope_type=rope.type or rope.rope_type or "default",
        )


class _Predictor(_Attention, kw_only=True):
    vocab_size: Size = 2048
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 5
    num_key_value_heads: Size = 8
    head_dim: Size | None = 128
    num_code_groups: Size = 32


class _Talker(_Attention, kw_only=True):
    code_predictor_config: _Predictor = msgspec.field(default_factory=_Predictor)
    vocab_size: Size = 3072
    text_vocab_size: Size
    text_hidden_size: Size = 2048
    num_code_groups: Annotated[int, msgspec.Meta(ge=2)] = 32
    codec_eos_token_id: int = 4198
    codec_think_id: int = 4202
    codec_nothink_id: int = 4203
    codec_think_bos_id: int = 4204
    codec_think_eos_id: int = 4205
    codec_pad_id: int = 4196
    codec_bos_id: int = 4197
    spk_id: dict[str, int] | None = None
    # The name of a dialect, or false.
    spk_is_dialect: dict[str, str | bool] | None = None
    codec_language_id: dict[str, int] | None = None


class _SpeakerEncoder(msgspec.Struct, kw_only=True):
    mel_dim: Size = 128
    enc_dim: Size = 1024
    enc_channels: tuple[Size, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[Size, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[Size, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: Size = 128
    enc_res2net_scale: Size = 8
    enc_se_channels: Size = 128
    sample_rate: Size = 24000


class _Tts(PromptIdFields, kw_only=True):
    talker_config: _Talker
    speaker_encoder_config: _SpeakerEncoder | None = None
    tts_model_type: ModelKind
    tts_model_size: str
    tokenizer_type: str
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    tts_pad_token_id: int = 151671
    tts_bos_token_id: int = 151672
    tts_eos_token_id: int = 151673
    # The reference has no use for these two: it tokenizes the names. They are Qwen's.
    assistant_token_id: int = 77091
    user_token_id: int = 872


class _CodecDecoder(VocoderFields, kw_only=True):
    codebook_dim: Size
    codebook_size: Size = 2048
    hidden_size: Size = 1024
    latent_dim: Size = 1024
    rope_theta: float = 10000.0
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 16
    sliding_window: Size = 72
    intermediate_size: Size = 3072
    rms_norm_eps: float = 1e-5
    num_hidden_layers: Size = 8
    num_quantizers: Size = 16
    upsample_rates: tuple[Size, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[Size, ...] = (2, 2)
    decoder_dim: Size = 1536


class _Codec(msgspec.Struct, kw_only=True):
    model_type: str
    decoder_config: _CodecDecoder
    encoder_config: dict[str, Any] = {}
    encoder_valid_num_quantizers: Size = 16
    input_sample_rate: Size = 24000
    output_sample_rate: Size = 24000
    decode_upsample_rate: Size = 1920
    encode_downsample_rate: Size = 1920


def read_spec(
    config: Mapping[str, Any], speech_tokenizer_config: Mapping[str, Any], where: str
) -> TtsSpec:
    """The spec in a checkpoint's two configs, each the content of its JSON file.

    Raises:
        CheckpointError: a field is missing, of the wrong type, or asks for what is not supported.
    """
    codec_where = f"{where}: {SPEECH_TOKENIZER}"
    tts = converted(config, _Tts, where)
    codec = converted(speech_tokenizer_config, _Codec, codec_where)
    for name, value, place in (
        ("tokenizer_type", tts.tokenizer_type, where),
        ("model_type", codec.model_type, codec_where),
    ):
        if value != TOKENIZER_TYPE:
            raise CheckpointError(f"{place}: {name} is {value!r}, supported is {TOKENIZER_TYPE}")
    _check_ids(tts, where)
    _check_codes(tts.talker_config, codec, where)
    talker = _talker(tts.talker_config, where)
    if tts.tts_model_type == "custom_voice" and not talker.speakers:
        raise CheckpointError(f"{where}: talker_config.spk_id names no speaker")
    return TtsSpec(
        model_kind=tts.tts_model_type,
        model_size=tts.tts_model_size,
        talker=talker,
        code2wav=_code2wav(codec, codec_where),
        prompt_ids=tts.prompt_ids,
        sample_rate=codec.output_sample_rate,
        codec_encoder=CodecEncoderSpec(
            mimi_config=codec.encoder_config,
            num_codebooks=codec.encoder_valid_num_quantizers,
            sample_rate=codec.input_sample_rate,
            samples_per_frame=codec.encode_downsample_rate,
        ),
        speaker_encoder=_speaker_encoder(tts, where) if tts.tts_model_type == "base" else None,
    )


def _check_ids(tts: _Tts, where: str) -> None:
    talker = tts.talker_config
    codec_ids = ids_in(talker, "codec_")
    for field, ids in (("spk_id", talker.spk_id), ("codec_language_id", talker.codec_language_id)):
        codec_ids |= {f"{field}.{name}": value for name, value in (ids or {}).items()}
    check_ids(ids_in(tts), vocab_size=talker.text_vocab_size, where=where)
    check_ids(codec_ids, vocab_size=talker.vocab_size, where=where)


def _check_codes(talker: _Talker, codec: _Codec, where: str) -> None:
    """Raises CheckpointError where the parts do not agree about what a frame is."""
    decoder, predictor = codec.decoder_config, talker.code_predictor_config
    first_codes = talker.vocab_size - NUM_SPECIAL_CODEC_IDS
    samples = 1
    for rate in (*decoder.upsampling_ratios, *decoder.upsample_rates):
        samples *= rate
    for told, one, other in (
        ("code groups of talker and code predictor", talker.num_code_groups,
         predictor.num_code_groups),
        ("code groups of talker and num_quantizers of the decoder", talker.num_code_groups,
         decoder.num_quantizers),
        ("code groups of talker and encoder_valid_num_quantizers", talker.num_code_groups,
         codec.encoder_valid_num_quantizers),
        ("vocab_size of the code predictor and codebook_size of the decoder",
         predictor.vocab_size, decoder.codebook_size),
        (f"vocab_size of the talker less {NUM_SPECIAL_CODEC_IDS} special ids and codebook_size",
         first_codes, decoder.codebook_size),
        ("decode_upsample_rate and the product of the decoder's rates",
         codec.decode_upsample_rate, samples),
    ):  # fmt: skip
        if one != other:
            raise CheckpointError(f"{where}: {told} differ: {one} and {other}")


def _talker(talker: _Talker, where: str) -> TtsTalkerSpec:
    languages = {name.lower(): value for name, value in (talker.codec_language_id or {}).items()}
    speakers = {name.lower(): value for name, value in (talker.spk_id or {}).items()}
    dialects: dict[str, str] = {}
    for speaker, dialect in (talker.spk_is_dialect or {}).items():
        if dialect is False:
            continue
        if not isinstance(dialect, str) or dialect.lower() not in languages:
            raise CheckpointError(
                f"{where}: spk_is_dialect.{speaker} is {dialect!r}, which codec_language_id has not"
            )
        dialects[speaker.lower()] = dialect.lower()
    return TtsTalkerSpec(
        decoder=talker.decoder(f"{where}: talker"),
        predictor=talker.code_predictor_config.decoder(f"{where}: code predictor"),
        vocab_size=talker.vocab_size,
        num_codebooks=talker.num_code_groups,
        codebook_size=talker.code_predictor_config.vocab_size,
        text_vocab_size=talker.text_vocab_size,
        text_hidden_size=talker.text_hidden_size,
        codec_ids=TtsCodecIds(
            eos=talker.codec_eos_token_id,
            bos=talker.codec_bos_id,
            pad=talker.codec_pad_id,
            think=talker.codec_think_id,
            nothink=talker.codec_nothink_id,
            think_bos=talker.codec_think_bos_id,
            think_eos=talker.codec_think_eos_id,
        ),
        speakers=speakers,
        languages=languages,
        dialects=dialects,
    )


def _code2wav(codec: _Codec, where: str) -> Code2WavConfig:
    config = codec.decoder_config
    if config.codebook_dim % 2:
        raise CheckpointError(f"{where}: codebook_dim is {config.codebook_dim}; it must be even")
    return config.vocoder_config(
        where,
        rope_theta=config.rope_theta,
        quantizer=SplitQuantizerConfig(
            codebook_dim=config.codebook_dim, latent_dim=config.latent_dim
        ),
    )


def _speaker_encoder(tts: _Tts, where: str) -> SpeakerEncoderSpec:
    config = tts.speaker_encoder_config or _SpeakerEncoder()
    where = f"{where}: speaker_encoder_config"
    channels = config.enc_channels
    if not len(channels) == len(config.enc_kernel_sizes) == len(config.enc_dilations) >= 3:
        raise CheckpointError(
            f"{where}: enc_channels, enc_kernel_sizes and enc_dilations have {len(channels)}, "
            f"{len(config.enc_kernel_sizes)} and {len(config.enc_dilations)} entries; as many "
            f"each were expected, three at least"
        )
    if len(set(channels[:-1])) != 1 or sum(channels[1:-1]) != channels[-1]:
        raise CheckpointError(
            f"{where}: enc_channels is {list(channels)}; the last must be the sum of those "
            f"between first and last, which must be as wide as the first"
        )
    if channels[0] % config.enc_res2net_scale:
        raise CheckpointError(
            f"{where}: enc_res2net_scale is {config.enc_res2net_scale}, which does not divide "
            f"the {channels[0]} channels"
        )
    if config.enc_dim != tts.talker_config.hidden_size:
        raise CheckpointError(
            f"{where}: enc_dim is {config.enc_dim}, the talker's hidden_size "
            f"{tts.talker_config.hidden_size}"
        )
    return SpeakerEncoderSpec(
        mel_dim=config.mel_dim,
        embedding_size=config.enc_dim,
        channels=channels,
        kernel_sizes=config.enc_kernel_sizes,
        dilations=config.enc_dilations,
        attention_channels=config.enc_attention_channels,
        res2net_scale=config.enc_res2net_scale,
        squeeze_channels=config.enc_se_channels,
        sample_rate=config.sample_rate,
    )
