"""A loader gets what it declares from any layout of a checkpoint, or says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from stretto.errors import CheckpointError
from stretto.models.code2wav import Code2Wav
from stretto.models.decoder import Decoder, DecoderConfig, MoEConfig
from stretto.models.qwen3_omni.spec import OmniSpec, read_spec
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.weights import Checkpoint, DeclaredParameters, ParameterSource
from tests.models.small import CPU

E, I, H = 3, 16, 8  # noqa: E741
CONFIG = DecoderConfig(
    hidden_size=H, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, rms_norm_eps=1e-6,
    rope_theta=1e4, max_positions=16,
    mlp=MoEConfig(num_experts=E, num_experts_per_tok=2, intermediate_size=I, norm_topk_prob=True),
)  # fmt: skip


def declared() -> dict[str, tuple[int, ...]]:
    source = DeclaredParameters()
    Decoder(source, "m", CONFIG)
    return source.shapes


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in declared().items()}


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a layer in one tensor, as transformers holds them."""
    plain = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for layer in range(CONFIG.num_layers):
        prefix = f"m.layers.{layer}.mlp.experts"
        each = [
            {p: state[f"{prefix}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")}
            for e in range(E)
        ]
        plain[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat((own["gate"], own["up"])) for own in each]
        )
        plain[f"{prefix}.down_proj"] = torch.stack([own["down"] for own in each])
    return plain


