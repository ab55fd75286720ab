"""Speech on the frame grid: espeak's drone, warped word by word and rebuilt with its intonation.

Every text token is one frame of 80 ms, said `DELAY_FRAMES` later, and the wave is a function of
what the codec encodes, and of nothing else:

    tokens    H   e   l   l   o   ,   y   o   u
    frames    _   _   _   _  [h   e   l   l   o] [,] [y   o   u] _
    columns                   |||||||| 8 a frame, 240 samples apart

No word takes exactly its tokens' time. So its borders give way, half a frame as a rule: a word that
is short of time begins in its neighbour's, and speech keeps an even pace.

At each column of the grid the drone is analysed, at the warped time, into a spectral envelope and
how periodic it is in three bands; the pitch is that of espeak's own intonation, rounded to a
melody for each frame (melody.py). From these alone the voice is built anew: the envelope's
minimum-phase response at every pulse, and noise of the same envelope, always the same noise in
every frame. (A source-filter vocoder in the manner of WORLD, Morise et al. 2016.) So Code2Wav has
nothing to guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import soxr
from tokenizers import Tokenizer

from training.parrot.durations import timed_words
from training.parrot.espeak import Espeak, PhonemeEvent, Utterance
from training.parrot.melody import fitted_melodies, pitch, pulses

SAMPLE_RATE = 24_000
FRAME_SAMPLES = 1920
COLUMN_SAMPLES = 240
COLUMNS_PER_FRAME = FRAME_SAMPLES // COLUMN_SAMPLES
# How much text the Talker has read when it begins to say a token; and the silence before speech.
DELAY_FRAMES = 4
# Silence behind it all, so that a last sound which the Talker says a frame late is not cut.
TAIL_FRAMES = 1

NUM_MELS = 64
# How periodic the voice is below 1.5 kHz, up to 3.5 kHz and above.
_BAND_EDGES_HZ = (0.0, 1500.0, 3500.0, SAMPLE_RATE / 2)
NUM_BANDS = len(_BAND_EDGES_HZ) - 1
FRAME_FEATURES = COLUMNS_PER_FRAME * (NUM_MELS + NUM_BANDS)
# What a wrongly voiced band costs the codec beside a wrong mel: words are lost by it (README).
VOICING_WEIGHT = 12.0

# A word that is stretched or squeezed by more sounds wrong.
_LEAST_STRETCH, _MOST_STRETCH = 0.45, 2.0
# What a border pays for a frame of drift from its tokens, beside a word of one frame stretched to
# two, and what a pause pays for that. A border comes so many frames early or late at most.
_DRIFT_COST, _PAUSE_COST = 0.1, 0.3
_EARLIEST, _LATEST = 1.0, 2.0
_SHORTEST_WORD_S = 0.025
_SHORTEST_UTTERANCE_SAMPLES = 4000
# Whole words give way in parts: vowels most, and the burst of a plosive hardly at all.
_STOPS = frozenset(("p", "t", "k", "b", "d", "g", "tS", "dZ", "?", "t#", "d#"))
_FRICATIVES = frozenset(("f", "v", "T", "D", "s", "z", "S", "Z", "h", "x"))
_SONORANTS = frozenset(("m", "n", "N", "l", "r", "r-", "r/", "w", "j", "m-", "n-", "@L"))
_STOP_GIVES, _FRICATIVE_GIVES, _SONORANT_GIVES, _VOWEL_GIVES = 0.15, 0.5, 0.6, 1.0
_LEAST_PART_STRETCH = 0.3

_FFT = 1024
_BINS_HZ = np.arange(_FFT // 2 + 1) * SAMPLE_RATE / _FFT
_POWER_FLOOR = 1e-3
# Two windows half a period apart: their mean hardly depends on where the pulses lie in them.
_ENVELOPE_WINDOW, _ENVELOPE_SHIFT = 420, 84
_PERIOD_WINDOW = 720
# The drone's own period is near 240 samples.
_LAGS = np.arange(210, 263)
_NOISE, _VOICE = 0.35, 0.85
# A frame with less voice than this at its best has no melody.
_VOICED = 0.2
_MARGIN = 2400
_GAIN = 0.7
# espeak-ng's formants are sharp. Softer and brighter it is understood better (README): of what
# stands out between these distances such a part is taken away, and so much added above 1 kHz. What
# that takes from its loudness it is given back.
_SOFTNESS, _STANDS_OUT_HZ = 0.5, (200.0, 780.0)
_BRIGHTER_DB_AN_OCTAVE, _BRIGHTER_FROM_HZ = 2.0, 1000.0
_LOUDER = 1.25


@dataclass(frozen=True)
class Part:
    """Source samples [start, end), and how readily they stretch: 1 for a vowel."""

    start: float
    end: float
    gives: float


@dataclass(frozen=True)
class Stretch:
    """Neighbouring parts of the source, a word or a pause, that are said over `frames` tokens.

    No parts are silence.
    """

    parts: tuple[Part, ...]
    frames: int
    is_word: bool = False

    @property
    def source_samples(self) -> float:
        return self.parts[-1].end - self.parts[0].start


@dataclass(frozen=True)
class GridSpeech:
    """Speech on m = DELAY_FRAMES + n + TAIL_FRAMES frames, 8 m columns.

    `token_ids` [n]; log-mel powers `mels` [8 m, NUM_MELS], `voicing` [8 m, NUM_BANDS] and
    `melodies` uint8 [m].
    """

    token_ids: list[int]
    mels: np.ndarray
    voicing: np.ndarray
    melodies: np.ndarray

    @property
    def features(self) -> np.ndarray:
        """What the codec encodes beside the melodies: float32 [m, FRAME_FEATURES]."""
        features = np.concatenate([self.mels, VOICING_WEIGHT * self.voicing], 1)
        return features.astype(np.float32).reshape(-1, FRAME_FEATURES)

    def samples(self) -> np.ndarray:
        """The sound: float32 [m x 1920]."""
        return synthesised(self.mels, self.voicing, self.melodies)


def speak_on_grid(espeak: Espeak, tokenizer: Tokenizer, text: str) -> GridSpeech | None:
    """The text's tokens and its speech; None if espeak and tokenizer cannot be brought together."""
    utterance = espeak.say(text)
    intoned = espeak.say_intoned(text)
    encoding = tokenizer.encode(text)
    if len(utterance.samples) < _SHORTEST_UTTERANCE_SAMPLES or not utterance.words:
        return None
    if encoding.offsets[-1][1] != len(text):
        return None
    positions = [word.text_position for word in utterance.words]
    if any(later <= earlier for earlier, later in pairwise(positions)):
        return None
    if len(intoned.phonemes) != len(utterance.phonemes):
        return None

    words = timed_words(utterance, text)
    loud = np.nonzero(np.abs(utterance.samples) > 60)[0]
    sound_end = int(loud[-1]) + 1 if len(loud) else len(utterance.samples)
    scale = SAMPLE_RATE / espeak.sample_rate
    stretches = [Stretch((), DELAY_FRAMES)]
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
        if end - word.start < _SHORTEST_WORD_S * espeak.sample_rate:
            return None
        if lead:
            stretches.append(Stretch((), lead))
        parts = _parts(utterance.phonemes, word.start, end, scale)
        stretches.append(Stretch(parts, len(spoken) - lead - tail, is_word=True))
        if tail:
            # The pause behind the word, as far as it goes: its decay is heard.
            pause = Part(end * scale, end * scale + room, _VOWEL_GIVES)
            stretches.append(Stretch((pause,), tail))
    stretches.append(Stretch((), TAIL_FRAMES))
    frames = DELAY_FRAMES + len(encoding.ids) + TAIL_FRAMES
    if sum(stretch.frames for stretch in stretches) != frames:
        return None
    borders = fitted_borders(stretches)
    for stretch, length in zip(stretches, np.diff(borders, prepend=0), strict=True):
        if stretch.is_word and not (
            _LEAST_STRETCH < length / stretch.source_samples < _MOST_STRETCH
        ):
            return None
    # Minimum-phase pulses are sharper than espeak's own.
    drone = _GAIN * utterance.samples.astype(np.float32) / 32768
    source = soxr.resample(drone, espeak.sample_rate, SAMPLE_RATE)
    times = source_times(stretches, borders)
    mels, voicing = analysed(source, times)
    rates = _pitch_rates(utterance, intoned, times / scale, espeak.sample_rate)
    is_voiced = voicing[:, 0].reshape(-1, COLUMNS_PER_FRAME).max(1) > _VOICED
    return GridSpeech(encoding.ids, mels, voicing, fitted_melodies(rates, is_voiced))


