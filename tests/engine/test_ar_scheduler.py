"""Which rows run when: a fixed grid for prompts, nobody waits in the batch, all ways to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.bridges.prompt_inbox import PromptInbox
from stretto.engine.ar_scheduler import ARInbox, ARScheduler
from stretto.engine.block_manager import BlockManager
from stretto.engine.prefix_cache import PrefixCache
from stretto.engine.scheduler import ARBatch, StepResult
from stretto.payloads import Payload, SpokenTokens, ThinkerPrompt
from stretto.request import StageRequest
from stretto.text import TextStream
from tests.fakes import CountingInbox, ticket

CELL = 8


def queues(scheduler: ARScheduler) -> tuple[int, int, int]:
    """How many requests run, wait for room, wait for a chunk."""
    load = scheduler.load()
    return load.num_running, load.num_waiting, load.num_waiting_for_chunk


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def a_scheduler(
    *,
    max_num_seqs: int = 4,
    num_blocks: int = 1000,
    cell: int = CELL,
    open_inbox: Callable[[StageRequest], ARInbox] = PromptInbox,
    text: bool = False,
    max_repeated: int | None = None,
) -> ARScheduler:
    return ARScheduler(
        max_num_seqs=max_num_seqs,
        prefill_chunk_tokens=cell,
        blocks=BlockManager(num_blocks=num_blocks, block_size=16),
        max_repeated=max_repeated,
        open_inbox=open_inbox,
        open_text=(lambda t: TextStream(letters, t.sampling.stop)) if text else None,
    )


def counting(request: StageRequest) -> ARInbox:
    return CountingInbox()


def prompt_piece(count: int, *, head: bool = False) -> Payload:
    head_ids = np.zeros(3, np.int32) if head else None
    return ThinkerPrompt(np.zeros(count, np.int32), head_ids)


def words(count: int) -> Payload:
    return SpokenTokens(np.zeros(count, np.int32))


def rows(batch: ARBatch | None) -> dict[str, tuple[int, int]]:
    """(start, stop) of each request in a batch."""
    items = batch.items if batch is not None else ()
    assert len({item.request_id for item in items}) == len(items)
    return {item.request_id: (item.start, item.start + item.num_rows) for item in items}


def run(
    scheduler: ARScheduler, token: Callable[[str], int] = lambda request_id: 1000
) -> tuple[ARBatch | None, dict[str, StepResult]]:
    batch = scheduler.schedule()
    if batch is None:
        return None, {}
    token_ids = [token(item.request_id) for item in batch.items if item.draws]
    return batch, {r.request_id: r for r in scheduler.update(batch, token_ids, 0.0)}


def run_to_the_end(scheduler: ARScheduler) -> list[ARBatch]:
    batches: list[ARBatch] = []
    for _ in range(10_000):
        batch, _ = run(scheduler)
        if batch is None:
            return batches
        batches.append(batch)
    raise AssertionError("it does not end")


# ---- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 40])
def test_a_prompt_runs_in_cells_and_only_its_last_one_draws(length: int) -> None:
    scheduler = a_scheduler()
    scheduler.add(ticket("r", prompt=range(length), max_tokens=2))
    batches = run_to_the_end(scheduler)
    cells = [(at, min(at + CELL, length)) for at in range(0, length, CELL)]
    assert [rows(batch)["r"] for batch in batches] == [*cells, (length, length + 1)]
    drawing = [batch.items[0].draws for batch in batches]
    assert drawing == [False] * (len(cells) - 1) + [True, True]
    assert [b.items[0].num_prompt_rows for b in batches] == [*(b - a for a, b in cells), 0]


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.data())
def test_where_a_prompt_is_cut_does_not_depend_on_when_it_arrives(
    pieces: list[int], data: st.DataObject
) -> None:
    scheduler = a_scheduler(open_inbox=counting)
    scheduler.add(ticket("r", max_tokens=3, max_positions=1000))
    cuts: list[tuple[int, int]] = []

    def steps(most: int) -> None:
        for _ in range(most):
            batch, _ = run(scheduler)
            cuts.extend(rows(batch).values())

    for at, piece in enumerate(pieces):
        scheduler.receive("r", (prompt_piece(piece, head=at == len(pieces) - 1),), last=False)
        steps(data.draw(st.integers(0, 4)))
    steps(40)
    length = sum(pieces)
    assert cuts == [(at, min(at + CELL, length)) for at in range(0, length, CELL)]


def test_behind_a_cached_prefix_a_prompt_is_cut_on_the_same_grid() -> None:
    """And the bridge is told of every position once, the cached ones too."""
    blocks = BlockManager(num_blocks=100, block_size=16)
    scheduler = ARScheduler(
        max_num_seqs=4,
        prefill_chunk_tokens=40,
        blocks=blocks,
        prefix_cache=PrefixCache(blocks, max_tokens=1000),
        open_inbox=PromptInbox,
        open_text=None,
    )
    seen: dict[str, list[tuple[int, int]]] = {"first": [], "second": []}
    told = dict.fromkeys(seen, 0)
    for name in seen:
        scheduler.add(ticket(name, prompt=range(100), max_tokens=1))
        while (step := run(scheduler))[0] is not None:
            seen[name].append(rows(step[0])[name])
            told[name] += step[1][name].num_prompt_rows
    assert seen == {"first": [(0, 40), (40, 80), (80, 100)], "second": [(96, 100)]}
    scheduler.add(ticket("third", prompt=[*range(60), *range(500, 540)], max_tokens=1))
    assert rows(run(scheduler)[0]) == {"third": (48, 80)}
    assert rows(run(scheduler)[0]) == {"third": (80, 100)}
    assert told == {"first": 100, "second": 100}


def test_at_most_a_cell_of_prompt_rows_runs_in_a_step_beside_all_decodes() -> None:
    scheduler = a_scheduler(max_num_seqs=8)
    for name in ("a", "b"):
        scheduler.add(ticket(name, prompt=range(2), max_tokens=50))
    run(scheduler)
    for name in ("c", "d", "e"):
        scheduler.add(ticket(name, prompt=range(20), max_tokens=50))
    for _ in range(20):
        batch, _ = run(scheduler)
        assert batch is not None
        assert sum(item.num_prompt_rows for item in batch.items) <= CELL
        assert {"a", "b"} <= set(rows(batch))


def test_several_short_prompts_share_a_step() -> None:
    scheduler = a_scheduler(max_num_seqs=8)
    for name in "abcd":
        scheduler.add(ticket(name, prompt=range(3), max_tokens=5))
    batch, _ = run(scheduler)
    assert rows(batch) == {"a": (0, 3), "b": (0, 3)}


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(6, 12),
)
def test_every_request_runs_every_position_once_in_order_and_all_end(
    sizes: list[tuple[int, int]], max_num_seqs: int, num_blocks: int
) -> None:
    scheduler = a_scheduler(max_num_seqs=max_num_seqs, num_blocks=num_blocks)
    for number, (length, max_tokens) in enumerate(sizes):
        scheduler.add(ticket(f"r{number}", prompt=range(length), max_tokens=max_tokens))
    done: dict[str, list[int]] = {}
    for batch in run_to_the_end(scheduler):
        assert len(batch.items) <= max_num_seqs
        for item in batch.items:
            done.setdefault(item.request_id, []).extend(
                range(item.start, item.start + item.num_rows)
            )
    assert done == {
        f"r{number}": list(range(length + max_tokens - 1))
        for number, (length, max_tokens) in enumerate(sizes)
    }
    assert scheduler.request_ids() == []


# ---- places --------------------------------------------------------------------------------------


def test_a_request_whose_input_is_still_to_come_holds_no_place_in_the_batch() -> None:
    scheduler = a_scheduler(max_num_seqs=1, open_inbox=counting)
    scheduler.add(ticket("r", max_tokens=5, max_positions=100))
    assert scheduler.schedule() is None
    assert queues(scheduler) == (0, 0, 1)
    scheduler.receive("r", (prompt_piece(3, head=True),), last=False)
    assert queues(scheduler) == (0, 1, 0)
    batch, _ = run(scheduler)
    assert rows(batch) == {"r": (0, 3)}
    assert queues(scheduler) == (0, 0, 1)
    assert scheduler.schedule() is None
    scheduler.receive("r", (words(2),), last=False)
    assert queues(scheduler) == (1, 0, 0)
    assert [rows(run(scheduler)[0]) for _ in range(3)] == [{"r": (3, 4)}, {"r": (4, 5)}, {}]


def test_one_that_waits_for_its_chunk_holds_up_nobody() -> None:
    scheduler = a_scheduler(open_inbox=counting)
    for name in ("parked", "busy"):
        scheduler.add(ticket(name, max_tokens=100, max_positions=200))
        scheduler.receive(name, (prompt_piece(2, head=True),), last=False)
    run(scheduler)
    scheduler.receive("busy", (words(30),), last=False)
    for at in range(30):
        assert rows(run(scheduler)[0]) == {"busy": (2 + at, 3 + at)}


def test_words_that_arrive_together_are_all_run_in_order() -> None:
    scheduler = a_scheduler(open_inbox=counting)
    scheduler.add(ticket("r", max_tokens=100, max_positions=200))
    scheduler.receive("r", (prompt_piece(2, head=True), words(3), words(3)), last=False)
    scheduler.receive("r", (words(2),), last=True)
    starts = [rows(run(scheduler)[0])["r"] for _ in range(9)]
    assert starts == [(0, 2), *((at, at + 1) for at in range(2, 10))]


def test_requests_are_let_in_in_the_order_of_their_arrival() -> None:
    scheduler = a_scheduler(max_num_seqs=2)
    for number in range(7):
        scheduler.add(ticket(f"r{number}", prompt=[1], max_tokens=1 + number % 3))
    admitted = [a.ticket.request_id for b in run_to_the_end(scheduler) for a in b.admitted]
    assert admitted == [f"r{number}" for number in range(7)]


def test_a_large_request_waits_at_the_door_and_is_not_overtaken() -> None:
    scheduler = a_scheduler(num_blocks=4)
    scheduler.add(ticket("first", prompt=[1], max_tokens=3, max_positions=33))
    run(scheduler)
    scheduler.add(ticket("large", prompt=[1], max_tokens=2, max_positions=64))
    scheduler.add(ticket("small", prompt=[1], max_tokens=2, max_positions=2))
    order = []
    while (batch := run(scheduler)[0]) is not None:
        order += [admission.ticket.request_id for admission in batch.admitted]
    assert order == ["large", "small"]
    assert scheduler.request_ids() == []


def test_two_that_run_never_share_a_row_nor_a_block() -> None:
    scheduler = a_scheduler(max_num_seqs=3, num_blocks=8)
    for number in range(12):
        scheduler.add(
            ticket(f"r{number}", prompt=[1], max_tokens=1 + number % 4,
                   max_positions=16 * (1 + number % 3))
        )  # fmt: skip
    for batch in run_to_the_end(scheduler):
        places = [item.place for item in batch.items]
        assert len({place.row for place in places}) == len(places)
        held = [range(p.first_block, p.first_block + p.num_blocks) for p in places]
        blocks = list(itertools.chain(*held))
        assert len(set(blocks)) == len(blocks)
        assert all(0 <= place.row < 3 for place in places)


def test_all_places_come_back_whatever_way_requests_end() -> None:
    scheduler = a_scheduler(max_num_seqs=3, num_blocks=6, open_inbox=counting)
    for turn in range(20):
        for name in ("ends", "aborted", "parked"):
            scheduler.add(ticket(name, max_tokens=1 + turn % 2, max_positions=20))
        for name in ("ends", "aborted"):
            scheduler.receive(name, (prompt_piece(3, head=True), words(4)), last=True)
        run(scheduler)
        assert scheduler.abort("aborted") == (turn % 2 == 1)
        run(scheduler)
        assert scheduler.abort("parked")
        assert scheduler.request_ids() == []
    scheduler.add(ticket("all", max_tokens=1, max_positions=96))
    scheduler.receive("all", (prompt_piece(1, head=True),), last=True)
    assert rows(run(scheduler)[0]) == {"all": (0, 1)}


# ---- aborts --------------------------------------------------------------------------------------


def test_an_abort_takes_a_request_out_of_any_queue_and_leaves_the_others() -> None:
    def at_the_door() -> ARScheduler:
        scheduler = a_scheduler(max_num_seqs=1, open_inbox=counting)
        for name in ("running", "waiting", "parked"):
            scheduler.add(ticket(name, max_tokens=9, max_positions=50))
            if name != "parked":
                scheduler.receive(name, (prompt_piece(20, head=True), words(9)), last=True)
        run(scheduler)
        assert queues(scheduler) == (1, 1, 1)
        return scheduler

    for name in ("running", "waiting", "parked"):
        scheduler = at_the_door()
        assert scheduler.holds(name)
        assert scheduler.abort(name)
        assert not scheduler.holds(name)
        assert not scheduler.abort(name)
        others = {"running", "waiting", "parked"} - {name}
        assert set(scheduler.request_ids()) == others
        ended: set[str] = set()
        while (step := run(scheduler))[0] is not None:
            assert name not in step[1]
            ended |= {r.request_id for r in step[1].values() if r.finish_reason is not None}
        assert ended == others - {"parked"}


def test_an_abort_while_the_step_runs_is_no_output_and_no_resurrection() -> None:
    scheduler = a_scheduler()
    for name in ("aborted", "other"):
        scheduler.add(ticket(name, prompt=[1, 2], max_tokens=3))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("aborted")
    results = scheduler.update(batch, [7, 8], 0.0)
    assert [(r.request_id, r.token_id) for r in results] == [("other", 8)]
    assert scheduler.request_ids() == ["other"]
    assert set(rows(scheduler.schedule())) == {"other"}


# ---- ends ----------------------------------------------------------------------------------------


def outputs(scheduler: ARScheduler, tokens: Sequence[int]) -> tuple[list[int], str, str | None]:
    """Tokens, text and reason of the only request, which would draw `tokens`."""
    drawn: list[int] = []
    text, reason = "", None
    for token in [None, *tokens]:
        del token
        batch, results = run(scheduler, lambda _: tokens[len(drawn)])
        if batch is None:
            break
        for result in results.values():
            if result.token_id is not None:
                drawn.append(result.token_id)
            text += result.text
            reason = result.finish_reason or reason
    return drawn, text, reason


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_limit_ends_with_length_after_exactly_so_many_tokens(max_tokens: int) -> None:
    scheduler = a_scheduler(text=True)
    scheduler.add(ticket("r", prompt=[1, 2, 3], max_tokens=max_tokens))
    said = [ord(letter) for letter in "abcdefgh"]
    assert outputs(scheduler, said) == (said[:max_tokens], "abcdefgh"[:max_tokens], "length")
    assert scheduler.request_ids() == []


def test_any_stop_id_ends_with_stop_and_gives_no_text() -> None:
    for stop_id in (ord("c"), ord("d")):
        scheduler = a_scheduler(text=True)
        scheduler.add(ticket("r", prompt=[1], max_tokens=9, stop_token_ids=[ord("c"), ord("d")]))
        said = [ord("a"), ord("b"), stop_id, ord("e")]
        assert outputs(scheduler, said) == (said[:3], "ab", "stop")


def test_a_stop_id_as_the_last_token_allowed_is_a_stop() -> None:
    scheduler = a_scheduler(text=True)
    scheduler.add(ticket("r", prompt=[1], max_tokens=2, stop_token_ids=[ord("c")]))
    assert outputs(scheduler, [ord("a"), ord("c")]) == ([ord("a"), ord("c")], "a", "stop")


def test_a_stop_string_ends_with_stop_before_it() -> None:
    scheduler = a_scheduler(text=True)
    scheduler.add(ticket("r", prompt=[1], max_tokens=9, stop=["cd", "zz"]))
    said = [ord(letter) for letter in "abcdef"]
    assert outputs(scheduler, said) == (said[:4], "ab", "stop")


def test_text_that_was_held_back_comes_with_the_end_by_a_limit() -> None:
    scheduler = a_scheduler(text=True)
    scheduler.add(ticket("r", prompt=[1], max_tokens=3, stop=["cde"]))
    said = [ord(letter) for letter in "bcd"]
    assert outputs(scheduler, said) == (said, "bcd", "length")


def test_the_bookkeeping_of_a_request_is_one_and_the_same() -> None:
    scheduler = a_scheduler(open_inbox=counting)
    scheduler.add(ticket("r", max_tokens=100, max_positions=200))
    scheduler.receive("r", (prompt_piece(5, head=True),), last=False)
    units, position = 0, 0
    for words_now in (32, 32, 7):
        scheduler.receive("r", (words(words_now),), last=False)
        while (step := run(scheduler))[0] is not None:
            (start, stop), result = rows(step[0])["r"], step[1]["r"]
            units += 1
            assert (start, result.num_units) == (position, units)
            position = stop
    assert (position, units) == (5 + 71, 72)


def test_a_request_whose_upstream_left_nothing_is_finished_without_a_step() -> None:
    scheduler = a_scheduler(open_inbox=counting)
    scheduler.add(ticket("void", max_tokens=5, max_positions=20))
    scheduler.add(ticket("other", max_tokens=5, max_positions=20))
    assert scheduler.finish_void() == []
    scheduler.receive("void", (), last=True)
    assert scheduler.schedule() is None
    (result,) = scheduler.finish_void()
    assert (result.request_id, result.finish_reason, result.num_units) == ("void", "stop", 0)
    assert scheduler.request_ids() == ["other"]
    assert scheduler.finish_void() == []


def test_a_ticket_is_not_changed() -> None:
    given_ticket = ticket("r", prompt=[1, 2], max_tokens=3, stop_token_ids=[5])
    copy = ticket("r", prompt=[1, 2], max_tokens=3, stop_token_ids=[5])
    scheduler = a_scheduler(text=True)
    scheduler.add(given_ticket)
    run_to_the_end(scheduler)
    assert given_ticket == copy


# ---- takes that go round in a circle -------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3, 8])
def test_a_take_that_goes_round_in_a_circle_is_cut(period: int) -> None:
    scheduler = a_scheduler(max_repeated=20)
    scheduler.add(ticket("r", prompt=range(4), max_tokens=500))
    drawn: list[int] = []

    def token(request_id: str) -> int:
        # Different at first, then a circle.
        at = len(drawn)
        drawn.append(at if at < 10 else 100 + at % period)
        return drawn[-1]

    while True:
        _, results = run(scheduler, token)
        if results["r"].finish_reason is not None:
            break
    assert results["r"].finish_reason == "length"
    assert len(drawn) == 10 + period + 20
    assert scheduler.request_ids() == []


def test_what_repeats_now_and_then_or_in_a_larger_circle_is_speech() -> None:
    scheduler = a_scheduler(max_repeated=20)
    scheduler.add(ticket("r", prompt=range(4), max_tokens=200))
    drawn: list[int] = []

    def token(request_id: str) -> int:
        # Nineteen times the same, then another; and a circle of twenty in all.
        drawn.append(int(len(drawn) % 20 == 19))
        return drawn[-1]

    while scheduler.request_ids():
        run(scheduler, token)
    assert len(drawn) == 200