def saved(directory: Path, state: dict[str, Tensor], num_shards: int = 1) -> Path:
    directory.mkdir(exist_ok=True)
    if num_shards == 1:
        save_file(state, directory / "model.safetensors")
        return directory
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard:05d}.safetensors"
        part = {name: state[name] for name in names[shard::num_shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def load(directory: Path, dtype: torch.dtype | None = None) -> Decoder:
    checkpoint = Checkpoint(directory, dtype=dtype, device=CPU)
    return checkpoint.load(lambda source: Decoder(source, "m", CONFIG))


def output(decoder: Decoder) -> Tensor:
    from stretto.models.decoder import KVCache, Segment

    cache = KVCache(CONFIG, num_blocks=1, block_size=16, dtype=decoder.dtype, device=CPU)
    rows = torch.randn(5, H, generator=torch.Generator().manual_seed(1)).to(decoder.dtype)
    with torch.inference_mode():
        return decoder.final_norm(decoder.forward(rows, [Segment(0, 5, 0, 0)], cache))


def refusal(directory: Path, dtype: torch.dtype | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(directory, dtype)
    return str(refused.value)


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_every_layout_is_the_same_model(tmp_path: Path, num_shards: int, layout: str) -> None:
    plain = output(load(saved(tmp_path / "plain", tensors())))
    state = fused(tensors()) if layout == "fused" else tensors()
    got = output(load(saved(tmp_path / "other", state, num_shards)))
    assert torch.equal(got, plain)


def test_a_bfloat16_checkpoint_keeps_its_type_or_is_widened(tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    widened = {name: tensor.float() for name, tensor in halves.items()}
    exact = output(load(saved(tmp_path / "wide", widened)))
    own = load(saved(tmp_path / "half", halves))
    assert own.dtype == torch.bfloat16
    assert torch.allclose(output(own).float(), exact, atol=0.1, rtol=0.1)
    assert torch.equal(output(load(tmp_path / "half", torch.float32)), exact)


def test_tensors_that_nobody_asks_for_are_left_alone(tmp_path: Path) -> None:
    state = {**tensors(), "audio_tower.weight": torch.zeros(3)}
    assert output(load(saved(tmp_path, state))).isfinite().all()


# ---- what is wrong -------------------------------------------------------------------------------


def test_missing_and_misshaped_tensors_are_named_with_their_shapes(tmp_path: Path) -> None:
    state = tensors()
    del state["m.layers.0.self_attn.q_proj.weight"]
    del state["m.layers.1.mlp.experts.2.up_proj.weight"]
    state["m.norm.weight"] = torch.zeros(5)
    message = refusal(saved(tmp_path, state))
    assert str(tmp_path) in message
    assert f"3 of {len(declared())} tensors do not fit" in message
    assert "m.layers.0.self_attn.q_proj.weight [8, 8] is missing" in message
    assert "m.layers.1.mlp.experts.2.up_proj.weight [16, 8] is missing" in message
    assert "m.norm.weight is [5], expected [8]" in message


def test_of_many_problems_the_first_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    message = refusal(saved(tmp_path, {"something": torch.zeros(1)}))
    assert f"{len(declared())} of {len(declared())} tensors" in message
    assert f"and {len(declared()) - 8} more" in message
    assert len(message.splitlines()) == 10


@pytest.mark.parametrize(
    ("tensor", "shape"), [("gate_up_proj", (E, 2 * I + 1, H)), ("down_proj", (E, H, I + 1))]
)
def test_misshaped_fused_experts_are_named(
    tmp_path: Path, tensor: str, shape: tuple[int, ...]
) -> None:
    state = fused(tensors())
    name = f"m.layers.1.mlp.experts.{tensor}"
    state[name] = torch.zeros(shape)
    assert f"{name} is {list(shape)}" in refusal(saved(tmp_path, state))


@pytest.mark.parametrize("num_experts", [E - 1, E + 1])
def test_another_number_of_fused_experts_is_refused(tmp_path: Path, num_experts: int) -> None:
    state = fused(tensors())
    for layer in range(2):
        prefix = f"m.layers.{layer}.mlp.experts"
        state[f"{prefix}.gate_up_proj"] = torch.zeros(num_experts, 2 * I, H)
        state[f"{prefix}.down_proj"] = torch.zeros(num_experts, H, I)
    assert "experts.gate_up_proj" in refusal(saved(tmp_path, state))


def test_half_fused_experts_are_refused(tmp_path: Path) -> None:
    state = fused(tensors())
    del state["m.layers.0.mlp.experts.down_proj"]
    assert "experts.down_proj [3, 8, 16] is missing" in refusal(saved(tmp_path, state))


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    saved(tmp_path, tensors(), 3)
    (tmp_path / "model-00001.safetensors").unlink()
    assert "model-00001.safetensors: a shard that the index names is missing" in refusal(tmp_path)


def test_a_shard_without_its_tensors_is_no_key_error(tmp_path: Path) -> None:
    saved(tmp_path, tensors(), 3)
    save_file({"other": torch.zeros(1)}, tmp_path / "model-00001.safetensors")
    assert "is missing" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "{}",
        "[]",
        '{"weight_map": [1]}',
        "3",
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "index.json" in refusal(tmp_path)


def test_a_directory_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(tmp_path)


# ---- the published model -------------------------------------------------------------------------


def published_config() -> Qwen3OmniMoeConfig:
    """The sizes of Qwen3-Omni-30B-A3B-Instruct, as its config.json has them."""
    rope = {
        "rope_type": "default", "rope_theta": 1e6,
        "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    }  # fmt: skip
    thinker_text = {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152064, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 768,
        "norm_topk_prob": True, "max_position_embeddings": 65536, "rope_parameters": rope,
    }  # fmt: skip
    talker_text = {
        "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 3072, "num_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 384, "intermediate_size": 2048,
        "shared_expert_intermediate_size": 768, "norm_topk_prob": True,
        "max_position_embeddings": 65536, "rope_parameters": rope,
    }  # fmt: skip
    predictor = {
        "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 2048,
        "num_code_groups": 16,
    }  # fmt: skip
    ids = {"vision_start_token_id": 151652}
    return Qwen3OmniMoeConfig(
        thinker_config={"text_config": thinker_text, **ids},
        talker_config={
            "text_config": talker_text, "code_predictor_config": predictor,
            "num_code_groups": 16, "thinker_hidden_size": 2048, "accept_hidden_layer": 24,
            "spatial_merge_size": 2, "speaker_id": {"chelsie": 2301, "ethan": 2302},
            "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150,
            "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
            **ids,
        },
        code2wav_config={"num_quantizers": 16},
        enable_audio_output=True,
    )  # fmt: skip


def published_shapes(config: Qwen3OmniMoeConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the served parts, experts apart as the published files have them."""
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if name.startswith(("thinker.audio_tower.", "thinker.visual.")):
            continue
        shape = tuple(parameter.shape)
        if name.endswith(".experts.gate_up_proj"):
            experts, twice, hidden = shape
            for expert, projection in [(e, p) for e in range(experts) for p in ("gate", "up")]:
                own = name.replace("gate_up_proj", f"{expert}.{projection}_proj.weight")
                shapes[own] = (twice // 2, hidden)
        elif name.endswith(".experts.down_proj"):
            for expert in range(shape[0]):
                own = name.replace("down_proj", f"{expert}.down_proj.weight")
                shapes[own] = shape[1:]
        else:
            shapes[name] = shape
    return shapes


def declared_by_all_stages(spec: OmniSpec) -> dict[str, tuple[int, ...]]:
    source = DeclaredParameters()
    Thinker(source, spec.thinker)
    Talker(source, spec.talker)
    Code2Wav(source, spec.code2wav)
    return source.shapes


def test_every_parameter_of_the_published_model_is_mapped_with_its_shape_and_none_is_left() -> None:
    config = published_config()
    spec = read_spec(config.to_dict(), "published")
    wanted, there = declared_by_all_stages(spec), published_shapes(config)
    assert len(there) > 20_000
    assert sorted(set(there) - set(wanted)) == []
    assert sorted(set(wanted) - set(there)) == []
    assert {n: (wanted[n], there[n]) for n in there if wanted[n] != there[n]} == {}


def test_the_published_sizes_are_read_as_they_are() -> None:
    spec = read_spec(published_config().to_dict(), "published")
    thinker, talker = spec.thinker.decoder, spec.talker.decoder
    assert (thinker.hidden_size, thinker.num_layers, thinker.num_kv_heads) == (2048, 48, 4)
    assert (talker.hidden_size, talker.num_layers, talker.num_kv_heads) == (1024, 20, 2)
    assert isinstance(thinker.mlp, MoEConfig) and isinstance(talker.mlp, MoEConfig)
    assert (thinker.mlp.num_experts, thinker.mlp.num_experts_per_tok) == (128, 8)
    assert (talker.mlp.num_experts, talker.mlp.num_experts_per_tok) == (128, 6)
    assert (thinker.mlp.shared_intermediate_size, talker.mlp.shared_intermediate_size) == (
        None,
        768,
    )
    assert spec.code2wav.samples_per_frame == 1920


def test_every_tensor_of_the_tiny_checkpoint_is_asked_for(
    tiny_dir: Path, tiny_spec: OmniSpec
) -> None:
    served = {
        name
        for name in load_file(tiny_dir / "model.safetensors")
        if not name.startswith(("thinker.audio_tower.", "thinker.visual."))
    }
    assert served == set(declared_by_all_stages(tiny_spec))


# ---- configs that are not served -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("enable_audio_output",), False, "enable_audio_output"),
        (("talker_config", "speaker_id"), {}, "speaker"),
        (("talker_config", "num_code_groups"), 8, "code groups"),
        (("thinker_config", "text_config", "attention_bias"), True, "attention_bias"),
        (("thinker_config", "text_config", "hidden_act"), "gelu", "hidden_act"),
        (("thinker_config", "text_config", "mlp_only_layers"), [1], "without experts"),
        (("thinker_config", "text_config", "hidden_size"), "wide", "hidden_size"),
        (("code2wav_config", "num_key_value_heads"), 1, "num_key_value_heads"),
        (("im_start_token_id",), None, "im_start_token_id"),
    ],
)
def test_a_config_that_asks_for_what_is_not_supported_is_refused(
    tiny_dir: Path, path: tuple[str, ...], value: Any, told: str
) -> None:
    tree = Qwen3OmniMoeConfig.from_pretrained(tiny_dir).to_dict()
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(CheckpointError, match=told) as refused:
        read_spec(tree, "somewhere/tiny")
    assert str(refused.value).startswith("somewhere/tiny")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("talker_config", "codec_eos_token_id"), 3072),
        (("talker_config", "codec_bos_id"), 4197),
        (("talker_config", "speaker_id"), {"ethan": 3072}),
        (("tts_pad_token_id",), 3072),
        (("im_start_token_id",), -1),
    ],
)
def test_an_id_that_its_vocabulary_has_not_is_refused(
    tiny_dir: Path, path: tuple[str, ...], value: Any
) -> None:
    tree = Qwen3OmniMoeConfig.from_pretrained(tiny_dir).to_dict()
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(CheckpointError, match=path[-1]):
        read_spec(tree, "somewhere/tiny")


def loader_of_nothing(source: ParameterSource) -> None:
    return None


def test_a_loader_that_wants_nothing_is_content(tmp_path: Path) -> None:
    directory = saved(tmp_path, {"x": torch.zeros(1)})
    assert Checkpoint(directory, dtype=None, device=CPU).load(loader_of_nothing) is None
