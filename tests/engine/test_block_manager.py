"""Runs of blocks never overlap, and what is given back is whole again."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stretto.engine.block_manager import BlockManager

NUM_BLOCKS, BLOCK_SIZE = 20, 16


class Blocks(RuleBasedStateMachine):
    """Requests come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.held: list[tuple[int, int]] = []

    @rule(num_positions=st.integers(1, (NUM_BLOCKS + 2) * BLOCK_SIZE))
    def reserve(self, num_positions: int) -> None:
        run = self.manager.reserve(num_positions)
        if run is None:
            free = sorted({*range(NUM_BLOCKS)} - {b for f, n in self.held for b in range(f, f + n)})
            assert self.longest(free) * BLOCK_SIZE < num_positions
            return
        first, count = run
        assert (count - 1) * BLOCK_SIZE < num_positions <= count * BLOCK_SIZE
        assert first >= 0 and first + count <= NUM_BLOCKS
        self.held.append(run)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            at = data.draw(st.integers(0, len(self.held) - 1))
            self.manager.release(*self.held.pop(at))

    @invariant()
    def no_block_belongs_to_two(self) -> None:
        blocks = [block for first, count in self.held for block in range(first, first + count)]
        assert len(blocks) == len(set(blocks))
        assert self.manager.num_free == NUM_BLOCKS - len(blocks)

    def teardown(self) -> None:
        for run in self.held:
            self.manager.release(*run)
        assert self.manager.reserve(NUM_BLOCKS * BLOCK_SIZE) == (0, NUM_BLOCKS)

    @staticmethod
    def longest(free: list[int]) -> int:
        longest = run = 0
        for at, block in enumerate(free):
            run = run + 1 if at and free[at - 1] == block - 1 else 1
            longest = max(longest, run)
        return longest


TestBlocks = Blocks.TestCase


@pytest.mark.parametrize(
    ("num_positions", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (320, 20), (321, 21)]
)
def test_positions_take_whole_blocks(num_positions: int, blocks: int) -> None:
    assert BlockManager(num_blocks=20, block_size=16).blocks_for(num_positions) == blocks


def test_a_request_larger_than_everything_gets_nothing_and_takes_nothing() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    assert manager.reserve(65) is None
    assert manager.reserve(64) == (0, 4)
    assert manager.reserve(1) is None
