"""espeak-ng through its C library: text in, sound and the times of words and phonemes out.

The voice is used as a drone, on one pitch, whose envelopes are analysed, and with its intonation,
for its pitch. The library has one global state; a process holds one `Espeak`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

LIBRARY = "libespeak-ng.so.1"

# From espeak-ng's speak_lib.h.
_AUDIO_OUTPUT_SYNCHRONOUS = 2
_INITIALIZE_PHONEME_EVENTS = 1
_RATE, _PITCH, _RANGE, _WORD_GAP = 1, 3, 4, 7
_EVENT_END, _EVENT_WORD, _EVENT_PHONEME = 0, 1, 7
_CHARS_UTF8 = 1

# 95 to 110 Hz; at 150 words a minute a word's letters and its frames are closest in number.
DRONE_PITCH = 63
NATURAL_PITCH, NATURAL_RANGE = 50, 50
WORDS_PER_MINUTE = 150


class _EventId(ctypes.Union):
    _fields_ = [
        ("number", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("string", ctypes.c_char * 8),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _EventId),
    ]


_SYNTH_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True)
class WordEvent:
    """espeak starts a word: where in the text (character, from 0) and where in the sound."""

    text_position: int
    sample: int


@dataclass(frozen=True)
class PhonemeEvent:
    """`name` is espeak-ng's mnemonic, as in `espeak-ng -x`; those of pauses begin with _."""

    sample: int
    name: str

    @property
    def is_pause(self) -> bool:
        return self.name.startswith("_")


@dataclass(frozen=True)
class Utterance:
    """What espeak said. `samples` int16 [n] at the voice's own rate; events in time order."""

    samples: np.ndarray
    words: tuple[WordEvent, ...]
    phonemes: tuple[PhonemeEvent, ...]


class Espeak:
    def __init__(self, voice: str = "en-us") -> None:
        self._library: Any = ctypes.CDLL(LIBRARY)
        self.sample_rate: int = self._library.espeak_Initialize(
            _AUDIO_OUTPUT_SYNCHRONOUS, 0, None, _INITIALIZE_PHONEME_EVENTS
        )
        self._samples: list[np.ndarray] = []
        self._words: list[WordEvent] = []
        self._phonemes: list[PhonemeEvent] = []
        # The library keeps a bare pointer; the attribute keeps the callback alive.
        self._callback = _SYNTH_CALLBACK(self._take)
        self._library.espeak_SetSynthCallback(self._callback)
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {voice!r}")
        self._set(_RATE, WORDS_PER_MINUTE)
        self._set(_WORD_GAP, 0)

    def say(self, text: str) -> Utterance:
        """On one pitch."""
        return self._say(text, DRONE_PITCH, 0)

    def say_intoned(self, text: str) -> Utterance:
        """With its intonation, as espeak-ng has it."""
        return self._say(text, NATURAL_PITCH, NATURAL_RANGE)

    def _say(self, text: str, pitch: int, pitch_range: int) -> Utterance:
        self._set(_PITCH, pitch)
        self._set(_RANGE, pitch_range)
        self._samples, self._words, self._phonemes = [], [], []
        encoded = text.encode()
        self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _CHARS_UTF8, None, None)
        self._library.espeak_Synchronize()
        samples = np.concatenate(self._samples) if self._samples else np.zeros(0, np.int16)
        # Of several events at one sample the last is the word that sounds.
        words = {word.sample: word for word in self._words}
        return Utterance(
            samples,
            tuple(sorted(words.values(), key=lambda word: word.sample)),
            tuple(self._phonemes),
        )

    def _set(self, parameter: int, setting: int) -> None:
        self._library.espeak_SetParameter(parameter, setting, 0)

    def _take(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._samples.append(np.ctypeslib.as_array(samples, (count,)).copy())
        index = 0
        while (event := events[index]).type != _EVENT_END:
            if event.type == _EVENT_WORD and event.length > 0:
                self._words.append(WordEvent(event.text_position - 1, event.sample))
            elif event.type == _EVENT_PHONEME:
                name = event.id.string.decode("ascii")
                self._phonemes.append(PhonemeEvent(event.sample, name))
            index += 1
        return 0
