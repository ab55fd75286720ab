"""Real stage processes: what dies, hangs or is left is noticed, named and cleaned up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.api import Answer, AsyncOmni, collect
from stretto.errors import CheckpointError, StageFailed, StrettoError
from stretto.events import AudioDelta, Event, Failed, Finished, TextDelta
from stretto.trace import read_trace
from tests.pipeline.test_inline import a_pipeline as an_inline_pipeline

pytestmark = pytest.mark.process

PROMPT = "Who are you, and since when?"
SHORT: dict[str, Any] = {
    "sampling": {"max_tokens": 6, "seed": 1},
    "talker_sampling": {"max_tokens": 9},
    "return_codes": True,
}
# Longer than any test waits for.
ENDLESS: dict[str, Any] = {
    "sampling": {"max_tokens": 2000, "seed": 1},
    "talker_sampling": {"max_tokens": 4000},
}
TEXT = {"speak": False, "sampling": {"max_tokens": 6}}
WAIT_S = 30.0


class Service:
    """A pipeline of processes and the loop it lives in."""

    def __init__(self, runner: asyncio.Runner, omni: AsyncOmni) -> None:
        self.runner = runner
        self.omni = omni

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def generate(self, **options: Any) -> Answer:
        answer: Answer = self.run(self.omni.generate(PROMPT, **options))
        return answer

    @property
    def pids(self) -> dict[str, int]:
        return self.omni.pipeline.stage_pids

    def until(self, true: Callable[[], bool], seconds: float = WAIT_S) -> None:
        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while not true():
                    await asyncio.sleep(0.02)

        self.run(wait())

    def hold_nothing(self) -> bool:
        """By the last word of every stage; stages are asked once a second."""
        loads = self.omni.pipeline.stage_loads
        return self.omni.pipeline.is_empty and all(
            load.num_running + load.num_waiting + load.num_waiting_for_chunk == 0
            for load in loads.values()
        )


@contextmanager
def a_service(
    cache_dir: Path, model: str = "tiny", trace: Path | None = None, **flags: Any
) -> Iterator[Service]:
    with asyncio.Runner() as runner:
        omni = AsyncOmni(model, cache_dir=cache_dir, trace=trace, flags=flags)
        runner.run(omni.start())
        try:
            yield Service(runner, omni)
        finally:
            runner.run(omni.close())


@pytest.fixture(scope="module")
def service(cache_dir: Path) -> Iterator[Service]:
    with a_service(cache_dir) as made:
        yield made


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def own_shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if "stretto" in entry.name}


def open_descriptors(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def assert_same_codes(got: Answer, expected: Answer) -> None:
    assert got.codes is not None and expected.codes is not None
    assert np.array_equal(got.codes, expected.codes)


async def all_of(handle: Any) -> list[Event]:
    return [event async for event in handle]


async def first_sound(handle: Any) -> Any:
    """The iterator of a request that has begun to sound."""
    events = handle.__aiter__()
    while not isinstance(await anext(events), AudioDelta):
        pass
    return events


# ---- as a whole ----------------------------------------------------------------------------------


def test_processes_answer_as_one_thread_does(service: Service, cache_dir: Path) -> None:
    got = service.generate(**SHORT)
    with an_inline_pipeline(cache_dir) as inline:
        expected = inline.generate(PROMPT, **SHORT)
    assert (got.text, got.token_ids) == (expected.text, expected.token_ids)
    assert_same_codes(got, expected)
    assert np.abs(got.audio - expected.audio).max() <= 1e-4


def test_text_arrives_before_the_first_sound_and_sound_before_the_last_text(
    service: Service,
) -> None:
    options = {**SHORT, "sampling": {"max_tokens": 40}, "initial_codec_chunk_frames": 1}

    async def stream() -> list[Event]:
        return await all_of(service.omni.submit(PROMPT, **options))

    kinds = [type(event) for event in service.run(stream())]
    assert kinds[0] is TextDelta
    assert AudioDelta in kinds
    assert kinds[-1] is Finished


def test_half_of_twenty_streams_aborted_at_random_leave_the_others_whole(
    service: Service,
) -> None:
    expected = service.generate(**SHORT)
    chance = random.Random(7)
    pids = dict(service.pids)

    async def listen(number: int) -> Answer | None:
        handle = service.omni.submit(PROMPT, **SHORT)
        events: list[Any] = []
        leave_after = chance.randrange(0, 7) if number % 2 else None
        if leave_after == 0:
            await handle.abort()
            return None
        async for event in handle:
            events.append(event)
            if len(events) == leave_after:
                await handle.abort()
                return None
        return collect(events)

    async def crowd() -> list[Answer | None]:
        return await asyncio.gather(*(listen(number) for number in range(20)))

    answers = service.run(crowd())
    assert [answer is None for answer in answers] == [False, True] * 10
    for answer in answers[::2]:
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
        assert_same_codes(answer, expected)
    assert dict(service.pids) == pids and all(map(is_alive, pids.values()))
    service.until(service.hold_nothing)


def test_streams_that_are_cut_leave_nothing_behind_in_any_process(service: Service) -> None:
    async def cut() -> None:
        handle = service.omni.submit(PROMPT, **ENDLESS)
        await first_sound(handle)
        await handle.abort()

    async def cut_some() -> None:
        for _ in range(3):
            await asyncio.gather(*(cut() for _ in range(4)))

    service.run(cut_some())
    service.until(service.hold_nothing)
    before = {name: open_descriptors(pid) for name, pid in service.pids.items()}
    service.run(cut_some())
    service.until(service.hold_nothing)
    assert {name: open_descriptors(pid) for name, pid in service.pids.items()} == before
    assert own_shared_memory() == set()


def test_a_bad_request_reaches_no_stage(service: Service) -> None:
    pids = dict(service.pids)
    for sampling in (
        {"stop_token_ids": [10**6], "min_tokens": 2, "max_tokens": 3},
        {"top_k": 2**31 - 1, "temperature": 1.0, "max_tokens": 3},
        {"stop": ["\ufffd" * 100], "max_tokens": 3},
        {"stop_token_ids": list(range(3000)), "max_tokens": 3},
    ):
        service.generate(speak=False, sampling=sampling)
    for options in (
        {"sampling": {"top_k": 2**70}},
        {"sampling": {"seed": 2**70}},
        {"talker_sampling": {"min_tokens": 2**40}},
        {"speaker": "nobody"},
    ):
        with pytest.raises(StrettoError):
            service.generate(**options)
    assert all(map(is_alive, pids.values()))
    assert service.generate(**SHORT).usage.audio_tokens == 9


def test_a_long_prompt_and_large_payloads_go_through(service: Service) -> None:
    async def whole() -> list[Event]:
        return await all_of(service.omni.submit("word " * 3000, **SHORT))

    end = service.run(whole())[-1]
    assert isinstance(end, Finished)
    assert end.usage.prompt_tokens > 3000


def test_async_output_off_and_a_trace_change_nothing(
    service: Service, cache_dir: Path, tmp_path: Path
) -> None:
    expected = service.generate(**SHORT)
    stages = {name: {"async_output": "off"} for name in ("thinker", "talker", "code2wav")}
    trace = tmp_path / "trace.json"
    with a_service(cache_dir, trace=trace, stages=stages) as other:
        got = other.generate(**SHORT)
    assert (got.text, got.token_ids) == (expected.text, expected.token_ids)
    assert_same_codes(got, expected)
    assert np.array_equal(got.audio, expected.audio)
    processes = {span.process for span in read_trace(trace)}
    assert processes == {"front", "thinker", "talker", "code2wav"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# ---- death ---------------------------------------------------------------------------------------


def failure_of(service: Service, how: Callable[[], None], **options: Any) -> StageFailed:
    """How a request in full swing fails when `how` happens; nothing follows the failure."""

    async def watch() -> list[Event]:
        events = await first_sound(service.omni.submit(PROMPT, **options))
        how()
        return [event async for event in events]

    async def soon() -> list[Event]:
        return await asyncio.wait_for(watch(), WAIT_S)

    events = service.run(soon())
    assert isinstance(events[-1], Failed)
    assert not any(isinstance(event, Failed | Finished) for event in events[:-1])
    error = events[-1].error
    assert isinstance(error, StageFailed)
    return error


def test_a_killed_vocoder_fails_its_requests_by_name_and_text_is_still_served(
    cache_dir: Path,
) -> None:
    with a_service(cache_dir) as service:
        pids = dict(service.pids)
        error = failure_of(service, lambda: os.kill(pids["code2wav"], signal.SIGKILL), **ENDLESS)
        assert error.stage == "code2wav"
        assert "died" in str(error)
        assert set(service.omni.pipeline.dead_stages) == {"code2wav"}
        assert service.generate(**TEXT).usage.text_tokens == 6
        with pytest.raises(StageFailed, match="code2wav"):
            service.generate(**SHORT)
        service.until(lambda: service.omni.pipeline.is_empty)
        # The entry stage next: then nothing is served.
        os.kill(pids["thinker"], signal.SIGKILL)
        service.until(lambda: "thinker" in service.omni.pipeline.dead_stages)
        with pytest.raises(StageFailed, match="thinker"):
            service.generate(**TEXT)
        assert is_alive(pids["talker"])
    assert not any(map(is_alive, pids.values()))


def test_a_stage_that_hangs_is_noticed_named_and_ended_and_who_only_writes_goes_on(
    cache_dir: Path,
) -> None:
    with a_service(cache_dir, step_timeout_s=2.0) as service:
        pid = service.pids["talker"]

        async def write() -> list[Event]:
            writing = {"speak": False, "sampling": {"max_tokens": 300}}
            return await all_of(service.omni.submit(PROMPT, **writing))

        written = service.runner.get_loop().create_task(write())
        error = failure_of(service, lambda: os.kill(pid, signal.SIGSTOP), **ENDLESS)
        assert error.stage == "talker"
        assert "hangs" in str(error) and "step_timeout_s" in str(error)
        assert set(service.omni.pipeline.dead_stages) == {"talker"}
        service.until(lambda: not is_alive(pid))
        service.until(written.done)
        end = written.result()[-1]
        assert isinstance(end, Finished)
        assert end.usage.text_tokens == 300
        assert service.generate(**TEXT).usage.text_tokens == 6
        service.until(lambda: service.omni.pipeline.is_empty)


def test_steps_of_the_warm_up_may_take_longer_than_later_ones(cache_dir: Path) -> None:
    """They compile: two seconds on a quiet machine, and more on a busy one."""
    with a_service(cache_dir, step_timeout_s=0.2) as service:
        assert dict(service.omni.pipeline.dead_stages) == {}


def test_a_front_that_was_held_up_does_not_blame_the_stages(cache_dir: Path) -> None:
    """A suspended laptop, a debugger, a program that computes in its event loop."""
    with a_service(cache_dir, step_timeout_s=1.5) as service:

        async def busy() -> None:
            await asyncio.sleep(0.5)
            time.sleep(4.0)
            await asyncio.sleep(2.0)

        service.run(busy())
        assert dict(service.omni.pipeline.dead_stages) == {}
        assert service.generate(**SHORT).usage.audio_tokens == 9


# ---- ends ----------------------------------------------------------------------------------------


def test_closing_leaves_no_process_no_descriptor_and_no_shared_memory(cache_dir: Path) -> None:
    before = open_descriptors()
    with a_service(cache_dir) as service:
        pids = dict(service.pids)
        service.generate(**SHORT)

        async def in_flight() -> Any:
            handle = service.omni.submit(PROMPT, **ENDLESS)
            await first_sound(handle)

        service.run(in_flight())
    assert not any(map(is_alive, pids.values()))
    assert own_shared_memory() == set()
    assert open_descriptors() <= before


PARENT = """
import sys, time
from stretto.api import Omni
omni = Omni("tiny", cache_dir=sys.argv[1])
print(*omni.pipeline.stage_pids.values(), flush=True)
for event in omni.stream("Hello", sampling={"max_tokens": 2000}, talker_sampling={"max_tokens": 4000}):
    pass
