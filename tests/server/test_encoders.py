"""Streamed bytes are the whole file's bytes, and come early."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.audio import pcm16
from stretto.server.encoders import (
    FORMATS,
    SAMPLE_RATES,
    AudioFormat,
    EncodedStream,
    Filter,
    Resample,
    Stretch,
    encode_whole,
    filtered,
    open_encoder,
    open_filters,
)

RATE = 24000
FRAME = 1920
LOSSLESS: tuple[AudioFormat, ...] = ("pcm", "wav", "flac")


def voice(seconds: float, *, pitch_hz: float = 180.0) -> np.ndarray:
    """Something with the pitch, the overtones and the loudness of speech."""
    t = np.arange(round(seconds * RATE)) / RATE
    tone = sum(np.sin(2 * np.pi * pitch_hz * k * t) / k for k in range(1, 6))
    swell = 0.6 + 0.4 * np.sin(2 * np.pi * 3 * t)
    return (0.3 * tone * swell).astype(np.float32)


def pieces_of(samples: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    bounds = np.cumsum(sizes)
    return np.split(samples, bounds[bounds < len(samples)])


def streamed(audio_format: AudioFormat, pieces: list[np.ndarray], rate: int = RATE) -> bytes:
    encoder = open_encoder(audio_format, rate)
    return b"".join([*map(encoder.push, pieces), encoder.finish()])


def heard(audio_format: AudioFormat, data: bytes, num_samples: int) -> np.ndarray:
    """The samples in a file, int16; `num_samples` is what a streamed FLAC ought to hold."""
    if audio_format == "pcm":
        return np.frombuffer(data, "<i2")
    if audio_format == "wav":
        return np.frombuffer(data[44:], "<i2")
    if audio_format == "flac":
        data = with_length(data, num_samples)
    return np.asarray(soundfile.read(io.BytesIO(data), dtype="int16")[0])


def with_length(flac: bytes, num_samples: int) -> bytes:
    """A FLAC with a length in its header: libsndfile's Python binding reads no other."""
    fields = int.from_bytes(flac[18:26], "big")
    if fields & (2**36 - 1):
        return flac
    return flac[:18] + (fields | num_samples).to_bytes(8, "big") + flac[26:]


SIZES = st.lists(st.sampled_from([0, 1, 555, 1365, 1920, 7777]), min_size=1, max_size=12)


@pytest.mark.parametrize("audio_format", FORMATS)
@settings(max_examples=15)
@given(sizes=SIZES)
def test_what_is_heard_does_not_depend_on_the_pieces(
    audio_format: AudioFormat, sizes: list[int]
) -> None:
    samples = voice(0.9)
    whole = heard(audio_format, encode_whole(audio_format, samples, RATE), len(samples))
    pieces = heard(audio_format, streamed(audio_format, pieces_of(samples, sizes)), len(samples))
    assert np.array_equal(pieces, whole)
    if audio_format in LOSSLESS:
        assert np.array_equal(whole, np.frombuffer(pcm16(samples), "<i2"))


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
def test_compressed_sound_is_whole_and_sounds_the_same(audio_format: AudioFormat) -> None:
    samples = voice(2.0)
    got = heard(audio_format, encode_whole(audio_format, samples, RATE), len(samples)) / 32767
    # An encoder pads its last frame, and MP3 begins with a delay of its own; together less than
    # 0.1 s, which a header with gapless data could take back and a stream has no place for.
    assert 0 <= len(got) - len(samples) < (0.1 * RATE if audio_format == "mp3" else 1)
    shift = 1105 if audio_format == "mp3" else 0
    both = min(len(got) - shift, len(samples))
    likeness = np.corrcoef(got[shift : shift + both], samples[:both])[0, 1]
    assert likeness > 0.98


