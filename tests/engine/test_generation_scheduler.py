"""The vocoder's turn: one portion of everybody who has one, and an end behind the last portion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.generation_scheduler import GenerationScheduler
from stretto.engine.scheduler import SchedulerLoad, StepResult
from stretto.payloads import CodecFrames
from stretto.pipeline.assembly import CPU_CALL_FRAMES, cpu_calls
from tests.fakes import NUM_CODEBOOKS, FrameQueue, ticket


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def a_scheduler(
    max_num_seqs: int = 4, *, max_frames: int | None = None, clock: Clock | None = None
) -> GenerationScheduler:
    return GenerationScheduler(
        max_num_seqs=max_num_seqs,
        open_inbox=lambda t: FrameQueue(),
        max_frames=max_frames,
        clock=clock or Clock(),
    )


def frames(first: int, count: int) -> CodecFrames:
    numbers = np.arange(first, first + count, dtype=np.int16)
    return CodecFrames(np.repeat(numbers[:, None], NUM_CODEBOOKS, 1))


def run(scheduler: GenerationScheduler) -> list[StepResult]:
    batch = scheduler.schedule()
    return [] if batch is None else scheduler.update(batch, [], 0.0)


def heard(results: list[StepResult], name: str) -> list[int]:
    return [
        int(code)
        for result in results
        if result.request_id == name and result.frames is not None
        for code in result.frames[:, 0]
    ]


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6),
    st.integers(1, 3),
    st.data(),
)
def test_every_frame_is_decoded_once_in_order_and_every_request_ends_behind_its_last(
    talks: list[list[int]], max_num_seqs: int, data: st.DataObject
) -> None:
    scheduler = a_scheduler(max_num_seqs)
    results: list[StepResult] = []
    waiting = {f"r{number}": list(sizes) for number, sizes in enumerate(talks)}
    sent = dict.fromkeys(waiting, 0)
    for name in waiting:
        scheduler.add(ticket(name))
    while waiting:
        name = data.draw(st.sampled_from(sorted(waiting)))
        size = waiting[name].pop(0) if waiting[name] else 0
        last = not waiting[name]
        scheduler.receive(name, (frames(sent[name], size),), last=last)
        sent[name] += size
        if last:
            del waiting[name]
        for _ in range(data.draw(st.integers(0, 2))):
            results += scheduler.finish_void() + run(scheduler)
    while more := [*scheduler.finish_void(), *run(scheduler)]:
        results += more
    assert scheduler.request_ids() == []
    for name, count in sent.items():
        mine = [result for result in results if result.request_id == name]
        assert heard(mine, name) == list(range(count))
        assert [result.finish_reason for result in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].num_units == count


def test_a_step_takes_one_portion_of_each() -> None:
    scheduler = a_scheduler()
    for name in ("a", "b", "parked"):
        scheduler.add(ticket(name))
    for name in ("a", "b"):
        scheduler.receive(name, (frames(0, 2), frames(2, 3)), last=False)
    assert scheduler.load() == SchedulerLoad(0, 2, 1)
    first, second = run(scheduler), run(scheduler)
    assert [(r.request_id, r.output_index) for r in first] == [("a", 0), ("b", 1)]
    assert (heard(first, "a"), heard(second, "a")) == ([0, 1], [2, 3, 4])
    assert run(scheduler) == []
    assert scheduler.load() == SchedulerLoad(0, 0, 3)


def test_a_call_takes_as_many_as_allowed_and_the_others_have_the_next_turn() -> None:
    scheduler = a_scheduler(max_num_seqs=2)
    for name in ("a", "b", "c"):
        scheduler.add(ticket(name))
        scheduler.receive(name, (frames(0, 1), frames(1, 1), frames(2, 1)), last=True)
    turns = [[result.request_id for result in run(scheduler)] for _ in range(5)]
    # While the clock stands still a and b are dry sooner than c, which has not begun.
    assert turns == [["a", "b"], ["a", "b"], ["a", "b"], ["c"], ["c"]]


def turn(scheduler: GenerationScheduler) -> list[tuple[str, int]]:
    """Who was in a call, with how many frames."""
    return [(r.request_id, 0 if r.frames is None else len(r.frames)) for r in run(scheduler)]


def test_those_whose_listeners_run_dry_first_go_first() -> None:
    clock = Clock()
    scheduler = a_scheduler(max_num_seqs=1, clock=clock)
    for name, count in (("long", 25), ("short", 2)):
        scheduler.add(ticket(name))
        scheduler.receive(name, (frames(0, count),), last=False)
        assert turn(scheduler) == [(name, count)]
    # `short` has 160 ms of sound, `long` 2 s; a newcomer has none, and no gap either.
    scheduler.add(ticket("new"))
    for name in ("new", "long", "short"):
        scheduler.receive(name, (frames(0, 3),), last=False)
    order = [turn(scheduler)[0][0] for _ in range(3)]
    assert order == ["short", "new", "long"]


def test_a_player_that_stood_still_goes_on_from_when_its_sound_came() -> None:
    clock = Clock()
    scheduler = a_scheduler(max_num_seqs=1, clock=clock)
    for name in ("late", "early"):
        scheduler.add(ticket(name))
    scheduler.receive("late", (frames(0, 2),), last=False)
    assert turn(scheduler) == [("late", 2)]
    clock.now_s += 10.0
    scheduler.receive("early", (frames(0, 4),), last=False)
    assert turn(scheduler) == [("early", 4)]
    scheduler.receive("late", (frames(2, 4),), last=False)
    assert turn(scheduler) == [("late", 4)]
    clock.now_s += 0.1
    for name in ("late", "early"):
        scheduler.receive(name, (frames(6, 1), frames(7, 1)), last=False)
    # Both have 220 ms in hand: the ten seconds before do not count against `late`.
    assert {turn(scheduler)[0][0] for _ in range(2)} == {"late", "early"}


def test_a_call_holds_portions_of_like_length_and_so_many_frames() -> None:
    scheduler = a_scheduler(max_num_seqs=64, max_frames=40)
    for number, count in enumerate((2, 25, 3, 4, 5, 50, 20)):
        name = f"{number}"
        scheduler.add(ticket(name))
        scheduler.receive(name, (frames(0, count),), last=False)
    turns = [turn(scheduler) for _ in range(5)]
    assert turns == [
        # "3" would make it three rows, for which no kernels are made.
        [("0", 2), ("2", 3)],
        [("1", 25)],
        [("3", 4), ("4", 5)],
        # More than allowed, since it is one portion.
        [("5", 50)],
        [("6", 20)],
    ]


@settings(max_examples=100)
@given(
    st.integers(1, 20),
    st.integers(1, 30),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_the_calls_that_are_prepared_are_all_that_come(
    max_rows: int, longest: int, portions: list[int]
) -> None:
    prepared = cpu_calls(max_rows=max_rows, longest=longest)
    assert len(set(prepared)) == len(prepared)
    scheduler = a_scheduler(max_rows, max_frames=CPU_CALL_FRAMES)
    for number, size in enumerate(portions):
        scheduler.add(ticket(f"r{number}"))
        scheduler.receive(f"r{number}", (frames(0, min(size, longest)),), last=True)
    while calls := turn(scheduler):
        assert (len(calls), max(size for _, size in calls)) in prepared


@pytest.mark.parametrize("when", ["parked", "waiting", "running"])
def test_an_aborted_request_is_gone_from_any_state(when: str) -> None:
    scheduler = a_scheduler(max_num_seqs=1)
    scheduler.add(ticket("r"))
    if when != "parked":
        scheduler.receive("r", (frames(0, 1), frames(1, 1)), last=False)
    if when == "running":
        run(scheduler)
    assert scheduler.abort("r")
    assert not scheduler.holds("r")
    scheduler.add(ticket("next"))
    scheduler.receive("next", (frames(0, 1),), last=True)
    assert [r.request_id for r in run(scheduler)] == ["next"]
    assert scheduler.request_ids() == []


def test_an_abort_while_the_step_runs_gives_no_output_and_moves_no_other() -> None:
    scheduler = a_scheduler()
    for name in ("a", "b"):
        scheduler.add(ticket(name))
        scheduler.receive(name, (frames(0, 1),), last=True)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    (result,) = scheduler.update(batch, [], 0.0)
    assert (result.request_id, result.output_index, heard([result], "b")) == ("b", 1, [0])


def test_a_stream_that_ends_without_a_frame_is_void_even_after_empty_payloads() -> None:
    scheduler = a_scheduler()
    scheduler.add(ticket("r"))
    scheduler.receive("r", (frames(0, 0),), last=False)
    assert (scheduler.finish_void(), run(scheduler)) == ([], [])
    scheduler.receive("r", (frames(0, 0),), last=True)
    (result,) = scheduler.finish_void()
    assert (result.finish_reason, result.num_units, result.frames) == ("stop", 0, None)


def test_an_end_that_comes_after_the_last_frame_was_decoded_ends_the_request() -> None:
    scheduler = a_scheduler()
    scheduler.add(ticket("r"))
    scheduler.receive("r", (frames(0, 2),), last=False)
    assert [result.finish_reason for result in run(scheduler)] == [None]
    scheduler.receive("r", (), last=True)
    (result,) = scheduler.finish_void()
    assert (result.finish_reason, result.num_units) == ("stop", 2)
