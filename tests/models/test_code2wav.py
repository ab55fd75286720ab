"""A stream of any portions sounds as one decode of the whole, sample for sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configurations
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference_models

from stretto.models.code2wav import Code2Wav, Code2WavConfig
from stretto.models.qwen3_omni.spec import OmniSpec
from tests.models.small import load, save_as, scatter
from tests.models.sound import (
    assert_exact,
    assert_same_sound,
    one_shot,
    portions_of,
    some_codes,
    streamed,
)

pytestmark = pytest.mark.usefixtures("no_gradients")


# ---- the tiny checkpoint's vocoder ---------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 25, 80])
def test_a_stream_is_transformers_decode_of_the_whole(
    code2wav: Code2Wav, tiny_reference: Any, size: int
) -> None:
    """80 frames: more than the window of 72."""
    codes = some_codes(code2wav.config, 80)
    expected = one_shot(tiny_reference.code2wav, codes)
    assert expected.abs().max() > 0.1
    got = streamed(code2wav, codes, portions_of(80, size))
    assert len(got) == 80 * 1920 - 555
    assert_same_sound(got, expected)


def test_the_config_knows_how_many_samples_frames_have(tiny_spec: OmniSpec) -> None:
    assert tiny_spec.code2wav.samples_per_frame == 1920
    assert tiny_spec.code2wav.samples_missing == 555


# ---- small vocoders of several shapes ------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "as published, small": {},
    "a window of three": {"sliding_window": 3},
    "other rates": {"upsample_rates": [2, 3], "upsampling_ratios": [3], "decoder_dim": 32},
    "one layer, one codebook": {"num_hidden_layers": 1, "num_quantizers": 1},
    "one ratio": {"upsampling_ratios": [2], "upsample_rates": [4, 2]},
}


def a_vocoder(directory: Path, changes: dict[str, Any]) -> tuple[Any, Code2Wav]:
    """transformers' and ours over the same weights."""
    base: dict[str, Any] = {
        "codebook_size": 20, "num_quantizers": 4, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "sliding_window": 8, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
        "decoder_dim": 32, "max_position_embeddings": 8000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **changes,
    }  # fmt: skip
    theirs = configurations.Qwen3OmniMoeCode2WavConfig(**base)
    reference: Any = reference_models.Qwen3OmniMoeCode2Wav(theirs)
    scatter(reference, seed=5)
    # Loud enough to be heard, not so loud that everything is clipped.
    reference.decoder[-1].conv.weight.data *= 0.05
    save_as(directory, reference, "code2wav.")
    config = Code2WavConfig(
        num_codebooks=base["num_quantizers"],
        codebook_size=base["codebook_size"],
        hidden_size=base["hidden_size"],
        num_layers=base["num_hidden_layers"],
        num_heads=base["num_attention_heads"],
        head_dim=base["hidden_size"] // base["num_attention_heads"],
        intermediate_size=base["intermediate_size"],
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=1e4,
        sliding_window=base["sliding_window"],
        upsampling_ratios=tuple(base["upsampling_ratios"]),
        upsample_rates=tuple(base["upsample_rates"]),
        decoder_dim=base["decoder_dim"],
    )
    model = load(directory, lambda source: Code2Wav(source, config), torch.float64)
    return reference.double().eval(), model


@pytest.fixture(scope="module", params=list(SHAPES.values()), ids=list(SHAPES))
def vocoder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Code2Wav]:
    return a_vocoder(tmp_path_factory.mktemp("vocoder"), request.param)


@pytest.fixture(scope="module")
def published(tmp_path_factory: Any) -> tuple[Any, Code2Wav]:
    return a_vocoder(tmp_path_factory.mktemp("vocoder"), {})


