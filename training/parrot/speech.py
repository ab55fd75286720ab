"""Speech on the frame grid: espeak's drone, warped word by word and locked to 100 Hz.

Every text token is one frame of 80 ms, said `DELAY_FRAMES` later, and every frame holds exactly
eight pitch periods, so the wave is nearly a function of the codes alone:

    tokens    H   e   l   l   o   ,   y   o   u
    frames    _   _   _   _  [h   e   l   l   o] [,] [y   o   u]
    pulses                    |||||||| 8 a frame, 240 samples apart

The warp is time-domain pitch-synchronous overlap-add: at each pulse of the grid stands a
two-period window of the drone, taken around its own nearest pulse, or, where the drone is
voiceless, around the warped time itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import soxr
from tokenizers import Tokenizer

from training.parrot.durations import FRAME_S, timed_words
from training.parrot.espeak import Espeak

SAMPLE_RATE = 24_000
FRAME_SAMPLES = 1920
PULSE_SAMPLES = 240
PULSES_PER_FRAME = FRAME_SAMPLES // PULSE_SAMPLES
# How much text the Talker has read when it begins to say a token; and the silence before speech.
DELAY_FRAMES = 4

NUM_MELS = 64
FRAME_MELS = PULSES_PER_FRAME * NUM_MELS

# A word that its tokens would stretch or squeeze by more sounds wrong. "An" alone needs 2.4.
_LEAST_STRETCH, _MOST_STRETCH = 0.35, 3.2
_SHORTEST_WORD_S = 0.025
_SHORTEST_UTTERANCE_SAMPLES = 4000
_LEAD_SAMPLES, _TAIL_SAMPLES = 1200, 2400

_WINDOW = np.hanning(2 * PULSE_SAMPLES + 1)[:-1].astype(np.float32)
_FFT = 1024


@dataclass(frozen=True)
class Stretch:
    """Source samples [start, end) that become `frames` frames; `None` is silence."""

    source: tuple[float, float] | None
    frames: int


@dataclass(frozen=True)
class GridSpeech:
    """`token_ids` [n]; `samples` float32 [(n + DELAY_FRAMES) x 1920]."""

    token_ids: list[int]
    samples: np.ndarray


def speak_on_grid(espeak: Espeak, tokenizer: Tokenizer, text: str) -> GridSpeech | None:
    """The text's tokens and its speech; None if espeak and tokenizer cannot be brought together."""
    utterance = espeak.say(text)
    encoding = tokenizer.encode(text)
    if len(utterance.samples) < _SHORTEST_UTTERANCE_SAMPLES or not utterance.words:
        return None
    if encoding.offsets[-1][1] != len(text):
        return None
    positions = [word.text_position for word in utterance.words]
    if any(later <= earlier for earlier, later in pairwise(positions)):
        return None

    words = timed_words(utterance, text)
    loud = np.nonzero(np.abs(utterance.samples) > 60)[0]
    sound_end = int(loud[-1]) + 1 if len(loud) else len(utterance.samples)
    scale = SAMPLE_RATE / espeak.sample_rate
    stretches = [Stretch(None, DELAY_FRAMES)]
    for index, word in enumerate(words):
        is_last = index + 1 == len(words)
        first = 0 if index == 0 else word.first
        spoken = [
            any(letter.isascii() and letter.isalpha() for letter in token)
            for token, (_, end) in zip(encoding.tokens, encoding.offsets, strict=True)
            if first <= end - 1 < word.last
        ]
        if not any(spoken):
            return None
        lead = spoken.index(True)
        tail = spoken[::-1].index(True)
        end = min(word.end, sound_end) if is_last else word.end
        room = float(tail * FRAME_SAMPLES)
        if not is_last:
            room = min(room, (words[index + 1].start - end) * scale)
            if room < FRAME_SAMPLES / 2:
                # Points that are no pause, as in "T.V.": their frames are the word's.
                room, tail = 0.0, 0
        frames = len(spoken) - lead - tail
        duration_s = (end - word.start) / espeak.sample_rate
        if duration_s < _SHORTEST_WORD_S:
            return None
        if not _LEAST_STRETCH < frames * FRAME_S / duration_s < _MOST_STRETCH:
            return None
        if lead:
            stretches.append(Stretch(None, lead))
        stretches.append(Stretch((word.start * scale, end * scale), frames))
        if tail:
            # The pause behind the word, as far as it goes: its decay is heard.
            stretches.append(Stretch((end * scale, end * scale + room), tail))
    if sum(stretch.frames for stretch in stretches) != len(encoding.ids) + DELAY_FRAMES:
        return None
    drone = utterance.samples.astype(np.float32) / 32768
    source = soxr.resample(drone, espeak.sample_rate, SAMPLE_RATE)
    return GridSpeech(encoding.ids, pulse_locked(source, stretches))


