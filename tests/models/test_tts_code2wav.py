"""The 12 Hz decoder: a stream of any portions sounds as the reference's decode of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.models.code2wav import Code2Wav, Code2WavConfig, SplitQuantizerConfig
from tests.models.conftest import Tts
from tests.models.small import load, save_as, scatter
from tests.models.sound import (
    assert_exact,
    assert_same_sound,
    one_shot,
    portions_of,
    some_codes,
    streamed,
)
from tests.reference_tts import one_shot as reference_sound
from tests.reference_tts import plain_rotary, reference_module

pytestmark = pytest.mark.usefixtures("no_gradients")


# ---- the tiny checkpoint's decoder ---------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 25, 80])
def test_a_stream_is_the_references_decode_of_the_whole(tts_base: Tts, size: int) -> None:
    """80 frames: more than the window of 72."""
    codes = some_codes(tts_base.code2wav.config, 80)
    expected = reference_sound(tts_base.reference, codes)
    assert 0.1 < expected.abs().max() < 1.0
    got = streamed(tts_base.code2wav, codes, portions_of(80, size))
    assert len(got) == 80 * 1920
    assert_same_sound(got, expected)


def test_nothing_is_missing_and_nothing_held_back(tts_base: Tts) -> None:
    config = tts_base.spec.code2wav
    assert (config.samples_per_frame, config.samples_missing) == (1920, 0)
    state = tts_base.code2wav.open()
    for num_frames in (1, 2, 1, 5):
        (samples,) = tts_base.code2wav.feed([some_codes(config, num_frames)], [state])
        assert len(samples) == num_frames * 1920


# ---- small decoders of several shapes ------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "as published, small": {},
    "a window of three": {"sliding_window": 3},
    "other rates": {"upsample_rates": [2, 3], "upsampling_ratios": [3], "decoder_dim": 32},
    "one layer, two codebooks": {"num_hidden_layers": 1, "num_quantizers": 2},
    "one ratio": {"upsampling_ratios": [2], "upsample_rates": [4, 2]},
    "one width": {"codebook_dim": 32, "latent_dim": 32, "hidden_size": 32, "head_dim": 16},
}


def a_vocoder(directory: Path, changes: dict[str, Any]) -> tuple[Any, Code2Wav]:
    """The reference's and ours over the same weights."""
    base: dict[str, Any] = {
        "codebook_size": 20, "codebook_dim": 24, "num_quantizers": 4, "latent_dim": 40,
        "hidden_size": 32, "intermediate_size": 28, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 8,
        "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "decoder_dim": 32,
        **changes,
    }  # fmt: skip
    configurations = reference_module("core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
    models = reference_module("core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2")
    theirs = configurations.Qwen3TTSTokenizerV2DecoderConfig(**base)
    with plain_rotary():
        reference = models.Qwen3TTSTokenizerV2Decoder(theirs)
    scatter(reference, seed=5)
    for name, parameter in reference.named_parameters():
        if name.endswith("cluster_usage"):
            parameter.data.uniform_(0.5, 1.5)
            # Never used in training: its sum is not divided by nothing.
            parameter.data[3] = 0.0
            reference.get_parameter(name.replace("cluster_usage", "embedding_sum")).data[3] *= 1e-5
    # Loud enough to be heard, not so loud that everything is clipped.
    reference.decoder[-1].conv.weight.data *= 0.02
    save_as(directory, reference, "decoder.")
    config = Code2WavConfig(
        num_codebooks=base["num_quantizers"],
        codebook_size=base["codebook_size"],
        hidden_size=base["hidden_size"],
        num_layers=base["num_hidden_layers"],
        num_heads=base["num_attention_heads"],
        head_dim=base["head_dim"],
        intermediate_size=base["intermediate_size"],
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=1e4,
        sliding_window=base["sliding_window"],
        upsampling_ratios=tuple(base["upsampling_ratios"]),
        upsample_rates=tuple(base["upsample_rates"]),
        decoder_dim=base["decoder_dim"],
        quantizer=SplitQuantizerConfig(
            codebook_dim=base["codebook_dim"], latent_dim=base["latent_dim"]
        ),
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
def test_a_decoder_of_any_shape_streams_what_it_decodes(
    vocoder: tuple[Any, Code2Wav], size: int
) -> None:
    reference, model = vocoder
    codes = some_codes(model.config, 40)
    expected = one_shot(reference, codes)
    assert 0.01 < float(expected.std()) < 0.8
    assert len(expected) == 40 * model.config.samples_per_frame
    assert_exact(model, reference, codes, streamed(model, codes, portions_of(40, size)))


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


def test_what_a_stream_remembers_does_not_grow(published: tuple[Any, Code2Wav]) -> None:
    _, model = published
    state = model.open()
    sizes = set()
    for step in range(20):
        model.feed([some_codes(model.config, 1 + step % 12, seed=step)], [state])
        kept = [state.kv, *state.tails]
        sizes.add(sum(tensor.untyped_storage().nbytes() for tensor in kept))
    assert len(sizes) == 1
