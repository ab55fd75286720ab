"""Which blocks of the KV pool belong to whom.

A request gets all blocks it can ever need when it is admitted, as one contiguous run: so it is
never preempted half-way (a Talker that has spoken cannot be computed again), and its keys can be
read as a view (see `models/decoder.py`). Without room it waits at the door.
"""

from __future__ import annotations

import bisect


class BlockManager:
    """Free runs of `num_blocks` blocks of `block_size` positions."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # (first block, length), by first block; neighbours are always joined.
        self._free: list[tuple[int, int]] = [(0, num_blocks)]

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def reserve(self, num_positions: int) -> tuple[int, int] | None:
        """(first block, number of blocks) of a run that holds the positions; None without room."""
        count = self.blocks_for(num_positions)
        for index, (first, length) in enumerate(self._free):
            if length >= count:
                rest = [(first + count, length - count)] if length > count else []
                self._free[index : index + 1] = rest
                return first, count
        return None

    def release(self, first: int, count: int) -> None:
        """Gives a run back."""
        at = bisect.bisect(self._free, (first, count))
        if at < len(self._free) and first + count == self._free[at][0]:
            count += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == first:
            first, before = self._free.pop(at - 1)
            count += before
            at -= 1
        self._free.insert(at, (first, count))
