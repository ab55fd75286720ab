"""The sizes and ids of a Qwen3-Omni checkpoint, as far as serving it needs them.

transformers' config classes read `config.json` (its older spellings too) and fill in defaults;
this module reads what they give strictly into plain structs, which travel to the stages. Stage
processes so never import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stretto.errors import CheckpointError
from stretto.models.code2wav import Code2WavConfig
from stretto.models.decoder import DecoderConfig, DenseConfig, MoEConfig
from stretto.models.spec import (
    CodecIds,
    CodecTalkerSpec,
    DecoderFields,
    PromptIdFields,
    PromptIds,
    VocoderFields,
    check_ids,
    converted,
    ids_in,
)

MODEL_TYPE = "qwen3_omni_moe"


class ThinkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    decoder: DecoderConfig
    vocab_size: int


class TalkerSpec(CodecTalkerSpec, frozen=True, kw_only=True):
    thinker_hidden_size: int
    thinker_vocab_size: int
    projection_size: int


class OmniSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    thinker: ThinkerSpec
    talker: TalkerSpec
    code2wav: Code2WavConfig
    prompt_ids: PromptIds


# ---- what transformers' configs give, as far as it is read ---------------------------------------


class _Rope(msgspec.Struct):
    rope_theta: float
    rope_type: str = "default"


class _Attention(DecoderFields, kw_only=True):
    rope_parameters: _Rope

    def decoder(self, where: str, mlp: DenseConfig | MoEConfig) -> DecoderConfig:
        rope = self.rope_parameters
        return self.decoder_config(where, mlp, rope_theta=rope.rope_theta, rope_type=rope.rope_type)


class _Experts(_Attention, kw_only=True):
    vocab_size: int
    moe_intermediate_size: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def experts(self, where: str, count: int, shared: int | None) -> DecoderConfig:
        if self.decoder_sparse_step != 1 or self.mlp_only_layers:
            raise CheckpointError(f"{where}: layers without experts are not supported")
        mlp = MoEConfig(
            num_experts=count,
            num_experts_per_tok=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            norm_topk_prob=self.norm_topk_prob,
            shared_intermediate_size=shared,
        )
        return self.decoder(where, mlp)


class _ThinkerText(_Experts, kw_only=True):
    num_experts: int


class _TalkerText(_Experts, kw_only=True):
    # transformers gives the Talker's experts under this name, the Thinker's under the other.
    num_local_experts: int
    shared_expert_intermediate_size: int
    intermediate_size: int


class _Predictor(_Attention, kw_only=True):
    vocab_size: int
    intermediate_size: int
    num_code_groups: int


class _Thinker(msgspec.Struct, kw_only=True):
    text_config: _ThinkerText


class _Talker(msgspec.Struct, kw_only=True):
    text_config: _TalkerText
    code_predictor_config: _Predictor
    num_code_groups: int
    thinker_hidden_size: int
    codec_eos_token_id: int
    codec_bos_id: int
    codec_pad_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    speaker_id: dict[str, int]


class _Code2Wav(VocoderFields, kw_only=True):
    rope_parameters: _Rope


class _Omni(PromptIdFields, kw_only=True):
    thinker_config: _Thinker
    talker_config: _Talker
    code2wav_config: _Code2Wav
    enable_audio_output: bool = True


def read_spec(config: Mapping[str, Any], where: str) -> OmniSpec:
    """The spec in `config`, the `to_dict()` of transformers' `Qwen3OmniMoeConfig`.

    Raises:
        CheckpointError: a field is missing, of the wrong type, or asks for what is not supported.
    """
    omni = converted(config, _Omni, where)
    if not omni.enable_audio_output:
        raise CheckpointError(f"{where}: enable_audio_output is false; there is no Talker to serve")
    _check_ids(omni, where)
    code2wav = omni.code2wav_config
    return OmniSpec(
        thinker=_thinker(omni.thinker_config.text_config, where),
        talker=_talker(omni, where),
        code2wav=code2wav.vocoder_config(
            f"{where}: code2wav", rope_theta=code2wav.rope_parameters.rope_theta
        ),
        prompt_ids=omni.prompt_ids,
    )


def _check_ids(omni: _Omni, where: str) -> None:
    talker = omni.talker_config
    codec_ids = ids_in(talker, "codec_")
    codec_ids |= {f"speaker_id.{name}": value for name, value in talker.speaker_id.items()}
    check_ids(ids_in(omni), vocab_size=omni.thinker_config.text_config.vocab_size, where=where)
    check_ids(codec_ids, vocab_size=talker.text_config.vocab_size, where=where)


def _thinker(text: _ThinkerText, where: str) -> ThinkerSpec:
    decoder = text.experts(f"{where}: thinker", text.num_experts, None)
    return ThinkerSpec(decoder=decoder, vocab_size=text.vocab_size)


def _talker(omni: _Omni, where: str) -> TalkerSpec:
    talker = omni.talker_config
    text, predictor = talker.text_config, talker.code_predictor_config
    if predictor.num_code_groups != talker.num_code_groups:
        raise CheckpointError(
            f"{where}: talker has {talker.num_code_groups} code groups, its code predictor "
            f"{predictor.num_code_groups}"
        )
    if predictor.hidden_size != text.hidden_size:
        raise CheckpointError(
            f"{where}: talker hidden_size {text.hidden_size} and code predictor hidden_size "
            f"{predictor.hidden_size} differ"
        )
    if not talker.speaker_id:
        raise CheckpointError(f"{where}: talker_config.speaker_id names no speaker")
    return TalkerSpec(
        decoder=text.experts(
            f"{where}: talker", text.num_local_experts, text.shared_expert_intermediate_size
        ),
        predictor=predictor.decoder(
            f"{where}: code predictor", DenseConfig(intermediate_size=predictor.intermediate_size)
        ),
        vocab_size=text.vocab_size,
        num_codebooks=talker.num_code_groups,
        codebook_size=predictor.vocab_size,
        thinker_hidden_size=talker.thinker_hidden_size,
        thinker_vocab_size=omni.thinker_config.text_config.vocab_size,
        projection_size=text.intermediate_size,
        codec_ids=CodecIds(
            eos=talker.codec_eos_token_id,
            bos=talker.codec_bos_id,
            pad=talker.codec_pad_id,
            nothink=talker.codec_nothink_id,
            think_bos=talker.codec_think_bos_id,
            think_eos=talker.codec_think_eos_id,
        ),
        speakers={name.lower(): index for name, index in talker.speaker_id.items()},
    )
