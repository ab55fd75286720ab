"""Sound between the model's floats and what players read.

The model gives float32 in -1..1 at 24 kHz; PCM here is signed 16-bit little-endian mono. The same
samples give the same bytes whether they come in pieces or whole.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

BYTES_PER_SAMPLE = 2
PCM_SCALE = 32767.0
WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
# What a WAV header says while the length is not known; players then read to the end.
UNKNOWN_SIZE = 0xFFFFFFFF


def pcm16(samples: np.ndarray) -> bytes:
    """float32 [n] in -1..1 to 16-bit PCM; values outside are clipped."""
    scaled: np.ndarray = np.rint(np.clip(samples, -1.0, 1.0) * PCM_SCALE)
    return scaled.astype("<i2").tobytes()


def wav_header(num_bytes: int | None, sample_rate: int) -> bytes:
    """The 44 bytes in front of mono PCM; `num_bytes` None for a stream of unknown length."""
    riff_size = UNKNOWN_SIZE if num_bytes is None else num_bytes + WAV_HEADER.size - 8
    data_size = UNKNOWN_SIZE if num_bytes is None else num_bytes
    return WAV_HEADER.pack(
        b"RIFF", riff_size, b"WAVE", b"fmt ", 16, 1, 1, sample_rate,
        sample_rate * BYTES_PER_SAMPLE, BYTES_PER_SAMPLE, 8 * BYTES_PER_SAMPLE, b"data", data_size,
    )  # fmt: skip


def wav_bytes(samples: np.ndarray, sample_rate: int) -> bytes:
    """A whole WAV file."""
    pcm = pcm16(samples)
    return wav_header(len(pcm), sample_rate) + pcm


def save_wav(path: Path | str, samples: np.ndarray, sample_rate: int) -> None:
    Path(path).write_bytes(wav_bytes(samples, sample_rate))
