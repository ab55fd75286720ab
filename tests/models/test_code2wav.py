"""A stream of any portions sounds as one decode of the whole, sample for sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.engine.generation_runner import GenerationRunner
from stretto.models.code2wav import Code2Wav
from stretto.models.qwen3_omni.spec import OmniSpec
from tests.models.sound import (
    assert_exact,
    assert_same_sound,
    one_shot,
    portions_of,
    some_codes,
    streamed,
)
from tests.models.vocoders import VOCODERS, Vocoder, omni_vocoder, tts_vocoder

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


def test_calls_ahead_leave_nothing_in_what_is_heard(code2wav: Code2Wav) -> None:
    codes = some_codes(code2wav.config, 9)
    expected = streamed(code2wav, codes, [4, 5])
    calls = [(1, 2), (2, 3), (4, 1)]
    runner = GenerationRunner(code2wav, calls)
    assert [runner.prepare() for _ in range(4)] == [True, True, True, False]
    assert torch.equal(streamed(code2wav, codes, [4, 5]), expected)


def test_the_config_knows_how_many_samples_frames_have(tiny_spec: OmniSpec) -> None:
    assert tiny_spec.code2wav.samples_per_frame == 1920
    assert tiny_spec.code2wav.samples_missing == 555


# ---- small vocoders of several shapes ------------------------------------------------------------


@pytest.fixture(scope="module", params=list(VOCODERS.values()), ids=list(VOCODERS))
def vocoder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Vocoder:
    make, changes = request.param
    made: Vocoder = make(tmp_path_factory.mktemp("vocoder"), changes)
    return made


@pytest.fixture(scope="module", params=[omni_vocoder, tts_vocoder])
def published(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Vocoder:
    """With the published rates."""
    made: Vocoder = request.param(tmp_path_factory.mktemp("vocoder"), {})
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 25])
def test_a_vocoder_of_any_shape_streams_what_it_decodes(vocoder: Vocoder, size: int) -> None:
    reference, model = vocoder
    codes = some_codes(model.config, 40)
    expected = one_shot(reference, codes)
    config = model.config
    assert 0.01 < float(expected.std()) < 0.8
    assert len(expected) == 40 * config.samples_per_frame - config.samples_missing
    assert_exact(model, reference, codes, streamed(model, codes, portions_of(40, size)))


@pytest.mark.parametrize("rest", range(25))
def test_every_remainder_is_heard_to_the_last_sample(published: Vocoder, rest: int) -> None:
    reference, model = published
    codes = some_codes(model.config, 75 + rest, seed=rest)
    got = streamed(model, codes, [4, *portions_of(71 + rest, 25)])
    assert_exact(model, reference, codes, got)


@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_the_shortest_of_streams_are_heard(vocoder: Vocoder, num_frames: int) -> None:
    reference, model = vocoder
    codes = some_codes(model.config, num_frames)
    for size in {1, num_frames}:
        got = streamed(model, codes, portions_of(num_frames, size))
        assert_exact(model, reference, codes, got)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_any_portions_will_do(published: Vocoder, portions: list[int]) -> None:
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
    published: Vocoder, talks: list[tuple[int, list[int]]], random: Any
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


def test_the_same_portions_give_the_same_bits(published: Vocoder) -> None:
    _, model = published
    codes = some_codes(model.config, 60)
    once, again = (streamed(model, codes, portions_of(60, 7)) for _ in range(2))
    assert torch.equal(once, again)


def test_what_a_stream_remembers_does_not_grow(published: Vocoder) -> None:
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
    published: Vocoder,
) -> None:
    _, model = published
    state = model.open()
    first = model.feed([some_codes(model.config, 5)], [state])[0]
    kept = first.clone()
    for seed in range(5):
        model.feed([some_codes(model.config, 5, seed=seed)], [state])
    assert torch.equal(first, kept)