@pytest.mark.parametrize("size", [1, 2, 3, 25])
def test_a_vocoder_of_any_shape_streams_what_it_decodes(
    vocoder: tuple[Any, Code2Wav], size: int
) -> None:
    reference, model = vocoder
    codes = some_codes(model.config, 40)
    expected = one_shot(reference, codes)
    config = model.config
    assert 0.01 < float(expected.std()) < 0.8
    assert len(expected) == 40 * config.samples_per_frame - config.samples_missing
    assert_exact(model, reference, codes, streamed(model, codes, portions_of(40, size)))


@pytest.mark.parametrize("rest", range(25))
def test_every_remainder_is_heard_to_the_last_sample(
    published: tuple[Any, Code2Wav], rest: int
) -> None:
    reference, model = published
    codes = some_codes(model.config, 75 + rest, seed=rest)
    got = streamed(model, codes, [4, *portions_of(71 + rest, 25)])
    assert_exact(model, reference, codes, got)


@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_the_shortest_of_streams_are_heard(vocoder: tuple[Any, Code2Wav], num_frames: int) -> None:
    reference, model = vocoder
    codes = some_codes(model.config, num_frames)
    for size in {1, num_frames}:
        got = streamed(model, codes, portions_of(num_frames, size))
        assert_exact(model, reference, codes, got)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_any_portions_will_do(published: tuple[Any, Code2Wav], portions: list[int]) -> None:
    reference, model = published
    with torch.inference_mode():
        codes = some_codes(model.config, sum(portions))
        assert_exact(model, reference, codes, streamed(model, codes, portions))


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=2,
        max_size=4,
    ),
    st.randoms(),
)
def test_streams_that_come_and_go_share_a_batch_and_hear_nothing_of_each_other(
    published: tuple[Any, Code2Wav], talks: list[tuple[int, list[int]]], random: Any
) -> None:
    """Each stream joins at its step, and gives portions of its own sizes, in any order of rows."""
    reference, model = published
    with torch.inference_mode():
        codes = [
            some_codes(model.config, sum(sizes), seed=at) for at, (_, sizes) in enumerate(talks)
        ]
        states = [model.open() for _ in talks]
        parts = [
            list(torch.split(own, sizes)) for own, (_, sizes) in zip(codes, talks, strict=True)
        ]
        heard: list[list[Tensor]] = [[] for _ in talks]
        for step in range(10):
            rows = [
                at
                for at, (joins, _) in enumerate(talks)
                if step >= joins and parts[at] and random.random() < 0.8
            ]
            random.shuffle(rows)
            if rows:
                samples = model.feed([parts[at].pop(0) for at in rows], [states[at] for at in rows])
                for at, own in zip(rows, samples, strict=True):
                    heard[at].append(own)
        for at, own in enumerate(codes):
            num_fed = len(own) - sum(map(len, parts[at]))
            if num_fed:
                assert_exact(model, reference, own[:num_fed], torch.cat(heard[at]))


def test_the_same_portions_give_the_same_bits(published: tuple[Any, Code2Wav]) -> None:
    _, model = published
    codes = some_codes(model.config, 60)
    once, again = (streamed(model, codes, portions_of(60, 7)) for _ in range(2))
    assert torch.equal(once, again)


def test_what_a_stream_remembers_does_not_grow(published: tuple[Any, Code2Wav]) -> None:
    _, model = published
    state = model.open()

    def size() -> int:
        return state.kv.untyped_storage().nbytes() + sum(
            tail.untyped_storage().nbytes() for tail in state.tails
        )

    sizes = []
    for step in range(40):
        model.feed([some_codes(model.config, 1 + step % 25, seed=step)], [state])
        sizes.append(size())
    assert len(set(sizes)) == 1


def test_the_samples_of_a_stream_are_not_overwritten_by_the_next_feed(
    published: tuple[Any, Code2Wav],
) -> None:
    _, model = published
    state = model.open()
    first = model.feed([some_codes(model.config, 5)], [state])[0]
    kept = first.clone()
    for seed in range(5):
        model.feed([some_codes(model.config, 5, seed=seed)], [state])
    assert torch.equal(first, kept)
