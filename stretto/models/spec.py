"""What the specs of several models have in common: ids that shape a prompt, Talkers, and the fields
of a config that say how decoders and vocoders are built.

A model's own `spec.py` reads its configs into these, and says what their absent fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from stretto.errors import CheckpointError
from stretto.models.code2wav import Code2WavConfig, SplitQuantizerConfig
from stretto.models.decoder import DecoderConfig, DenseConfig, MoEConfig

# The published Talkers keep their special codec ids in the last 1024 of their vocabulary.
NUM_SPECIAL_CODEC_IDS = 1024

Size = Annotated[int, msgspec.Meta(ge=1)]

T = TypeVar("T")


class PromptIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of the text vocabulary that shape a prompt."""

    im_start: int
    im_end: int
    user: int
    assistant: int
    tts_bos: int
    tts_eos: int
    tts_pad: int


class CodecIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of a Talker's vocabulary that are not codes."""

    eos: int
    bos: int
    pad: int
    nothink: int
    think_bos: int
    think_eos: int


class CodecTalkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every Talker has: a decoder for code 0 and a small one for the other codes."""

    decoder: DecoderConfig
    predictor: DecoderConfig
    vocab_size: int
    num_codebooks: int
    codebook_size: int
    codec_ids: CodecIds
    # By name in lower case; an id of the Talker's vocabulary each.
    speakers: dict[str, int]


class PromptIdFields(msgspec.Struct, kw_only=True):
    """The fields of a config that are `PromptIds`."""

    im_start_token_id: int
    im_end_token_id: int
    user_token_id: int
    assistant_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    tts_pad_token_id: int

    @property
    def prompt_ids(self) -> PromptIds:
        return PromptIds(
            im_start=self.im_start_token_id,
            im_end=self.im_end_token_id,
            user=self.user_token_id,
            assistant=self.assistant_token_id,
            tts_bos=self.tts_bos_token_id,
            tts_eos=self.tts_eos_token_id,
            tts_pad=self.tts_pad_token_id,
        )


class TransformerFields(msgspec.Struct, kw_only=True):
    """The fields of a config that every transformer has, as transformers names them."""

    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size | None = None
    rms_norm_eps: float
    attention_bias: bool = False
    hidden_act: str = "silu"

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def check(self, where: str) -> None:
        """Raises CheckpointError for what our layers do not do."""
        if self.attention_bias:
            raise CheckpointError(f"{where}: attention_bias is true, which is not supported")
        if self.hidden_act != "silu":
            raise CheckpointError(f"{where}: hidden_act is {self.hidden_act!r}, supported is silu")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"{where}: num_key_value_heads is {self.num_key_value_heads}, which does not "
                f"divide num_attention_heads ({self.num_attention_heads})"
            )


class DecoderFields(TransformerFields, kw_only=True):
    max_position_embeddings: Size
    use_sliding_window: bool = False

    def decoder_config(
        self, where: str, mlp: DenseConfig | MoEConfig, *, rope_theta: float, rope_type: str
    ) -> DecoderConfig:
        """Raises CheckpointError for what our layers do not do."""
        self.check(where)
        if rope_type != "default":
            raise CheckpointError(f"{where}: rope_type is {rope_type!r}, supported is default")
        if self.use_sliding_window:
            raise CheckpointError(f"{where}: use_sliding_window is true, which is not supported")
        return DecoderConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.size_of_head,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=rope_theta,
            max_positions=self.max_position_embeddings,
            mlp=mlp,
        )


class VocoderFields(TransformerFields, kw_only=True):
    codebook_size: Size
    num_quantizers: Size
    intermediate_size: Size
    sliding_window: Size
    upsample_rates: tuple[Size, ...]
    upsampling_ratios: tuple[Size, ...]
    decoder_dim: Size

    def vocoder_config(
        self, where: str, *, rope_theta: float, quantizer: SplitQuantizerConfig | None = None
    ) -> Code2WavConfig:
        """Raises CheckpointError for what our vocoder does not do."""
        self.check(where)
        if self.num_key_value_heads != self.num_attention_heads:
            raise CheckpointError(
                f"{where}: num_key_value_heads is {self.num_key_value_heads}, supported is as many "
                f"as num_attention_heads ({self.num_attention_heads})"
            )
        return Code2WavConfig(
            num_codebooks=self.num_quantizers,
            codebook_size=self.codebook_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            head_dim=self.size_of_head,
            intermediate_size=self.intermediate_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=rope_theta,
            sliding_window=self.sliding_window,
            upsampling_ratios=self.upsampling_ratios,
            upsample_rates=self.upsample_rates,
            decoder_dim=self.decoder_dim,
            quantizer=quantizer,
        )


def converted(config: Mapping[str, Any], into: type[T], where: str) -> T:
    """Raises CheckpointError for a field that is missing or of the wrong type."""
    try:
        return msgspec.convert(config, into)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}") from error


def ids_in(fields: msgspec.Struct, start: str = "") -> dict[str, int]:
    """The fields that are one id each, by name."""
    return {
        name: value
        for name, value in msgspec.structs.asdict(fields).items()
        if name.startswith(start) and name.endswith("_id") and isinstance(value, int)
    }


def check_ids(ids: Mapping[str, int], *, vocab_size: int, where: str) -> None:
    """Raises CheckpointError for an id that its vocabulary has not: it would be an index later."""
    for name, value in ids.items():
        if not 0 <= value < vocab_size:
            raise CheckpointError(
                f"{where}: {name} is {value}; its vocabulary has {vocab_size} ids"
            )
