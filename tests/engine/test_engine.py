"""A stage with everything real but the model: each request ends once, and nothing of it is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.bridges.bridge import Bridge
from stretto.bridges.prompt_inbox import PromptInbox
from stretto.engine.ar_scheduler import ARScheduler
from stretto.engine.block_manager import BlockManager
from stretto.engine.engine import IDLE_S, StageEngine
from stretto.engine.generation_scheduler import GenerationScheduler
from stretto.engine.materializer import MAX_STEPS_KEPT_BACK, Materializer, StepKind
from stretto.engine.runner import Runner
from stretto.engine.scheduler import ARBatch, Scheduler
from stretto.events import (
    Abort,
    Aborted,
    Admit,
    AudioOut,
    Report,
    StageErred,
    StageFinished,
    TextOut,
)
from stretto.payloads import Chunk, CodecFrames, Payload, StageStep, TextStep
from stretto.request import StageRequest
from stretto.text import TextStream
from stretto.trace import Tracer
from stretto.transfer.adapter import ChunkTransferAdapter, Edge
from stretto.transfer.connector import OmniConnector, request_of
from stretto.transfer.memory_connector import MemoryConnector
from stretto.wire import Codec
from tests.fakes import (
    CountingInbox,
    FakeBridge,
    FakePending,
    FakeRunner,
    FakeVocoder,
    ReorderingConnector,
    duplicating,
    swallowing,
    ticket,
)

THINKER_TALKER = Edge("thinker", "talker", 0)
TALKER_CODE2WAV = Edge("talker", "code2wav", 1)
NO_TRACE = Tracer("test", None)


class StageUnderTest:
    """One stage, built as the assembly does it, over fakes; `reports` is what it says."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        kind: StepKind,
        is_output: bool,
        bridge: Bridge | None = None,
        inbound: tuple[Edge, OmniConnector] | None = None,
        outbound: tuple[Edge, OmniConnector] | None = None,
        chunk_timeout_s: float = 60.0,
        threaded: bool = False,
    ) -> None:
        self.reports: list[Report] = []
        self.said = threading.Condition()
        wake = threading.Event()
        adapter = ChunkTransferAdapter(
            inbound=inbound,
            outbound=outbound,
            chunk_timeout_s=chunk_timeout_s,
            wake=wake.set,
            tracer=NO_TRACE,
            threaded=threaded,
        )
        materializer = Materializer(
            kind=kind,
            is_output=is_output,
            bridge=bridge,
            adapter=adapter,
            publish=self._publish,
            on_error=lambda request_id: self.engine.post_error(request_id),
            tracer=NO_TRACE,
            threaded=threaded,
        )
        self.engine = StageEngine(
            scheduler=scheduler,
            runner=runner,
            adapter=adapter,
            materializer=materializer,
            wake=wake,
            tracer=NO_TRACE,
            has_upstream=inbound is not None,
        )

    def _publish(self, report: Report) -> None:
        with self.said:
            self.reports.append(report)
            self.said.notify_all()

    def admit(self, *tickets: StageRequest) -> None:
        for request in tickets:
            self.engine.post(Admit(request))

    def of(self, request_id: str) -> list[Report]:
        """What was said about one request."""
        with self.said:
            return [r for r in self.reports if getattr(r, "request_id", None) == request_id]

    def ends(self, request_id: str) -> list[Report]:
        return [r for r in self.of(request_id) if isinstance(r, StageFinished | StageErred)]


def step_all(*stages: StageUnderTest, most: int = 2000) -> None:
    """Steps the stages in turn until none has anything to do."""
    for _ in range(most):
        busy = [stage.engine.step() for stage in stages]
        if not any(busy):
            return
    raise AssertionError("they do not come to rest")


def thinker(
    runner: Runner | None = None,
    *,
    bridge: Bridge | None = None,
    outbound: OmniConnector | None = None,
    threaded: bool = False,
    max_num_seqs: int = 8,
    cell: int = 8,
) -> StageUnderTest:
    scheduler = ARScheduler(
        max_num_seqs=max_num_seqs,
        prefill_chunk_tokens=cell,
        blocks=BlockManager(num_blocks=100, block_size=16),
        open_inbox=PromptInbox,
        open_text=lambda t: TextStream(spelled, t.sampling.stop),
    )
    return StageUnderTest(
        scheduler,
        runner or FakeRunner(),
        kind="text",
        is_output=True,
        bridge=bridge or (FakeBridge() if outbound is not None else None),
        outbound=None if outbound is None else (THINKER_TALKER, outbound),
        threaded=threaded,
    )