"""  # noqa: E501


def gone_within(pids: list[int], seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < until_s:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


@pytest.fixture(scope="module")
def orphans(cache_dir: Path) -> Iterator[tuple[bool, bool]]:
    """A parent is killed: are its stages gone, and is one that was held up then gone too?"""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(cache_dir)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    held_up, *others = pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert len(pids) == 3
        os.kill(held_up, signal.SIGSTOP)
        # Longer than it takes for the next question whether it still lives.
        time.sleep(1.5)
        parent.kill()
        parent.wait()
        others_gone = gone_within(others, WAIT_S)
        os.kill(held_up, signal.SIGCONT)
        yield others_gone, gone_within([held_up], WAIT_S)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)


def test_the_stages_of_a_killed_parent_are_gone_soon(orphans: tuple[bool, bool]) -> None:
    assert orphans[0]
    assert own_shared_memory() == set()


def test_a_stage_that_was_held_up_while_its_parent_died_goes_too(
    orphans: tuple[bool, bool],
) -> None:
    assert orphans[1]


def test_weights_that_do_not_fit_are_told_and_no_process_is_left(
    tiny_dir: Path, cache_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_dir.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).symlink_to(file)
    (broken / "model.safetensors").write_bytes(b"nothing")
    before, others = open_descriptors(), set(children())
    with (
        pytest.raises((StageFailed, CheckpointError), match=r"model\.safetensors"),
        a_service(cache_dir, str(broken)),
    ):
        pass
    assert open_descriptors() <= before
    assert set(children()) <= others


def children() -> list[int]:
    """Stage processes of this one."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    stages = []
    for pid in map(int, own):
        command = Path(f"/proc/{pid}/cmdline")
        if command.is_file() and b"stretto.pipeline.worker" in command.read_bytes():
            stages.append(pid)
    return stages
