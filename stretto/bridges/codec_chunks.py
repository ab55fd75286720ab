"""Where the Talker's codec stream is cut into chunks for Code2Wav.

The vocoder keeps its own state, so a chunk holds new frames only and any cut is inaudible; what a
cut costs is time: the listener waits for the first chunk, the device prefers few large ones. This
module decides the sizes. It knows no thread, device or connector.

    frames  0 1 2 3 4 5 6 7 8 9 ...        initial 4, growth 1.5, at most 4
    chunk 0 [. . . .]
    chunk 1         [. .]
    chunk 2             [. . .]
    chunk 3                   [. . . .]

A player that has begun must never run dry: while it plays what it has, the next chunk has to be
made. So the second chunk is half as large as the first, which leaves the other half for a Talker
that is held up (a burst of prompts); and from there on chunks grow by a fixed factor, since at a
real-time factor r nobody waits as long as they grow by less than 1 / r each (docs/log.md, "Chunk
sizes", "Ten at once").

Both ends of the edge cut by the same rule: the sender to hand on early, the receiver so that the
vocoder is called with the same portions, and so gives the same bits, when everything comes at once.
Sizes follow from the first, and the first is fixed when the stream begins.
"""

from __future__ import annotations

import math

import numpy as np

# The smallest: one frame would have to be followed by the next within 80 ms.
MIN_INITIAL_FRAMES = 2
# The largest: more than a second of sound.
MAX_INITIAL_FRAMES = 16
# So many others make the first chunk one frame longer: 3 frames for 4 at once, 6 for 10.
REQUESTS_PER_FRAME = 2


def initial_frames_for_load(num_others: int, codec_chunk_frames: int) -> int:
    """Frames of the first chunk of a stream that begins beside others.

    Under load Talker and vocoder are shared, and both are held up when others begin: a listener
    needs more in hand.
    """
    size = MIN_INITIAL_FRAMES + num_others // REQUESTS_PER_FRAME
    return min(size, MAX_INITIAL_FRAMES, codec_chunk_frames)


class CodecChunker:
    """Collects frames and gives them back in portions: `initial` first, `steady` in the end.

    Between them about half of `initial`, and from there on each portion is `growth` times as large
    as the one before; None jumps at once.
    """

    def __init__(self, *, initial: int, steady: int, growth: float | None = None) -> None:
        self._size = float(initial)
        self._steady = steady
        self._growth = growth
        self._is_first = True
        self._frames: list[np.ndarray] = []

    @property
    def num_held(self) -> int:
        return len(self._frames)

    @property
    def is_ready(self) -> bool:
        return len(self._frames) >= int(self._size)

    @property
    def portion_frames(self) -> int:
        """How many frames `cut` would give."""
        return min(int(self._size), len(self._frames))

    def push(self, frames: np.ndarray) -> None:
        """Frames [n, num_codebooks] that follow on those before them."""
        self._frames.extend(frames)

    def cut(self) -> np.ndarray:
        """The next portion [n, num_codebooks]: a full one if there is one, else what is left."""
        size = int(self._size)
        portion, self._frames = self._frames[:size], self._frames[size:]
        if self._growth is None:
            self._size = float(self._steady)
        elif self._is_first:
            self._size = _second(self._size, self._growth)
        else:
            self._size = min(self._size * self._growth, float(self._steady))
        self._is_first = False
        return np.stack(portion)


def _second(initial: float, growth: float) -> float:
    """At most half of the first, and not below the smallest, where the first is not below it.

    All streams grow in the same steps: the vocoder's kernels are made for each number of frames
    (docs/log.md, "Kernels that are made at their first use").
    """
    smallest = float(MIN_INITIAL_FRAMES)
    if initial <= 2 * smallest:
        return min(initial, smallest)
    steps = math.floor(math.log(initial / 2 / smallest, growth))
    return smallest * float(growth**steps)