def talker(
    inbound: OmniConnector,
    outbound: OmniConnector | None = None,
    *,
    runner: Runner | None = None,
    open_inbox: Callable[[StageRequest], Any] = lambda request: PromptlessInbox(),
    bridge: Bridge | None = None,
    threaded: bool = False,
    chunk_timeout_s: float = 60.0,
) -> StageUnderTest:
    scheduler = ARScheduler(
        max_num_seqs=8,
        prefill_chunk_tokens=8,
        blocks=BlockManager(num_blocks=100, block_size=16),
        open_inbox=open_inbox,
        open_text=None,
    )
    return StageUnderTest(
        scheduler,
        runner or FakeRunner(speaks=True),
        kind="speech",
        is_output=False,
        bridge=bridge or FakeBridge(),
        inbound=(THINKER_TALKER, inbound),
        outbound=None if outbound is None else (TALKER_CODE2WAV, outbound),
        chunk_timeout_s=chunk_timeout_s,
        threaded=threaded,
    )


def code2wav(
    inbound: OmniConnector, *, runner: Runner | None = None, threaded: bool = False
) -> StageUnderTest:
    bridge = FakeBridge()
    return StageUnderTest(
        GenerationScheduler(max_num_seqs=8, open_inbox=bridge.inbox),
        runner or FakeVocoder(),
        kind="audio",
        is_output=True,
        inbound=(TALKER_CODE2WAV, inbound),
        threaded=threaded,
    )


class PromptlessInbox(CountingInbox):
    """Every word that comes is a position of a prompt of one."""

    def __init__(self) -> None:
        super().__init__(prompt_length=1)
        self._ended = False

    def end(self) -> None:
        self._ended = True
        self.is_void = self.positions_ready == 0


