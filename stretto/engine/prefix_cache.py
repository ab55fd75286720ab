"""KV of finished requests, kept for those that begin alike.

    finished run  [b0 b1 b2 b3 | rest]      its full blocks stay, the rest is given back
    new prompt     b0 b1 c2 ...             two blocks are copied into its own run, then it goes on

A hit copies: runs stay contiguous and have one owner (see `BlockManager`), and a copy costs a small
part of computing the same positions. Entries are looked up by a hash over everything up to the end
of a block, and thrown out oldest first when blocks are needed or `max_tokens` is reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from stretto.engine.block_manager import BlockManager


class CachedRun(msgspec.Struct, frozen=True):
    """Full blocks that no request holds; `keys` are the hashes of its prefixes, block by block."""

    first_block: int
    token_ids: tuple[int, ...]
    keys: tuple[int, ...]


class PrefixCache:
    """Owns the blocks of its entries; they come from `blocks` and go back there."""

    def __init__(self, blocks: BlockManager, *, max_tokens: int) -> None:
        self._blocks = blocks
        self._max_blocks = max_tokens // blocks.block_size
        # By first block, oldest use first.
        self._runs: OrderedDict[int, CachedRun] = OrderedDict()
        # Of each prefix: the run that holds it.
        self._holder: dict[int, CachedRun] = {}
        self._num_blocks = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """(first block, number of blocks) of the longest kept prefix; (0, 0) without one.

        At least one position of the prompt is always left to compute: its logits are wanted.
        """
        self.num_queried_tokens += len(token_ids)
        keys = self._prefix_keys(token_ids[:-1])
        for count in range(len(keys), 0, -1):
            run = self._holder.get(keys[count - 1])
            size = count * self._blocks.block_size
            # A hash may be the same by chance or by design; nobody gets another's positions.
            if run is not None and run.token_ids[:size] == tuple(token_ids[:size]):
                self._runs.move_to_end(run.first_block)
                self.num_hit_tokens += size
                return run.first_block, count
        return 0, 0

    def keep(self, token_ids: Sequence[int], *, first_block: int, num_blocks: int) -> None:
        """Takes over a finished request's run, of which `token_ids` were computed."""
        keys = self._prefix_keys(token_ids)[: self._max_blocks]
        if not keys or keys[-1] in self._holder:
            self._blocks.release(first_block, num_blocks)
            return
        if len(keys) < num_blocks:
            self._blocks.release(first_block + len(keys), num_blocks - len(keys))
        kept = tuple(token_ids[: len(keys) * self._blocks.block_size])
        run = CachedRun(first_block, kept, tuple(keys))
        self._runs[first_block] = run
        self._num_blocks += len(keys)
        for key in keys:
            # The newest; unless an older one is hit later, it is thrown out last.
            self._holder[key] = run
        while self._num_blocks > self._max_blocks:
            self.evict()

    def evict(self) -> bool:
        """Gives the blocks of the entry that was used longest ago back; False if there is none."""
        if not self._runs:
            return False
        _, run = self._runs.popitem(last=False)
        for key in run.keys:
            if self._holder.get(key) is run:
                del self._holder[key]
        self._num_blocks -= len(run.keys)
        self._blocks.release(run.first_block, len(run.keys))
        return True

    def _prefix_keys(self, token_ids: Sequence[int]) -> list[int]:
        size, key, keys = self._blocks.block_size, 0, []
        for end in range(size, len(token_ids) + 1, size):
            key = hash((key, tuple(token_ids[end - size : end])))
            keys.append(key)
        return keys