@pytest.mark.parametrize("audio_format", FORMATS)
def test_first_bytes_come_with_the_first_sound(audio_format: AudioFormat) -> None:
    encoder = open_encoder(audio_format, RATE)
    samples = voice(1.0)
    sizes = [len(encoder.push(piece)) for piece in np.split(samples[: 10 * FRAME], 10)]
    # FLAC waits until a block of 4096 samples is full, LAME until it has looked ahead.
    assert sum(sizes[:3]) > 200
    assert sum(size > 0 for size in sizes) >= 4, "bytes come while sound is made"


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
def test_compressed_sound_leaves_within_a_fifth_of_a_second(audio_format: AudioFormat) -> None:
    encoder = open_encoder(audio_format, RATE)
    # An Ogg stream's headers leave with the first sample and do not count.
    encoder.push(voice(1.0)[:1])
    pieces = np.split(voice(1.0)[: RATE // 5], 20)
    assert sum(len(encoder.push(piece)) for piece in pieces) > 100


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
@pytest.mark.parametrize("rate", SAMPLE_RATES)
def test_every_rate_keeps_its_duration(audio_format: AudioFormat, rate: int) -> None:
    samples = voice(1.0)
    resampled = filtered(open_filters(speed=1.0, rate_in=RATE, rate_out=rate), samples)
    assert abs(len(resampled) - rate) <= 2
    data = encode_whole(audio_format, resampled, rate)
    got, got_rate = soundfile.read(io.BytesIO(data))
    assert got_rate == rate
    assert abs(len(got) / rate - 1.0) < 0.2


@pytest.mark.parametrize("audio_format", FORMATS)
def test_no_sound_at_all_is_no_error(audio_format: AudioFormat) -> None:
    nothing = np.zeros(0, np.float32)
    encode_whole(audio_format, nothing, RATE)
    streamed(audio_format, [nothing])


def test_a_streamed_wav_says_that_its_length_is_unknown() -> None:
    data = streamed("wav", [voice(0.1)])
    assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff"


@pytest.mark.parametrize("make", [lambda: Stretch(1.3, RATE), lambda: Resample(RATE, 16000)])
@settings(max_examples=15)
@given(sizes=SIZES)
def test_filters_give_the_same_whatever_the_pieces(make: object, sizes: list[int]) -> None:
    samples = voice(0.7)
    whole: Filter = make()  # type: ignore[operator]
    parts: Filter = make()  # type: ignore[operator]
    expected = np.concatenate([whole.push(samples), whole.finish()])
    pieces = [parts.push(piece) for piece in pieces_of(samples, sizes)]
    assert np.array_equal(np.concatenate([*pieces, parts.finish()]), expected)


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.9, 1.25, 2.0, 4.0])
def test_speed_changes_duration_and_not_pitch(speed: float) -> None:
    samples = voice(2.0, pitch_hz=200.0)
    fast = filtered([Stretch(speed, RATE)], samples)
    assert len(fast) == round(len(samples) / speed)
    spectrum = np.abs(np.fft.rfft(fast * np.hanning(len(fast))))
    loudest_hz = np.argmax(spectrum) * RATE / len(fast)
    assert abs(loudest_hz - 200.0) < 4.0
    assert np.abs(fast).max() < 1.2 * np.abs(samples).max()
    # No holes: every 40 ms are about as loud as the sound is there.
    grains = fast[: len(fast) // 960 * 960].reshape(-1, 960)[:-1]
    assert np.sqrt(np.mean(grains**2, axis=1)).min() > 0.02


@pytest.mark.parametrize("audio_format", FORMATS)
def test_a_stream_with_filters_is_the_filtered_sound(audio_format: AudioFormat) -> None:
    samples = voice(1.0)
    filters = open_filters(speed=1.5, rate_in=RATE, rate_out=16000)
    stream = EncodedStream(filters, open_encoder(audio_format, 16000))
    data = b"".join([*map(stream.push, pieces_of(samples, [1920] * 20)), stream.finish()])
    whole = filtered(open_filters(speed=1.5, rate_in=RATE, rate_out=16000), samples)
    expected = encode_whole(audio_format, whole, 16000)
    assert np.array_equal(
        heard(audio_format, data, len(whole)), heard(audio_format, expected, len(whole))
    )