def spelled(ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


def text_of(reports: list[Report]) -> tuple[str, list[int]]:
    said = [report for report in reports if isinstance(report, TextOut)]
    return "".join(r.text for r in said), [token for r in said for token in r.token_ids]


def three(
    *, first: OmniConnector | None = None, second: OmniConnector | None = None,
    first_bridge: Bridge | None = None, second_bridge: Bridge | None = None,
) -> tuple[StageUnderTest, StageUnderTest, StageUnderTest]:  # fmt: skip
    """Thinker, Talker, vocoder, over two edges."""
    words, frames = first or MemoryConnector(), second or MemoryConnector()
    return (
        thinker(outbound=words, bridge=first_bridge),
        talker(words, frames, bridge=second_bridge),
        code2wav(frames),
    )


def tickets(
    name: str, *, words: int = 6, frames: int = 4
) -> tuple[StageRequest, StageRequest, StageRequest]:
    return (
        ticket(name, prompt=[1, 2, 3], max_tokens=words, feeds_downstream=True),
        ticket(name, max_tokens=frames, max_positions=50, feeds_downstream=True),
        ticket(name),
    )


def admit_all(stages: Sequence[StageUnderTest], *names: str, **sizes: int) -> None:
    for name in names:
        for stage, request in zip(stages, tickets(name, **sizes), strict=True):
            stage.admit(request)


def samples_of(stage: StageUnderTest, name: str) -> list[int]:
    out = [report for report in stage.of(name) if isinstance(report, AudioOut)]
    return [int(value) for report in out for value in report.samples]


def sound(num_frames: int) -> list[int]:
    """What FakeRunner's tokens sound like."""
    return [1000 + n for n in range(num_frames) for _ in range(2)]


# ---- one stage -----------------------------------------------------------------------------------


def test_a_request_is_answered_token_by_token_and_ends_once() -> None:
    stage = thinker()
    stage.admit(ticket("r", prompt=[1] * 20, max_tokens=4))
    step_all(stage)
    *said, end = stage.of("r")
    assert text_of(said) == ("<1000><1001><1002><1003>", [1000, 1001, 1002, 1003])
    assert isinstance(end, StageFinished)
    assert (end.finish_reason, end.num_units) == ("length", 4)
    assert stage.engine.is_empty


def test_an_idle_engine_has_nothing_to_do() -> None:
    assert thinker().engine.step() is False


@settings(max_examples=50)
@given(st.data())
def test_whatever_is_aborted_when_each_request_ends_once_and_nothing_is_left(
    data: st.DataObject,
) -> None:
    stages = three()
    names = [f"r{number}" for number in range(data.draw(st.integers(1, 5)))]
    admit_all(stages, *names)
    aborted: set[str] = set()
    for _ in range(data.draw(st.integers(0, 25))):
        stages[data.draw(st.integers(0, 2))].engine.step()
        if data.draw(st.integers(0, 4)) == 0:
            name = data.draw(st.sampled_from(names))
            aborted.add(name)
            for stage in data.draw(st.permutations(stages)):
                stage.engine.post(Abort(name))
    step_all(*stages)
    for name in names:
        if name not in aborted:
            assert samples_of(stages[2], name) == sound(4)
            assert [len(stage.ends(name)) for stage in stages] == [1, 1, 1]
        for stage in stages:
            reports = stage.of(name)
            assert len(stage.ends(name)) <= 1
            if Aborted(name) in reports:
                said_after = reports[reports.index(Aborted(name)) :]
                assert all(isinstance(report, Aborted) for report in said_after)
            elif stage.ends(name):
                assert reports[-1] == stage.ends(name)[0]
    assert all(stage.engine.is_empty for stage in stages)


@pytest.mark.parametrize("num_steps", range(12))
def test_an_abort_is_confirmed_when_nothing_of_the_request_is_left(num_steps: int) -> None:
    stages = three()
    admit_all(stages, "r")
    for _ in range(num_steps):
        for stage in stages:
            stage.engine.step()
    for stage in stages:
        stage.engine.post(Abort("r"))
        stage.engine.step()
        assert stage.of("r")[-1] == Aborted("r")
    step_all(*stages)
    assert all(stage.engine.is_empty for stage in stages)
    admit_all(stages, "next")
    step_all(*stages)
    assert samples_of(stages[2], "next") == sound(4)


def test_the_first_request_may_be_aborted_and_the_second_is_as_any() -> None:
    stages = three()
    admit_all(stages, "first")
    for stage in stages:
        stage.engine.post(Abort("first"))
    admit_all(stages, "second")
    step_all(*stages)
    assert samples_of(stages[2], "second") == sound(4)
    assert stages[0].of("first") == [Aborted("first")]


def test_an_abort_of_nobody_is_confirmed_all_the_same() -> None:
    stage = thinker()
    stage.engine.post(Abort("nobody"))
    stage.engine.step()
    assert stage.reports == [Aborted("nobody")]
    assert stage.engine.is_empty


def test_the_runner_hears_that_a_request_has_left_whatever_way() -> None:
    runner = FakeRunner()
    stage = thinker(runner)
    stage.admit(
        ticket("ends", prompt=[1], max_tokens=1), ticket("aborted", prompt=[1], max_tokens=50)
    )
    step_all_until(stage, lambda: bool(stage.ends("ends")))
    stage.engine.post(Abort("aborted"))
    stage.engine.step()
    assert {"ends", "aborted"} <= set(runner.released)


def test_every_runner_hears_it_so_that_a_vocoder_forgets_its_streams() -> None:
    words, frames = MemoryConnector(), MemoryConnector()
    runners = FakeRunner(), FakeRunner(speaks=True), FakeVocoder()
    stages = (
        thinker(runners[0], outbound=words),
        talker(words, frames, runner=runners[1]),
        code2wav(frames, runner=runners[2]),
    )
    admit_all(stages, "whole", words=4, frames=4)
    admit_all(stages, "cut", words=40, frames=40)
    for _ in range(8):
        for stage in stages:
            stage.engine.step()
    for stage in stages:
        stage.engine.post(Abort("cut"))
    step_all(*stages)
    assert all({"whole", "cut"} <= set(runner.released) for runner in runners)


def step_all_until(stage: StageUnderTest, done: Callable[[], bool]) -> None:
    for _ in range(1000):
        if done():
            return
        stage.engine.step()
    raise AssertionError("it does not come")


# ---- three stages --------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "frames"), [(1, 1), (2, 1), (9, 3), (30, 20), (8, 8)])
def test_every_stage_that_stops_at_a_limit_tells_the_next_one(words: int, frames: int) -> None:
    stages = three()
    admit_all(stages, "r", words=words, frames=frames)
    step_all(*stages)
    assert all(len(stage.ends("r")) == 1 for stage in stages)
    assert samples_of(stages[2], "r") == sound(min(frames, words))
    assert all(stage.engine.is_empty for stage in stages)


def test_several_at_once_each_get_their_own(
) -> None:  # fmt: skip
    words, frames = MemoryConnector(), MemoryConnector()

    def own_voice(name: str, number: int) -> int:
        return 100 * int(name[1:]) + number

    stages = (
        thinker(FakeRunner(own_voice), outbound=words),
        talker(words, frames, runner=FakeRunner(own_voice, speaks=True)),
        code2wav(frames),
    )
    names = [f"r{number}" for number in range(1, 7)]
    admit_all(stages, *names, words=12, frames=10)
    step_all(*stages)
    for name in names:
        assert text_of(stages[0].of(name))[1] == [own_voice(name, n) for n in range(12)]
        assert samples_of(stages[2], name) == [
            own_voice(name, n) for n in range(10) for _ in range(2)
        ]


def test_a_talker_that_stops_before_the_thinker_leaves_no_late_word_behind() -> None:
    stages = three()
    admit_all(stages, "r", words=40, frames=2)
    step_all(*stages)
    assert stages[1].engine.num_dropped_chunks > 30
    assert all(stage.engine.is_empty for stage in stages)


def test_a_chunk_that_is_lost_fails_the_request_in_the_stage_that_misses_it() -> None:
    stages = three(first=swallowing(3))
    admit_all(stages, "r", words=9, frames=9)
    step_all(*stages)
    (failed,) = stages[1].ends("r")
    assert isinstance(failed, StageErred)
    assert "edge thinker->talker: chunk 4 arrived, 3 was expected" in failed.message
    assert stages[1].of("r")[-1] == failed
    assert stages[1].engine.is_empty
    admit_all(stages, "next", words=3, frames=3)
    step_all(*stages)
    assert samples_of(stages[2], "next") == sound(3)


def test_a_chunk_that_comes_twice_changes_nothing() -> None:
    stages = three(first=duplicating(), second=duplicating())
    admit_all(stages, "r", words=9, frames=7)
    step_all(*stages)
    assert samples_of(stages[2], "r") == sound(7)
    assert all(stage.engine.is_empty for stage in stages)


def test_chunks_out_of_order_fail_the_request_and_the_stage_goes_on() -> None:
    stages = three(second=ReorderingConnector())
    admit_all(stages, "r", words=9, frames=8)
    step_all(*stages)
    (failed,) = stages[2].ends("r")
    assert isinstance(failed, StageErred)
    assert "edge talker->code2wav: chunk 1 arrived, 0 was expected" in failed.message


def test_a_chunk_that_never_comes_fails_the_request_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stage = talker(MemoryConnector(), MemoryConnector(), chunk_timeout_s=5.0)
    stage.admit(tickets("r")[1])
    step_all(stage)
    assert stage.reports == []
    now[0] += 5.1
    step_all(stage)
    (failed,) = stage.ends("r")
    assert isinstance(failed, StageErred)
    assert "edge thinker->talker: waited 5.0 s for chunk 0" in failed.message
    assert stage.engine.is_empty


def test_a_request_without_a_word_is_finished_in_every_stage() -> None:
    def nothing_to_say(request_id: str, step: StageStep | None) -> bool:
        return False

    class Silent(FakeBridge):
        def open(self, ticket: StageRequest) -> Any:
            stream = super().open(ticket)
            stream.push = lambda step: ()  # type: ignore[method-assign]
            return stream

    stages = three(first_bridge=Silent(fail=nothing_to_say))
    admit_all(stages, "r")
    step_all(*stages)
    assert [len(stage.ends("r")) for stage in stages] == [1, 1, 1]
    assert samples_of(stages[2], "r") == []
    assert all(stage.engine.is_empty for stage in stages)


def test_the_last_mark_is_on_the_last_chunk_and_on_no_other() -> None:
    codec: Codec[Chunk] = Codec(Chunk)
    connector = MemoryConnector()
    stage = thinker(outbound=connector)
    stage.admit(ticket("r", prompt=[1] * 30, max_tokens=5, feeds_downstream=True))
    step_all(stage)
    chunks = []
    while (key := connector.wait(0.0)) is not None:
        chunks.append(codec.decode(connector.get("thinker", "talker", key, 0.0)))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [len(chunk.payloads) for chunk in chunks] == [1] * 5


def test_a_request_that_feeds_nobody_sends_nothing() -> None:
    connector = MemoryConnector()
    stage = thinker(outbound=connector)
    stage.admit(ticket("r", prompt=[1], max_tokens=5))
    step_all(stage)
    assert connector.wait(0.0) is None
    assert stage.engine.is_empty


# ---- foreign code that raises --------------------------------------------------------------------


def at_token(token_id: int, *names: str) -> Callable[[str, StageStep | None], bool]:
    def fails(request_id: str, step: StageStep | None) -> bool:
        return request_id in names and isinstance(step, TextStep) and step.token_id == token_id

    return fails


@pytest.mark.parametrize(
    ("bridge", "message"),
    [
        (FakeBridge(fail=at_token(1002, "bad")), "RuntimeError: this bridge is broken"),
        (
            FakeBridge(fail=lambda name, step: name == "bad" and step is None),
            "RuntimeError: this bridge is broken at the end",
        ),
        (FakeBridge(fail_open=lambda name: name == "bad"), "RuntimeError: this bridge does not"),
    ],
    ids=["push", "finish", "open"],
)
def test_an_error_in_a_bridge_fails_its_request_and_no_other(bridge: Bridge, message: str) -> None:
    stages = three(first_bridge=bridge)
    admit_all(stages, "bad", "good", words=6, frames=6)
    step_all(*stages)
    (failed,) = stages[0].ends("bad")
    assert isinstance(failed, StageErred)
    assert failed.message.startswith(message)
    assert stages[0].of("bad")[-1] == failed
    assert samples_of(stages[2], "good") == sound(6)
    for stage in stages[1:]:
        stage.engine.post(Abort("bad"))
    step_all(*stages)
    assert all(stage.engine.is_empty for stage in stages)


def test_an_error_in_an_inbox_that_takes_a_chunk_fails_its_request_and_no_other() -> None:
    class Picky(PromptlessInbox):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def push(self, payload: Any) -> None:
            if self._name == "bad":
                raise ValueError("not to my taste")
            super().push(payload)

    words = MemoryConnector()
    stages = (
        thinker(outbound=words),
        talker(words, MemoryConnector(), open_inbox=lambda t: Picky(t.request_id)),
    )
    for name in ("bad", "good"):
        for stage, request in zip(stages, tickets(name), strict=False):
            stage.admit(request)
    step_all(*stages)
    (failed,) = stages[1].ends("bad")
    assert isinstance(failed, StageErred)
    assert failed.message == "chunk 0: ValueError: not to my taste"
    assert isinstance(stages[1].ends("good")[0], StageFinished)
    assert stages[1].engine.is_empty


def test_an_error_where_an_inbox_is_opened_fails_its_request_and_no_other() -> None:
    words = MemoryConnector()
    bridge = FakeBridge(fail_inbox=lambda name: name == "bad", make_inbox=PromptlessInbox)
    stages = (thinker(outbound=words), talker(words, MemoryConnector(), open_inbox=bridge.inbox))
    for name in ("bad", "good"):
        for stage, request in zip(stages, tickets(name), strict=False):
            stage.admit(request)
    step_all(*stages)
    assert isinstance(stages[1].ends("bad")[0], StageErred)
    assert isinstance(stages[1].ends("good")[0], StageFinished)


def test_an_error_in_the_model_ends_the_stage() -> None:
    class Broken(FakeRunner):
        def execute(self, batch: ARBatch) -> FakePending:
            raise RuntimeError("out of memory")

    stage = thinker(Broken())
    stage.admit(ticket("r", prompt=[1], max_tokens=5))
    with pytest.raises(RuntimeError, match="out of memory"):
        stage.engine.step()


# ---- with threads --------------------------------------------------------------------------------


@contextmanager
def running(*stages: StageUnderTest) -> Iterator[None]:
    threads = [threading.Thread(target=stage.engine.run) for stage in stages]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for stage in stages:
            stage.engine.stop()
        for thread in threads:
            thread.join(30.0)
        for stage in stages:
            stage.engine.close()


def wait_for(stage: StageUnderTest, true: Callable[[], bool], timeout: float = 20.0) -> None:
    with stage.said:
        assert stage.said.wait_for(true, timeout), f"it does not come; so far {stage.reports[-3:]}"


def test_with_threads_it_is_the_same() -> None:
    words, frames = MemoryConnector(), MemoryConnector()
    stages = (
        thinker(outbound=words, threaded=True),
        talker(words, frames, threaded=True),
        code2wav(frames, threaded=True),
    )
    names = [f"r{number}" for number in range(8)]
    aborted = names[::2]
    with running(*stages):
        for name in names:
            size = 4000 if name in aborted else 40
            for stage, request in zip(
                stages,
                (
                    ticket(name, prompt=[1, 2], max_tokens=size, max_positions=50,
                           feeds_downstream=True),
                    ticket(name, max_tokens=30, max_positions=50, feeds_downstream=True),
                    ticket(name),
                ),
                strict=True,
            ):  # fmt: skip
                stage.admit(request)
        for name in aborted:
            for stage in stages:
                stage.engine.post(Abort(name))
        for stage in stages:
            for name in names:
                wait_for(
                    stage,
                    lambda s=stage, n=name: (  # type: ignore[misc]
                        Aborted(n) in s.of(n) if n in aborted else bool(s.ends(n))
                    ),
                )
    for name in names:
        if name not in aborted:
            assert samples_of(stages[2], name) == sound(30)
            assert all(len(stage.ends(name)) == 1 for stage in stages)
        for stage in stages:
            reports = stage.of(name)
            assert isinstance(reports[-1], Aborted if name in aborted else StageFinished)
    assert all(stage.engine.is_empty for stage in stages)


def test_outputs_that_cannot_be_copied_end_their_request_or_the_stage_and_not_in_silence() -> None:
    stage = thinker(FakeRunner(fail_materialize=True), threaded=True)
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            stage.engine.run()
        except RuntimeError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    stage.admit(ticket("r", prompt=[1], max_tokens=2))
    try:
        until_s = time.monotonic() + 20.0
        while time.monotonic() < until_s and not (ended or stage.ends("r")):
            thread.join(0.05)
        assert ended or stage.ends("r")
    finally:
        stage.engine.stop()
        thread.join(10.0)


# ---- first chunks and other prompts --------------------------------------------------------------


def handed_on(connector: MemoryConnector) -> list[str]:
    """Whose chunks have gone out since the last call, in their order."""
    keys = iter(lambda: connector.wait(0.0), None)
    return [request_of(key) for key in keys]


def test_first_chunks_wait_until_every_prompt_has_run() -> None:
    words = MemoryConnector()
    stage = thinker(outbound=words, cell=8)
    for name in "abc":
        stage.admit(ticket(name, prompt=[1, 2, 3], max_tokens=9, feeds_downstream=True))
    stage.engine.step()
    said = [report.request_id for report in stage.reports if isinstance(report, TextOut)]
    assert said == ["a", "b"]
    assert handed_on(words) == []
    stage.engine.step()
    assert handed_on(words) == ["a", "b", "a", "b", "c"]
    stage.admit(ticket("d", prompt=[1, 2, 3], max_tokens=9, feeds_downstream=True))
    stage.engine.step()
    assert handed_on(words) == ["a", "b", "c", "d"]


def test_a_stream_of_prompts_keeps_nobody_back_for_long() -> None:
    words = MemoryConnector()
    runner = PostingRunner(lambda step: [Admit(feeding(f"r{step}"))])
    stage = thinker(runner, outbound=words, max_num_seqs=100)
    runner.stage = stage
    stage.admit(feeding("r"))
    sent = []
    for _ in range(2 + MAX_STEPS_KEPT_BACK):
        stage.engine.step()
        sent.append(handed_on(words))
    assert sent[:MAX_STEPS_KEPT_BACK] == [[]] * MAX_STEPS_KEPT_BACK
    assert sent[MAX_STEPS_KEPT_BACK][0] == "r"


def test_a_first_chunk_goes_when_the_prompts_it_waited_for_are_gone() -> None:
    words = MemoryConnector()
    runner = PostingRunner(lambda step: [Admit(feeding("gone")), Abort("gone")] if not step else [])
    stage = thinker(runner, outbound=words)
    runner.stage = stage
    stage.admit(ticket("r", prompt=[1], max_tokens=1, feeds_downstream=True))
    step_all(stage)
    assert handed_on(words) == ["r"]
    assert stage.engine.is_empty


def test_what_is_kept_back_of_a_request_that_is_aborted_never_goes() -> None:
    words = MemoryConnector()
    more = [Admit(feeding("next")), Abort("r")]
    runner = PostingRunner(lambda step: more if not step else [])
    stage = thinker(runner, outbound=words)
    runner.stage = stage
    stage.admit(feeding("r"))
    step_all(stage)
    assert set(handed_on(words)) == {"next"}


def test_a_long_prompt_does_not_wait_for_itself() -> None:
    words = MemoryConnector()

    class PieceByPiece(FakeBridge):
        def open(self, ticket: StageRequest) -> Any:
            return Pieces()

    class Pieces:
        def push(self, step: StageStep) -> tuple[Payload, ...]:
            return (CodecFrames(np.zeros((1, 1), np.int16)),)

        def finish(self) -> tuple[Payload, ...]:
            return ()

    stage = thinker(outbound=words, bridge=PieceByPiece(), cell=8)
    prompt = list(range(20))
    stage.admit(ticket("r", prompt=prompt, max_tokens=1, feeds_downstream=True))
    stage.engine.step()
    assert handed_on(words) == ["r"]


def feeding(name: str) -> StageRequest:
    return ticket(name, prompt=[1, 2, 3], max_tokens=9, feeds_downstream=True)


class PostingRunner(FakeRunner):
    """While each step runs, commands come in: `commands(number of the step)`."""

    stage: StageUnderTest

    def __init__(self, commands: Callable[[int], Sequence[Admit | Abort]]) -> None:
        super().__init__()
        self._commands = commands

    def execute(self, batch: ARBatch) -> FakePending:
        for command in self._commands(len(self.batches)):
            self.stage.engine.post(command)
        return super().execute(batch)


def test_the_engine_tells_how_long_its_step_has_been_running() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(FakeRunner):
        def execute(self, batch: ARBatch) -> FakePending:
            inside.set()
            go_on.wait(20.0)
            return super().execute(batch)

    stage = thinker(Slow(), threaded=True)
    assert stage.engine.step_age_s == 0.0
    with running(stage):
        stage.admit(ticket("r", prompt=[1], max_tokens=1))
        assert inside.wait(20.0)
        first = stage.engine.step_age_s
        assert 0.0 < first < stage.engine.step_age_s
        go_on.set()
        wait_for(stage, lambda: bool(stage.ends("r")))
    assert stage.engine.step_age_s == 0.0


def test_an_idle_engine_works_ahead_and_one_with_requests_does_not() -> None:
    runner, words = FakeRunner(speaks=True), MemoryConnector()
    stage = talker(words, MemoryConnector(), runner=runner)
    stage.admit(ticket("waits", max_tokens=1))
    with running(stage):
        # It waits for its first chunk, which does not come.
        time.sleep(3 * IDLE_S)
        assert runner.num_prepared == 0
        stage.engine.post(Abort("waits"))
        until_s = time.monotonic() + 20.0
        while not stage.engine.is_prepared and time.monotonic() < until_s:
            time.sleep(0.02)
    assert stage.engine.is_prepared
    assert runner.num_prepared == 3


def test_another_thread_may_ask_for_the_load_at_any_time() -> None:
    """The control thread answers pings while the engine takes requests in and lets them go."""
    stage = thinker(max_num_seqs=64)
    failed: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                stage.engine.load()
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for turn in range(40):
            stage.admit(*(ticket(f"{turn}-{n}", prompt=[1], max_tokens=2) for n in range(30)))
            step_all(stage)
            if failed:
                break
    finally:
        done.set()
        asking.join(20.0)
        sys.setswitchinterval(interval)
    assert not failed


def test_codes_go_to_the_client_only_when_it_asked_for_them() -> None:
    frames = MemoryConnector()
    for wanted in (True, False):
        stage = code2wav(frames)
        stage.admit(ticket("r", return_codes=wanted))
        codes = np.arange(8, dtype=np.int16).reshape(2, 4)
        sender = ChunkTransferAdapter(
            inbound=None, outbound=(TALKER_CODE2WAV, frames), chunk_timeout_s=9.0,
            wake=lambda: None, tracer=NO_TRACE, threaded=False,
        )  # fmt: skip
        sender.save_async(Chunk("r", 0, True, (CodecFrames(codes),)))
        step_all(stage)
        (out,) = [report for report in stage.of("r") if isinstance(report, AudioOut)]
        assert out.num_frames == 2
        if wanted:
            assert out.codes is not None and np.array_equal(out.codes, codes)
        else:
            assert out.codes is None