def pulse_locked(source: np.ndarray, stretches: list[Stretch]) -> np.ndarray:
    """The stretches of `source` [n] one after the other, with a pulse every 240 samples."""
    frames = sum(stretch.frames for stretch in stretches)
    locked = np.zeros(frames * FRAME_SAMPLES + 2 * PULSE_SAMPLES, np.float32)
    longest_tail = max(stretch.frames for stretch in stretches) * FRAME_SAMPLES
    padded = np.concatenate(
        [
            np.zeros(_LEAD_SAMPLES, np.float32),
            source,
            np.zeros(_TAIL_SAMPLES + longest_tail, np.float32),
        ]
    )
    for pulse, centre in _pulse_centres(padded, stretches):
        window = _WINDOW * padded[centre - PULSE_SAMPLES : centre + PULSE_SAMPLES]
        start = (pulse - 1) * PULSE_SAMPLES
        if start < 0:
            locked[:PULSE_SAMPLES] += window[PULSE_SAMPLES:]
        else:
            locked[start : start + 2 * PULSE_SAMPLES] += window
    return locked[: frames * FRAME_SAMPLES]


def _pulse_centres(padded: np.ndarray, stretches: list[Stretch]) -> list[tuple[int, int]]:
    """For each pulse of the grid that sounds, where in `padded` its window is taken from."""
    smoothing = np.hanning(97)[1:-1] / 48
    energy = np.convolve(padded * padded, smoothing, "same")
    cumulative = np.concatenate([[0.0], np.cumsum(padded.astype(np.float64) ** 2)])
    half = PULSE_SAMPLES
    reach = PULSE_SAMPLES // 2
    centres: list[tuple[int, int]] = []
    previous: int | None = None
    first_pulse = 0
    for stretch in stretches:
        pulses = stretch.frames * PULSES_PER_FRAME
        if stretch.source is None:
            previous = None
            first_pulse += pulses
            continue
        start, end = stretch.source
        for index in range(pulses):
            at = int(start + (end - start) * index / pulses) + _LEAD_SAMPLES
            centre = at
            is_voiced = False
            if cumulative[at + half] - cumulative[at - half] > 2 * half * 2e-5:
                near = energy[at - reach : at + reach + 1]
                if previous is not None:
                    # The window that continues the last one best, with a little love for peaks.
                    template = padded[previous - half : previous + half]
                    match = np.correlate(
                        padded[at - reach - half : at + reach + half], template, "valid"
                    )
                    power = (
                        cumulative[at - reach + half : at + reach + half + 1]
                        - cumulative[at - reach - half : at + reach - half + 1]
                    )
                    likeness = match / np.sqrt(np.maximum(power * (template @ template), 1e-9))
                    best = int((likeness + 0.2 * near / (near.max() + 1e-9)).argmax())
                    if likeness[best] > 0.45:
                        centre, is_voiced = at - reach + best, True
                if not is_voiced and _periodicity(padded, cumulative, at) > 0.6:
                    centre, is_voiced = at - reach + int(near.argmax()), True
            previous = centre if is_voiced else None
            centres.append((first_pulse + index, centre))
        first_pulse += pulses
    return centres


def _periodicity(padded: np.ndarray, cumulative: np.ndarray, at: int) -> float:
    """How alike the period before `at` and the one behind it are, 1 for a perfect drone."""
    before = padded[at - PULSE_SAMPLES : at]
    power = float(before @ before)
    return max(
        float(before @ padded[at - PULSE_SAMPLES + lag : at + lag])
        / float(np.sqrt(max(power * (cumulative[at + lag] - cumulative[at + lag - 240]), 1e-9)))
        # The drone's period is about 240 samples.
        for lag in range(224, 257, 4)
    )


def mel_filters(low_hz: float = 60, high_hz: float = 11_000) -> np.ndarray:
    """Triangles over FFT bins, each of area 1: float32 [NUM_MELS, bins]."""
    low_mel, high_mel = (2595 * np.log10(1 + hz / 700) for hz in (low_hz, high_hz))
    corners = 700 * (10 ** (np.linspace(low_mel, high_mel, NUM_MELS + 2) / 2595) - 1)
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    hz = np.arange(_FFT // 2 + 1)[None] * SAMPLE_RATE / _FFT
    triangles = np.maximum(
        0, np.minimum((hz - left) / (centre - left), (right - hz) / (right - centre))
    )
    areas = np.maximum(triangles.sum(1, keepdims=True), 1e-9)
    return np.asarray((triangles / areas).astype(np.float32))


_FILTERS = mel_filters()


def log_mels(samples: np.ndarray) -> np.ndarray:
    """Natural log of mel powers, one column per pulse: float32 [samples // 240, NUM_MELS].

    Column j is centred on the second half-period of pulse j: it covers samples
    [240 j - 120, 240 j + 360).
    """
    columns = len(samples) // PULSE_SAMPLES
    padded = np.concatenate(
        [np.zeros(PULSE_SAMPLES // 2, np.float32), samples, np.zeros(480, np.float32)]
    )
    windows = np.lib.stride_tricks.sliding_window_view(padded, 480)[::PULSE_SAMPLES][:columns]
    power = np.abs(np.fft.rfft(windows * _WINDOW, _FFT)) ** 2
    return np.asarray(np.log(power @ _FILTERS.T + 1e-3).astype(np.float32))


def frame_mels(samples: np.ndarray) -> np.ndarray:
    """The codec's input: float32 [frames, FRAME_MELS], eight columns a frame."""
    return log_mels(samples).reshape(-1, FRAME_MELS)
