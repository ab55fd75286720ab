"""A hit gives a request what it would have computed, and nobody what is another's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from stretto.engine.block_manager import BlockManager
from stretto.engine.prefix_cache import PrefixCache

SIZE = 4


def a_cache(num_blocks: int = 64, max_tokens: int = 10**6) -> tuple[BlockManager, PrefixCache]:
    blocks = BlockManager(num_blocks=num_blocks, block_size=SIZE)
    return blocks, PrefixCache(blocks, max_tokens=max_tokens)


def keep(blocks: BlockManager, cache: PrefixCache, token_ids: list[int], spare: int = 0) -> int:
    run = blocks.reserve(len(token_ids) + spare)
    assert run is not None
    cache.keep(token_ids, first_block=run[0], num_blocks=run[1])
    return run[0]


def test_a_prompt_that_begins_alike_gets_its_full_blocks() -> None:
    blocks, cache = a_cache()
    first = keep(blocks, cache, [*range(10)], spare=20)
    assert cache.match([*range(10), 99]) == (first, 2)
    assert cache.match([*range(5), 99, 98, 97]) == (first, 1)
    assert cache.match([1, *range(9)]) == (0, 0)


def test_one_position_is_always_left_to_compute() -> None:
    blocks, cache = a_cache()
    first = keep(blocks, cache, [*range(8)])
    assert cache.match([*range(8)]) == (first, 1)
    assert cache.match([*range(9)]) == (first, 2)


def test_what_a_run_does_not_fill_is_given_back_at_once() -> None:
    blocks, cache = a_cache(num_blocks=10)
    keep(blocks, cache, [*range(9)], spare=20)
    assert blocks.num_free == 8


def test_the_same_prefix_is_kept_once() -> None:
    blocks, cache = a_cache(num_blocks=10)
    for _ in range(3):
        keep(blocks, cache, [*range(8)])
    assert blocks.num_free == 8


def test_the_oldest_use_is_thrown_out_first_and_no_more_is_kept_than_allowed() -> None:
    blocks, cache = a_cache(max_tokens=4 * SIZE)
    keep(blocks, cache, [1] * 8)
    keep(blocks, cache, [2] * 8)
    assert cache.match([1] * 9)[1] == 2
    keep(blocks, cache, [3] * 8)
    assert [cache.match([token] * 9)[1] for token in (1, 2, 3)] == [2, 0, 2]
    assert blocks.num_free == 60


def test_evicting_everything_gives_every_block_back() -> None:
    blocks, cache = a_cache()
    for token in range(5):
        keep(blocks, cache, [token] * 12)
    while cache.evict():
        pass
    assert blocks.reserve(64 * SIZE) == (0, 64)


def test_equal_hashes_do_not_make_equal_prefixes() -> None:
    # hash(-1) == hash(-2) in CPython: two different blocks with one key.
    blocks, cache = a_cache()
    keep(blocks, cache, [-1] * 8)
    assert cache.match([-2] * 9) == (0, 0)


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=12))
def test_a_match_is_the_longest_prefix_that_any_kept_run_has_or_none(
    sequences: list[list[int]],
) -> None:
    blocks, cache = a_cache(num_blocks=400)
    kept: dict[int, list[int]] = {}
    for sequence in sequences:
        first, count = cache.match(sequence)
        if count:
            assert kept[first][: count * SIZE] == sequence[: count * SIZE]
        best = max(
            (
                size
                for other in kept.values()
                for size in range(SIZE, min(len(other), len(sequence) - 1) + 1, SIZE)
                if other[:size] == sequence[:size]
            ),
            default=0,
        )
        assert count * SIZE == best
        if len(sequence) >= SIZE:
            free = blocks.num_free
            start = keep(blocks, cache, sequence)
            if blocks.num_free < free:
                kept[start] = sequence


class Cache(RuleBasedStateMachine):
    """Runs are kept, found and thrown out in any order; three ids make them begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.cache = a_cache(num_blocks=12, max_tokens=8 * SIZE)

    @rule(token_ids=st.lists(st.integers(0, 2), min_size=SIZE, max_size=5 * SIZE))
    def finish_a_request(self, token_ids: list[int]) -> None:
        run = self.blocks.reserve(len(token_ids))
        while run is None:
            assert self.cache.evict(), "nothing is kept, and there is no room"
            run = self.blocks.reserve(len(token_ids))
        self.cache.keep(token_ids, first_block=run[0], num_blocks=run[1])

    @rule(token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=5 * SIZE))
    def look_for_a_prompt(self, token_ids: list[int]) -> None:
        _, count = self.cache.match(token_ids)
        assert count * SIZE < len(token_ids)

    @rule()
    def make_room(self) -> None:
        self.cache.evict()

    def teardown(self) -> None:
        while self.cache.evict():
            pass
        assert self.blocks.reserve(12 * SIZE) == (0, 12)


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCache = Cache.TestCase
