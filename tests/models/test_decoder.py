"""One decoder, held to transformers' modules: any batch, any cut of a prompt, any shape."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configurations
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference_models

from stretto.models.decoder import (
    Decoder,
    DecoderConfig,
    DenseConfig,
    KVCache,
    MoEConfig,
    Norm,
    Segment,
)
from stretto.models.qwen3_omni.thinker import Thinker
from tests.models.small import CPU, load, save_as, scatter

pytestmark = pytest.mark.usefixtures("no_gradients")

BLOCK = 16


def a_cache(decoder: Decoder, num_blocks: int = 64) -> KVCache:
    return KVCache(
        decoder.config, num_blocks=num_blocks, block_size=BLOCK, dtype=decoder.dtype, device=CPU
    )


def hidden_of(decoder: Decoder, rows: Tensor, cuts: list[int], base: int = 0) -> Tensor:
    """Normed rows of one request whose rows come in parts of the sizes `cuts`."""
    cache = a_cache(decoder)
    parts, start = [], 0
    for size in cuts:
        segment = Segment(0, size, start, base)
        parts.append(decoder.forward(rows[start : start + size], [segment], cache))
        start += size
    assert start == len(rows)
    return decoder.final_norm(torch.cat(parts))


def cuts_of(length: int) -> st.SearchStrategy[list[int]]:
    def sizes(at: set[int]) -> list[int]:
        edges = [0, *sorted(at), length]
        return [b - a for a, b in itertools.pairwise(edges)]

    return st.sets(st.integers(1, length - 1), max_size=8).map(sizes)


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


PROMPT = torch.randint(0, 2900, (70,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def prompt_logits(tiny_reference: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = tiny_reference.thinker(input_ids=PROMPT[None]).logits[0]
    return logits


@settings(max_examples=15)
@given(cuts_of(len(PROMPT)), st.sampled_from([0, 16, 320]))
def test_logits_are_transformers_however_the_prompt_is_cut(
    thinker: Thinker, prompt_logits: Tensor, cuts: list[int], base: int
) -> None:
    with torch.inference_mode():
        hidden = hidden_of(thinker.decoder, thinker.embed(PROMPT), cuts, base)
        assert error(thinker.logits(hidden), prompt_logits) < 1e-4


@pytest.mark.parametrize("cuts", [[70], [1] * 70, [32, 38]])
def test_logits_are_transformers_whole_token_by_token_and_in_two(
    thinker: Thinker, prompt_logits: Tensor, cuts: list[int]
) -> None:
    hidden = hidden_of(thinker.decoder, thinker.embed(PROMPT), cuts)
    assert error(thinker.logits(hidden), prompt_logits) < 1e-4


def test_greedy_text_is_transformers_token_for_token(thinker: Thinker, tiny_reference: Any) -> None:
    num_tokens = 25
    expected = tiny_reference.thinker.generate(
        input_ids=PROMPT[None], max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :]
    decoder, cache = thinker.decoder, a_cache(thinker.decoder)
    x = decoder.forward(thinker.embed(PROMPT), [Segment(0, len(PROMPT), 0, 0)], cache)[-1:]
    answer = []
    for step in range(num_tokens):
        token = thinker.logits(decoder.final_norm(x)).argmax(-1)
        answer.append(int(token))
        x = decoder.forward(thinker.embed(token), [Segment(0, 1, len(PROMPT) + step, 0)], cache)
    assert answer == expected.tolist()


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=2, max_size=5),
    st.integers(0, 100),
)
def test_rows_of_several_requests_in_a_step_are_as_each_alone(
    thinker: Thinker, sizes: list[tuple[int, int]], seed: int
) -> None:
    """Each request has `before` rows behind it; then a step runs some more of all of them."""
    decoder = thinker.decoder
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        cache, alone, step_rows, segments, first = a_cache(decoder), [], [], [], 0
        # Runs lie in the pool in another order than the rows of the step.
        bases = [BLOCK * 3 * at for at in reversed(range(len(sizes)))]
        for (before, now), base in zip(sizes, bases, strict=True):
            ids = torch.randint(0, 2900, (before + now,), generator=generator)
            rows = thinker.embed(ids)
            if before:
                decoder.forward(rows[:before], [Segment(0, before, 0, base)], cache)
            alone.append(hidden_of(decoder, rows, [before + now])[before:])
            step_rows.append(rows[before:])
            segments.append(Segment(first, now, before, base))
            first += now
        together = decoder.final_norm(decoder.forward(torch.cat(step_rows), segments, cache))
        assert error(together, torch.cat(alone)) < 1e-4


def test_what_others_left_in_the_cache_is_never_read(thinker: Thinker) -> None:
    decoder = thinker.decoder
    rows = thinker.embed(PROMPT[:20])
    expected = hidden_of(decoder, rows, [20])
    cache = a_cache(decoder)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    parts = [
        decoder.forward(rows[start : start + 5], [Segment(0, 5, start, 48)], cache)
        for start in range(0, 20, 5)
    ]
    assert error(decoder.final_norm(torch.cat(parts)), expected) < 1e-4


# ---- other shapes --------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "no groups": {"num_key_value_heads": 4},
    "one head for all": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    "one expert each": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 5},
    "weights that do not sum to one": {"norm_topk_prob": False},
    "short waves": {"rope_theta": 100.0},
}


def small_text_config(**changes: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 50, "hidden_size": 40, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "max_position_embeddings": 256, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
        **changes,
    }  # fmt: skip
    half = base["head_dim"] // 2
    theta = base.pop("rope_theta")
    base["rope_parameters"] = {
        "rope_type": "default", "rope_theta": theta, "mrope_interleaved": True,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }  # fmt: skip
    return base


def decoder_config(text: dict[str, Any], mlp: MoEConfig | DenseConfig) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        rms_norm_eps=text["rms_norm_eps"],
        rope_theta=text["rope_parameters"]["rope_theta"],
        max_positions=text["max_position_embeddings"],
        mlp=mlp,
    )


def moe_config(text: dict[str, Any], shared: int | None) -> MoEConfig:
    return MoEConfig(
        num_experts=text["num_experts"],
        num_experts_per_tok=text["num_experts_per_tok"],
        intermediate_size=text["moe_intermediate_size"],
        norm_topk_prob=text["norm_topk_prob"],
        shared_intermediate_size=shared,
    )


def assert_equal_to(model: Any, config: DecoderConfig, directory: Path, **extra: Any) -> None:
    scatter(model, seed=1)
    save_as(directory, model, "part.")
    decoder = load(directory, lambda source: Decoder(source, "part", config))
    rows = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(2))
    expected = model.eval()(inputs_embeds=rows[None], use_cache=False, **extra)
    for cuts in ([30], [1] * 30, [7, 16, 1, 6]):
        got = hidden_of(decoder, rows, cuts)
        assert error(got, expected.last_hidden_state[0]) < 1e-4


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_a_thinker_of_any_shape_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    text = small_text_config(**changes)
    model = reference_models.Qwen3OmniMoeThinkerTextModel(
        configurations.Qwen3OmniMoeTextConfig(**text)
    )
    assert_equal_to(model, decoder_config(text, moe_config(text, None)), tmp_path)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_a_talker_of_any_shape_is_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    text = small_text_config(**changes)
    own = configurations.Qwen3OmniMoeTalkerTextConfig(**text)
    own.shared_expert_intermediate_size = 20
    model = reference_models.Qwen3OmniMoeTalkerModel(own)
    assert_equal_to(model, decoder_config(text, moe_config(text, 20)), tmp_path)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_dense_decoder_is_transformers(num_kv_heads: int, tmp_path: Path) -> None:
    text = small_text_config(num_key_value_heads=num_kv_heads)
    model = reference_models.Qwen3OmniMoeTalkerCodePredictorModel(
        configurations.Qwen3OmniMoeTalkerCodePredictorConfig(**text, num_code_groups=4)
    )
    config = decoder_config(text, DenseConfig(intermediate_size=text["intermediate_size"]))
    positions = torch.arange(30)[None]
    assert_equal_to(model, config, tmp_path, position_ids=positions)


# ---- norms ---------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.integers(1, 100),
    st.floats(-6, 6),
    st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    st.integers(0, 1000),
)
def test_a_norm_is_the_root_mean_square_whatever_the_size_of_its_input(
    size: int, magnitude: float, outlier: float, seed: int
) -> None:
    """Trained models have single channels that are thousands of times larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, size, generator=generator) * 10**magnitude
    x[:, 0] += outlier
    weight = torch.randn(size, generator=generator)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.allclose(Norm(weight, 1e-6)(x).double(), exact, rtol=1e-5, atol=1e-6)
