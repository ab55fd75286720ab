"""The 12 Hz decoder: a stream of any portions sounds as the reference's decode of the whole."""

from __future__ import annotations

import pytest

from tests.models.conftest import Tts
from tests.models.sound import (
    assert_same_sound,
    portions_of,
    some_codes,
    streamed,
)
from tests.reference_tts import one_shot as reference_sound

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
