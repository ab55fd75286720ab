"""Where the Talker's codec stream is cut into chunks for Code2Wav.

The vocoder keeps its own state, so a chunk holds new frames only and any cut is inaudible; what a
cut costs is time: the listener waits for the first chunk, the device prefers few large ones. This
module decides the sizes. It knows no thread, device or connector.

    frames  0 1 2 3 4 5 6 7 8 9 ...        initial 2, growth 1.5, at most 4
    chunk 0 [. .]
    chunk 1     [. . .]
    chunk 2           [. . . .]

A player that has begun must never run dry: while it plays one chunk, the next has to be made. At a
real-time factor r that holds as long as chunks grow by less than 1 / r each: so sizes grow by a
fixed factor, and no stream whose Talker keeps below 0.8 has a gap (docs/log.md, "Chunk sizes").

Both ends of the edge cut by the same rule: the sender to hand on early, the receiver so that the
vocoder is called with the same portions, and so gives the same bits, when everything comes at once.
"""

from __future__ import annotations

import numpy as np

# The largest first chunk under load; half of a chunk of 25 is still one second of sound.
MAX_INITIAL_FRAMES = 16
# With 8 others in flight the first chunk has 4 frames, with 16 it has 8, with 32 it has 16.
REQUESTS_PER_FRAME = 4
# The smallest: one frame would have to be followed by the next within 80 ms.
MIN_INITIAL_FRAMES = 2


def initial_frames_for_load(num_requests: int, codec_chunk_frames: int) -> int:
    """Frames of the first chunk with `num_requests` others in flight: a power of two, 2 when idle.

    Under load the vocoder is shared, so that each stream does better with fewer, larger calls. A
    batch of the Talker costs far less than its requests one by one, so the size grows slowly.
    """
    size = MIN_INITIAL_FRAMES
    while size < MAX_INITIAL_FRAMES and num_requests >= REQUESTS_PER_FRAME * size:
        size *= 2
    return min(size, codec_chunk_frames)


class CodecChunker:
    """Collects frames and gives them back in portions: `initial` first, `steady` in the end.

    Between them each portion is `growth` times as large as the one before; None jumps at once.
    """

    def __init__(self, *, initial: int, steady: int, growth: float | None = None) -> None:
        self._size = float(initial)
        self._steady = steady
        self._growth = growth
        self._frames: list[np.ndarray] = []

    @property
    def num_held(self) -> int:
        return len(self._frames)

    @property
    def is_ready(self) -> bool:
        return len(self._frames) >= int(self._size)

    def push(self, frames: np.ndarray) -> None:
        """Frames [n, num_codebooks] that follow on those before them."""
        self._frames.extend(frames)

    def cut(self) -> np.ndarray:
        """The next portion [n, num_codebooks]: a full one if there is one, else what is left."""
        size = int(self._size)
        portion, self._frames = self._frames[:size], self._frames[size:]
        grown = self._steady if self._growth is None else self._size * self._growth
        self._size = min(grown, float(self._steady))
        return np.stack(portion)
