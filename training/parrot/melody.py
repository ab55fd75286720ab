"""Intonation in what a frame can say: where its pulses stand, one of 66 ways.

espeak's own pitch is taken over, half a pulse a frame (6.25 Hz) at a time. So that the wave stays a
function of the codes, a frame says how far into a period it begins, at its start or in the middle
of one; and its rate is steady, or rises or falls by half a pulse a frame. A frame without voice is
melody 0; the one behind it begins a period.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Pulses a frame of 80 ms, so 75 to 137.5 Hz.
_SLOWEST, _FASTEST, _RATE_STEP = 6.0, 11.0, 0.5
_SLOPES = (0.0, 0.5, -0.5)
_PHASES = (0.0, 0.5)
_RATES = np.arange(_SLOWEST, _FASTEST + _RATE_STEP / 2, _RATE_STEP)
# What a melody's rates are: steady, rising and falling for each mean.
_MEANS = np.repeat(_RATES, len(_SLOPES))
_CHANGES = np.tile(_SLOPES, len(_RATES))
# A frame without voice, and a voiced one for each phase and rate.
UNVOICED = 0
NUM_MELODIES = 1 + len(_PHASES) * len(_MEANS)
_UNVOICED_RATE = 8.0

_WINDOW, _FFT = 1400, 2048
_LOWEST_HZ, _HIGHEST_HZ = 68.0, 145.0
# Below this likeness of neighbouring periods a pitch is not believed; and a wrong one costs no
# more than this many pulses a frame.
_PERIODIC, _WORST = 0.75, 1.0
_SILENT = 1e-9
# What a leap of a pulse a frame between two frames costs, beside being wrong by one all frame long.
_LEAP_COST = 0.3


@dataclass(frozen=True)
class Pulses:
    """Where each pulse stands and how long its period is, in frames: float64 [n] each."""

    times: np.ndarray
    periods: np.ndarray


def pitch(samples: np.ndarray, rate: int, times: np.ndarray) -> np.ndarray:
    """Hz at `times` [n] (in samples) of a voice [samples]; NaN where it has no clear pitch."""
    half = _WINDOW // 2
    padded = np.pad(samples.astype(np.float32), (_WINDOW, 2 * _WINDOW))
    starts = np.clip(times, 0, len(samples)).astype(int) + _WINDOW - half
    window = np.hanning(_WINDOW).astype(np.float32)
    views = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[starts] * window
    likeness = np.fft.irfft(np.abs(np.fft.rfft(views, _FFT)) ** 2)
    own = np.fft.irfft(np.abs(np.fft.rfft(window, _FFT)) ** 2)
    lags = np.arange(int(rate / _HIGHEST_HZ), int(rate / _LOWEST_HZ) + 1)
    likeness = likeness[:, lags] / (likeness[:, :1] + _SILENT) * (own[0] / own[lags])
    return np.where(likeness.max(1) > _PERIODIC, rate / lags[likeness.argmax(1)], np.nan)


def fitted_melodies(rates: np.ndarray, voiced: np.ndarray) -> np.ndarray:
    """Melodies uint8 [m] nearest to `rates` [m, k], pulses a frame at k even places in each frame.

    NaN is not known. Frames that are not `voiced` [m] have none. (Viterbi's path through rates and
    slopes; the phases follow from it.)
    """
    frames, places = rates.shape
    at = (np.arange(places) + 0.5) / places - 0.5
    wanted = _MEANS[:, None] + _CHANGES[:, None] * at
    wrong = np.minimum(np.abs(rates[:, None] - wanted), _WORST) ** 2
    costs = np.nan_to_num(wrong).mean(2)
    starts, ends = _MEANS - _CHANGES / 2, _MEANS + _CHANGES / 2
    leaps = _LEAP_COST * np.abs(starts[None] - ends[:, None])
    total = costs[0]
    back = np.zeros((frames, len(_MEANS)), int)
    for frame in range(1, frames):
        ways = total[:, None] + leaps
        back[frame] = ways.argmin(0)
        total = ways.min(0) + costs[frame]
    path = np.zeros(frames, int)
    path[-1] = total.argmin()
    for frame in range(frames - 1, 0, -1):
        path[frame - 1] = back[frame, path[frame]]
    melodies = np.zeros(frames, np.uint8)
    phase = 0.0
    for frame in range(frames):
        if not voiced[frame]:
            phase = 0.0
            continue
        melodies[frame] = 1 + path[frame] + len(_MEANS) * (phase == _PHASES[1])
        phase = (phase + _MEANS[path[frame]]) % 1
    return melodies


def pulses(melodies: np.ndarray) -> Pulses:
    """The pulses of frames with these melodies [m]."""
    times, periods = [], []
    for frame, melody in enumerate(melodies.tolist()):
        mean, change, phase = _UNVOICED_RATE, 0.0, 0.0
        if melody != UNVOICED:
            phase = _PHASES[(melody - 1) // len(_MEANS)]
            mean, change = (column[(melody - 1) % len(_MEANS)] for column in (_MEANS, _CHANGES))
        start = mean - change / 2
        # Periods begun since the frame began: start t + change t^2 / 2.
        begun = np.arange(np.ceil(phase), phase + mean) - phase
        root = np.sqrt(start**2 + 2 * change * begun)
        times.append(frame + 2 * begun / (start + root))
        periods.append(1 / root)
    return Pulses(np.concatenate(times), np.concatenate(periods))
