"""From float samples to the bytes of a format, piece by piece.

    samples ─> [Stretch] ─> [Resample] ─> Encoder ─> bytes          push ... push, finish

Every step gives the same whatever the pieces are, and gives out early what is certain. Everything
is mono. Where a container wants lengths in its header, a stream says "unknown" (WAV 0xFFFFFFFF,
FLAC 0); `encode_whole` knows them. `aac` needs a library that is not here.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal, Protocol, assert_never, get_args

import lameenc
import numpy as np
import soundfile
import soxr

from stretto.audio import pcm16, wav_bytes, wav_header

AudioFormat = Literal["mp3", "opus", "flac", "wav", "pcm"]
FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
MEDIA_TYPES: dict[AudioFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
# The rates that all formats can hold.
SAMPLE_RATES = (8000, 12000, 16000, 24000, 48000)

MP3_KBPS = 64
# LAME's middle: 7 is fastest, 2 is best.
MP3_QUALITY = 5
# libsndfile keeps a second of Ogg pages back unless told otherwise: the first sound would be late.
OGG_PAGE_MS = 20.0
SFC_SET_OGG_PAGE_LATENCY_MS = 0x1302

# The grains that `Stretch` joins, long enough for the lowest voice and short enough for a syllable,
# and how far it looks around for the place where the next one fits best.
GRAIN_S = 0.040
SEARCH_S = 0.010


class Encoder(Protocol):
    def push(self, samples: np.ndarray) -> bytes:
        """The bytes that are certain now; float32 [n] in -1..1."""

    def finish(self) -> bytes:
        """What was held back; nothing follows."""


def open_encoder(audio_format: AudioFormat, sample_rate: int) -> Encoder:
    match audio_format:
        case "pcm":
            return _Pcm(header=b"")
        case "wav":
            return _Pcm(header=wav_header(None, sample_rate))
        case "mp3":
            return _Mp3(sample_rate)
        case "flac" | "opus":
            return _SoundFile(audio_format, sample_rate, _Pipe())
        case other:
            assert_never(other)


def encode_whole(audio_format: AudioFormat, samples: np.ndarray, sample_rate: int) -> bytes:
    """A whole file, its lengths in its header where the format has a place for them."""
    if audio_format == "wav":
        return wav_bytes(samples, sample_rate)
    if audio_format == "flac":
        file = io.BytesIO()
        writer = _SoundFile("flac", sample_rate, file)
        writer.push(samples)
        writer.finish()
        return file.getvalue()
    encoder = open_encoder(audio_format, sample_rate)
    return encoder.push(samples) + encoder.finish()


class _Pcm:
    def __init__(self, *, header: bytes) -> None:
        self._header = header

    def push(self, samples: np.ndarray) -> bytes:
        header, self._header = self._header, b""
        return header + pcm16(samples)

    def finish(self) -> bytes:
        return self._header


class _Mp3:
    """Constant bit rate, no Xing and no ID3 header."""

    def __init__(self, sample_rate: int) -> None:
        self._lame = lameenc.Encoder()
        self._lame.silence()
        self._lame.set_channels(1)
        self._lame.set_in_sample_rate(sample_rate)
        self._lame.set_out_sample_rate(sample_rate)
        self._lame.set_bit_rate(MP3_KBPS)
        self._lame.set_quality(MP3_QUALITY)
        self._is_fed = False

    def push(self, samples: np.ndarray) -> bytes:
        if not len(samples):
            return b""
        self._is_fed = True
        return bytes(self._lame.encode(pcm16(samples)))

    def finish(self) -> bytes:
        # LAME refuses to end what never began.
        return bytes(self._lame.flush()) if self._is_fed else b""


class _Pipe:
    """A file for libsndfile that only ever moves on: what was taken cannot be written again.

    At its end the FLAC writer goes back to fill in lengths; by then its header is with the client.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._taken = 0
        self._at = 0

    def take(self) -> bytes:
        taken = bytes(self._bytes)
        self._bytes.clear()
        self._taken += len(taken)
        return taken

    def write(self, data: bytes) -> int:
        at = self._at - self._taken
        if at >= 0:
            self._bytes[at : at + len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._at,
            io.SEEK_END: self._taken + len(self._bytes),
        }
        self._at = origins[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        raise OSError("a pipe for writing")


class _SoundFile:
    def __init__(
        self, audio_format: Literal["flac", "opus"], sample_rate: int, file: _Pipe | io.BytesIO
    ) -> None:
        container, subtype = {"flac": ("FLAC", "PCM_16"), "opus": ("OGG", "OPUS")}[audio_format]
        self._is_pcm = audio_format == "flac"
        self._file = file
        self._writer = soundfile.SoundFile(
            file, "w", sample_rate, channels=1, format=container, subtype=subtype
        )
        if audio_format == "opus":
            # The library can do it; its Python binding has no name for it.
            latency = soundfile._ffi.new("double *", OGG_PAGE_MS)
            soundfile._snd.sf_command(
                self._writer._file,
                SFC_SET_OGG_PAGE_LATENCY_MS,
                latency,
                soundfile._ffi.sizeof("double"),
            )

    def push(self, samples: np.ndarray) -> bytes:
        if self._is_pcm:
            # Our own rounding, so that FLAC holds the very samples that PCM has.
            self._writer.write(np.frombuffer(pcm16(samples), "<i2"))
        else:
            self._writer.write(np.ascontiguousarray(samples, np.float32))
        return self._take()

    def finish(self) -> bytes:
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        return self._file.take() if isinstance(self._file, _Pipe) else b""


class Filter(Protocol):
    def push(self, samples: np.ndarray) -> np.ndarray: ...

    def finish(self) -> np.ndarray: ...


class Resample:
    def __init__(self, rate_in: int, rate_out: int) -> None:
        self._stream = soxr.ResampleStream(rate_in, rate_out, 1, dtype="float32")

    def push(self, samples: np.ndarray) -> np.ndarray:
        resampled: np.ndarray = self._stream.resample_chunk(samples)
        return resampled

    def finish(self) -> np.ndarray:
        rest: np.ndarray = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        return rest


class Stretch:
    """Faster or slower at the same pitch (WSOLA): grains of the input are laid over each other.

    Output grain k begins half a grain after grain k - 1. It is taken from about k * step in the
    input, at the place near there that goes on best from where grain k - 1 left off.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        self._speed = speed
        self._half = round(GRAIN_S * sample_rate / 2)
        self._search = round(SEARCH_S * sample_rate)
        # Two of these, half a grain apart, sum up to 1.
        self._window = np.hanning(2 * self._half + 1)[:-1].astype(np.float32)
        # Input from position `_base` on; what no grain can reach any more is dropped.
        self._input = np.zeros(0, np.float32)
        self._base = 0
        self._num_pushed = 0
        self._num_given = 0
        self._next_grain = 0
        # Where the grain before would go on, and what of it is still to be overlaid.
        self._follow = 0
        self._tail: np.ndarray | None = None

    def push(self, samples: np.ndarray) -> np.ndarray:
        self._num_pushed += len(samples)
        return self._run(samples)

    def finish(self) -> np.ndarray:
        """The rest; in all as many samples as the input had, divided by the speed."""
        wanted = round(self._num_pushed / self._speed) - self._num_given
        grain = 2 * self._half
        silence = np.zeros(int(grain * (self._speed + 2)) + 2 * self._search, np.float32)
        rest = [self._run(silence)]
        while sum(map(len, rest)) < wanted:
            rest.append(self._run(silence))
        return np.concatenate(rest)[:wanted]

    def _run(self, samples: np.ndarray) -> np.ndarray:
        self._input = np.concatenate([self._input, samples])
        ready: list[np.ndarray] = []
        end = self._base + len(self._input)
        while max(self._target + self._search, self._follow) + 2 * self._half <= end:
            ready.append(self._join())
        given = np.concatenate(ready) if ready else np.zeros(0, np.float32)
        self._num_given += len(given)
        return given

    @property
    def _target(self) -> int:
        return round(self._next_grain * self._half * self._speed)

    def _join(self) -> np.ndarray:
        """Takes the next grain; half a grain of output that is done with it."""
        start = self._best_start()
        grain = self._slice(start, 2 * self._half)
        if self._tail is None:
            self._tail = grain[: self._half] * self._window[self._half :]
        done = self._tail + grain[: self._half] * self._window[: self._half]
        self._tail = grain[self._half :] * self._window[self._half :]
        self._follow = start + self._half
        self._next_grain += 1
        reach = min(self._target - self._search, self._follow)
        if reach > self._base:
            self._input = self._input[reach - self._base :]
            self._base = reach
        return done

    def _best_start(self) -> int:
        if self._next_grain == 0:
            return 0
        first = max(self._target - self._search, 0)
        around = self._slice(first, self._target + self._search - first + 2 * self._half)
        wanted = self._slice(self._follow, 2 * self._half)
        likeness = np.correlate(around, wanted, mode="valid")
        energy = np.cumsum(np.concatenate([[0.0], np.square(around, dtype=np.float64)]))
        loudness = np.sqrt(energy[2 * self._half :] - energy[: -2 * self._half] + 1e-6)
        return first + int(np.argmax(likeness / loudness))

    def _slice(self, start: int, length: int) -> np.ndarray:
        at = start - self._base
        return self._input[at : at + length]


class EncodedStream:
    """Filters and an encoder as one."""

    def __init__(self, filters: Sequence[Filter], encoder: Encoder) -> None:
        self._filters = filters
        self._encoder = encoder

    def push(self, samples: np.ndarray) -> bytes:
        for step in self._filters:
            samples = step.push(samples)
        return self._encoder.push(samples)

    def finish(self) -> bytes:
        return self._encoder.push(_rest(self._filters)) + self._encoder.finish()


def filtered(filters: Sequence[Filter], samples: np.ndarray) -> np.ndarray:
    """All of a sound through filters that were not used before."""
    for step in filters:
        samples = np.concatenate([step.push(samples), step.finish()])
    return samples


def _rest(filters: Sequence[Filter]) -> np.ndarray:
    """What a chain of filters still holds."""
    rest = np.zeros(0, np.float32)
    for step in filters:
        rest = np.concatenate([step.push(rest), step.finish()])
    return rest


def open_filters(*, speed: float, rate_in: int, rate_out: int) -> list[Filter]:
    """The filters that a request needs; none where nothing changes."""
    filters: list[Filter] = []
    if speed != 1.0:
        filters.append(Stretch(speed, rate_in))
    if rate_out != rate_in:
        filters.append(Resample(rate_in, rate_out))
    return filters