def _pitch_rates(drone: Utterance, intoned: Utterance, times: np.ndarray, rate: int) -> np.ndarray:
    """Pulses a frame, [frames, 2], that espeak has at two of each frame's `times` [columns].

    `times` are samples of the drone, of which each phoneme begins a little earlier or later with
    intonation; NaN is silence, or no clear pitch.
    """
    ours, theirs = (np.array([each.sample for each in one.phonemes]) for one in (drone, intoned))
    times = times[2::4]
    silent = np.isnan(times)
    heard = np.interp(np.where(silent, 0, times), ours, theirs)
    hz = np.where(silent, np.nan, pitch(intoned.samples, rate, heard))
    return (hz * FRAME_SAMPLES / SAMPLE_RATE).reshape(-1, COLUMNS_PER_FRAME // 4)


def _parts(
    phonemes: Iterable[PhonemeEvent], start: int, end: int, scale: float
) -> tuple[Part, ...]:
    """The word that sounds in [start, end) of espeak's samples, a part for each phoneme."""
    inside = [each for each in phonemes if start < each.sample < end and not each.is_pause]
    # The event that starts the word comes up to 40 samples early.
    before = [each for each in phonemes if start - 40 <= each.sample <= start]
    gives = [_VOWEL_GIVES if not before else _gives(before[-1].name)]
    gives += [_gives(each.name) for each in inside]
    edges = [start, *(each.sample for each in inside), end]
    return tuple(
        Part(one * scale, other * scale, give)
        for (one, other), give in zip(pairwise(edges), gives, strict=True)
    )


def _gives(phoneme: str) -> float:
    if phoneme in _STOPS:
        return _STOP_GIVES
    if phoneme in _FRICATIVES:
        return _FRICATIVE_GIVES
    return _SONORANT_GIVES if phoneme in _SONORANTS else _VOWEL_GIVES


def fitted_borders(stretches: Sequence[Stretch]) -> np.ndarray:
    """Where on the grid each stretch ends, in samples [stretches]: an even pace, near the tokens.

    A border b balances the length x of its stretch against the l that it would have by itself (a
    word's in the source, a pause's of its tokens), b against its token's place t, and the same for
    the stretch behind it:

        (x - l)^2 / l  +  _DRIFT_COST * (b - t)^2 / FRAME_SAMPLES

    It looks no further ahead, since the Talker has not read more when it comes there.
    """
    own = np.array(
        [each.source_samples if each.is_word else each.frames * FRAME_SAMPLES for each in stretches]
    )
    costs = np.array([1.0 if each.is_word else _PAUSE_COST for each in stretches]) / own
    tokens = np.cumsum([each.frames * FRAME_SAMPLES for each in stretches]).astype(float)
    drift_costs = np.full(len(own), _DRIFT_COST / FRAME_SAMPLES)
    latest = tokens + _LATEST * FRAME_SAMPLES
    # The last word has to have died away when the last frame ends.
    last = max(index for index, each in enumerate(stretches) if each.is_word)
    drift_costs[last] *= 10
    latest[last:] = tokens[last:]
    # What the next stretch, as it likes best, makes a border pay for its distance from where the
    # stretch would begin by itself.
    behind = costs * drift_costs / (costs + drift_costs)
    borders = tokens.copy()
    for i in range(1, len(own)):
        places = [borders[i - 1] + own[i], tokens[i]]
        weights = [costs[i], drift_costs[i]]
        if i + 1 < len(own):
            places.append(tokens[i + 1] - own[i + 1])
            weights.append(behind[i + 1])
        border = np.average(places, weights=weights)
        borders[i] = np.clip(border, tokens[i] - _EARLIEST * FRAME_SAMPLES, latest[i])
    return borders


def source_times(stretches: Sequence[Stretch], borders: np.ndarray) -> np.ndarray:
    """For each column of the grid the source sample that is heard there, NaN in silence.

    `borders` [stretches]: where on the grid each ends, in samples.
    """
    frames = sum(stretch.frames for stretch in stretches)
    columns = np.arange(frames * COLUMNS_PER_FRAME) * float(COLUMN_SAMPLES)
    times = np.full(len(columns), np.nan)
    begins = 0.0
    for stretch, ends in zip(stretches, borders, strict=True):
        if stretch.parts:
            inside = slice(*np.searchsorted(columns, (begins, ends)))
            times[inside] = _heard(stretch.parts, ends - begins, columns[inside] - begins)
        begins = ends
    return times


def _heard(parts: Sequence[Part], wanted: float, offsets: np.ndarray) -> np.ndarray:
    """Source samples at `offsets` into the parts when they take `wanted` samples together."""
    lengths = np.array([part.end - part.start for part in parts])
    gives = np.array([part.gives for part in parts])
    missing = wanted - lengths.sum()
    factors = 1 + gives * missing / max(float(gives @ lengths), 1.0)
    if factors.min() < _LEAST_PART_STRETCH:
        factors = np.full(len(lengths), wanted / max(float(lengths.sum()), 1.0))
    heard = np.concatenate([[0.0], np.cumsum(factors * lengths)])
    edges = [parts[0].start, *(part.end for part in parts)]
    return np.asarray(np.interp(offsets, heard, edges))


def analysed(source: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-mel powers [columns, NUM_MELS] and voicing [columns, NUM_BANDS] (0 noise, 1 voice)
    of `source` [n] around each of `times` [columns]; NaN is silence.
    """
    silent = np.isnan(times)
    last = len(source) + _MARGIN
    padded = np.pad(source, (_MARGIN, 3 * _MARGIN)).astype(np.float32)
    centres = np.minimum(np.where(silent, last, times), last).astype(int) + _MARGIN

    def powers(length: int, shift: int) -> np.ndarray:
        window = _window(length)
        windows = np.lib.stride_tricks.sliding_window_view(padded, length)
        return np.abs(np.fft.rfft(windows[centres + shift - length // 2] * window, _FFT)) ** 2

    # In the units of `log_mels`.
    unit = (_window(2 * COLUMN_SAMPLES) ** 2).sum() / (_window(_ENVELOPE_WINDOW) ** 2).sum() / 2
    envelope = powers(_ENVELOPE_WINDOW, -_ENVELOPE_SHIFT)
    envelope += powers(_ENVELOPE_WINDOW, _ENVELOPE_SHIFT)
    mels = np.log(unit * envelope @ _FILTERS.T + _POWER_FLOOR)

    wide = powers(_PERIOD_WINDOW, 0)
    likeness = [
        (wide[:, band] @ _COSINES[band] / (wide[:, band].sum(1, keepdims=True) + 1e-3)).max(1)
        for band in _BANDS
    ]
    voicing = np.clip((np.stack(likeness, 1) - _NOISE) / (_VOICE - _NOISE), 0, 1)
    voicing[silent] = 0
    return mels, voicing


def synthesised(mels: np.ndarray, voicing: np.ndarray, melodies: np.ndarray) -> np.ndarray:
    """The voice with these envelopes [columns] and melodies [frames]: float32 [columns x 240]."""
    columns = len(mels)
    window = _window(2 * COLUMN_SAMPLES)
    energy = (window**2).sum()

    # Noise windows begin a column before their own, and two are always over a sample.
    envelope, share = _envelope(mels), voicing @ _BETWEEN_BANDS
    starts = np.arange(columns)[:, None] * COLUMN_SAMPLES + np.arange(2 * COLUMN_SAMPLES)
    noise = _FRAME_NOISE[starts % FRAME_SAMPLES] * window
    shaped = np.fft.rfft(noise, _FFT) * envelope * np.sqrt(1 - share) / np.sqrt(energy)
    unvoiced = np.fft.irfft(shaped, _FFT)
    wave = np.zeros((columns + 1) * COLUMN_SAMPLES + _FFT)
    for column in range(columns):
        start = column * COLUMN_SAMPLES
        wave[start : start + _FFT] += unvoiced[column]

    # Between two columns a pulse has something of both, but nothing of the next frame.
    voiced = pulses(melodies)
    place = voiced.times * COLUMNS_PER_FRAME
    before = np.floor(place).astype(int)
    is_last = before % COLUMNS_PER_FRAME == COLUMNS_PER_FRAME - 1
    after = np.where(is_last, before, before + 1)
    part = (place - before)[:, None]
    envelope = _envelope((1 - part) * mels[before] + part * mels[after])
    share = ((1 - part) * voicing[before] + part * voicing[after]) @ _BETWEEN_BANDS
    # A pulse is all that is heard in a period.
    loudness = np.sqrt(voiced.periods[:, None] * FRAME_SAMPLES / energy)
    responses = _minimum_phase(envelope * np.sqrt(share), voiced.times * FRAME_SAMPLES % 1)
    for time, response in zip(voiced.times, loudness * responses, strict=True):
        start = COLUMN_SAMPLES + int(time * FRAME_SAMPLES)
        wave[start : start + _FFT] += response
    return np.asarray(wave[COLUMN_SAMPLES : (columns + 1) * COLUMN_SAMPLES].astype(np.float32))


def _envelope(mels: np.ndarray) -> np.ndarray:
    """Magnitudes [n, bins] of log-mel powers [n, NUM_MELS]."""
    power = np.maximum(np.exp(mels) - _POWER_FLOOR, 1e-9)
    return np.asarray(np.sqrt(np.exp(np.log(power) @ _BETWEEN_MELS)) * _TILT)


def _minimum_phase(magnitude: np.ndarray, delays: np.ndarray) -> np.ndarray:
    """Impulse responses [n, _FFT] of magnitudes [n, bins], by folding the cepstrum.

    Each comes a part of a sample late, as `delays` [n] say.
    """
    cepstrum = np.fft.irfft(np.log(magnitude + 1e-7), _FFT)
    cepstrum[:, 1 : _FFT // 2] *= 2
    cepstrum[:, _FFT // 2 + 1 :] = 0
    late = -2j * np.pi / _FFT * delays[:, None] * np.arange(_FFT // 2 + 1)
    return np.fft.irfft(np.exp(np.fft.rfft(cepstrum, _FFT) + late), _FFT)


def log_mels(samples: np.ndarray) -> np.ndarray:
    """Natural log of mel powers of any sound, a column every 10 ms: float32 [n // 240, NUM_MELS].

    Column j covers samples [240 j - 120, 240 j + 360).
    """
    columns = len(samples) // COLUMN_SAMPLES
    padded = np.concatenate(
        [np.zeros(COLUMN_SAMPLES // 2, np.float32), samples, np.zeros(480, np.float32)]
    )
    windows = np.lib.stride_tricks.sliding_window_view(padded, 480)[::COLUMN_SAMPLES][:columns]
    power = np.abs(np.fft.rfft(windows * _window(480), _FFT)) ** 2
    return np.asarray(np.log(power @ _FILTERS.T + _POWER_FLOOR).astype(np.float32))


def _window(length: int) -> np.ndarray:
    return np.hanning(length + 1)[:-1].astype(np.float32)


def _mel_corners(low_hz: float = 60, high_hz: float = 11_000) -> np.ndarray:
    """Left foot, top and right foot of each mel triangle: [NUM_MELS + 2] Hz."""
    low_mel, high_mel = (2595 * np.log10(1 + hz / 700) for hz in (low_hz, high_hz))
    return np.asarray(700 * (10 ** (np.linspace(low_mel, high_mel, NUM_MELS + 2) / 2595) - 1))


def _mel_filters(corners: np.ndarray) -> np.ndarray:
    """Triangles over FFT bins, each of area 1: float32 [NUM_MELS, bins]."""
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    triangles = np.maximum(
        0, np.minimum((_BINS_HZ - left) / (centre - left), (right - _BINS_HZ) / (right - centre))
    )
    areas = np.maximum(triangles.sum(1, keepdims=True), 1e-9)
    return np.asarray((triangles / areas).astype(np.float32))


def _between(points_hz: Iterable[float]) -> np.ndarray:
    """[points, bins]: linear interpolation from values at the points to values at the bins."""
    points = list(points_hz)
    return np.stack([np.interp(_BINS_HZ, points, row) for row in np.eye(len(points))])


def _nearby(width_hz: float) -> np.ndarray:
    """[bins, bins]: Hann-weighted means of values at the bins, `width_hz` to either side."""
    apart = np.minimum(np.abs(_BINS_HZ[:, None] - _BINS_HZ) / width_hz, 1)
    weights = 1 + np.cos(np.pi * apart)
    return np.asarray(weights / weights.sum(0))


_CORNERS = _mel_corners()
_FILTERS = _mel_filters(_CORNERS)
_BETWEEN_MELS = _between(_CORNERS[1:-1])
_FINE, _COARSE = (_BETWEEN_MELS @ _nearby(width_hz) for width_hz in _STANDS_OUT_HZ)
_BETWEEN_MELS -= _SOFTNESS * (_FINE - _COARSE)
# espeak-ng has nothing above, and a window makes something of nothing below.
_TILT = np.interp(_BINS_HZ, (_CORNERS[0] - 1, _CORNERS[0]), (0.3, 1.0))
_TILT *= np.interp(_BINS_HZ, (_CORNERS[-1], _CORNERS[-1] + 1), (1.0, 0.03))
_OCTAVES = np.log2(np.maximum(_BINS_HZ / _BRIGHTER_FROM_HZ, 1))
_TILT *= _LOUDER * 10 ** (_BRIGHTER_DB_AN_OCTAVE * _OCTAVES / 20)

_BANDS = [slice(*np.searchsorted(_BINS_HZ, edges)) for edges in pairwise(_BAND_EDGES_HZ)]
# A band's voicing holds flat inside it and changes over 15 % around its edge.
_KNEES = [edge * side for edge in _BAND_EDGES_HZ[1:-1] for side in (0.87, 1.15)]
_BETWEEN_BANDS = np.stack(
    [
        np.interp(_BINS_HZ, [0.0, *_KNEES, SAMPLE_RATE / 2], np.repeat(row, 2))
        for row in np.eye(NUM_BANDS)
    ]
)
# Autocorrelation at a lag, from powers, and undoing what the window does to it.
_WINDOW_LIKENESS = np.correlate(_window(_PERIOD_WINDOW), _window(_PERIOD_WINDOW), "full")
_COSINES = np.cos(2 * np.pi * np.arange(_FFT // 2 + 1)[:, None] * _LAGS / _FFT) * (
    _WINDOW_LIKENESS[_PERIOD_WINDOW - 1] / _WINDOW_LIKENESS[_PERIOD_WINDOW - 1 + _LAGS]
)
_FRAME_NOISE = np.random.RandomState(0).randn(FRAME_SAMPLES)
