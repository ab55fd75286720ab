"""Chunks of a request come 0, 1, 2, ... to the engine; whatever goes wrong fails that request."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.payloads import Chunk, CodecFrames, Payload, SpokenTokens
from stretto.trace import Tracer
from stretto.transfer.adapter import ChunkTransferAdapter, Edge, TransferError
from stretto.transfer.connector import OmniConnector
from stretto.transfer.memory_connector import MemoryConnector
from stretto.transfer.shm_connector import SharedMemoryConnector, socket_pair
from tests.fakes import (
    ReorderingConnector,
    WrappedConnector,
    duplicating,
    garbling,
    swallowing,
)

EDGE = Edge("thinker", "talker", 0)
WAIT_S = 5.0
Arrivals = list[Chunk | TransferError]


def chunk(request_id: str, index: int, *payloads: Payload, last: bool = False) -> Chunk:
    return Chunk(request_id, index, last, payloads or (SpokenTokens(np.array([index], np.int32)),))


@contextmanager
def across(
    sending: OmniConnector,
    receiving: OmniConnector | None = None,
    *,
    chunk_timeout_s: float = 60.0,
    threaded: bool = False,
    wake: Callable[[], None] = lambda: None,
) -> Iterator[tuple[ChunkTransferAdapter, ChunkTransferAdapter]]:
    """The adapters of two stages with an edge between them: (sender's, receiver's)."""
    sender = ChunkTransferAdapter(
        inbound=None,
        outbound=(EDGE, sending),
        chunk_timeout_s=chunk_timeout_s,
        wake=wake,
        tracer=Tracer("test", None),
        threaded=threaded,
    )
    receiver = ChunkTransferAdapter(
        inbound=(EDGE, receiving or sending),
        outbound=None,
        chunk_timeout_s=chunk_timeout_s,
        wake=wake,
        tracer=Tracer("test", None),
        threaded=threaded,
    )
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def indices(arrivals: Arrivals, request_id: str) -> list[int]:
    return [a.index for a in arrivals if isinstance(a, Chunk) and a.request_id == request_id]


def failures(arrivals: Arrivals) -> dict[str, str]:
    found = [a for a in arrivals if isinstance(a, TransferError)]
    assert len({a.request_id for a in found}) == len(found), "a request fails once"
    assert all(a.edge == "thinker->talker" for a in found)
    return {a.request_id: a.message for a in found}


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), max_size=30), st.randoms())
def test_each_request_gets_its_chunks_in_order_whoever_sends_between(
    senders: list[int], random: object
) -> None:
    with across(MemoryConnector()) as (sender, receiver):
        got: Arrivals = []
        sent: dict[str, int] = {}
        for number in range(5):
            receiver.load_async(f"r{number}")
        for number in senders:
            name = f"r{number}"
            sender.save_async(chunk(name, sent.get(name, 0)))
            sent[name] = sent.get(name, 0) + 1
            if random.random() < 0.3:  # type: ignore[attr-defined]
                got += receiver.arrivals()
        got += receiver.arrivals()
        assert {name: indices(got, name) for name in sent} == {
            name: list(range(count)) for name, count in sent.items()
        }
        assert not failures(got)


def test_payloads_arrive_as_they_were_sent() -> None:
    frames = np.arange(48, dtype=np.int16).reshape(3, 16)
    with across(MemoryConnector()) as (sender, receiver):
        receiver.load_async("r")
        sender.save_async(chunk("r", 0, CodecFrames(frames), CodecFrames(frames[:0]), last=True))
        (arrived,) = receiver.arrivals()
        assert isinstance(arrived, Chunk) and arrived.last
        first, second = arrived.payloads
        assert isinstance(first, CodecFrames) and isinstance(second, CodecFrames)
        assert np.array_equal(first.codes, frames)
        assert second.codes.shape == (0, 16)


def test_what_the_sender_changes_afterwards_does_not_arrive() -> None:
    ids = np.array([1, 2], np.int32)
    with across(MemoryConnector()) as (sender, receiver):
        receiver.load_async("r")
        sender.save_async(chunk("r", 0, SpokenTokens(ids)))
        ids[:] = 9
        (arrived,) = receiver.arrivals()
        assert isinstance(arrived, Chunk)
        assert isinstance(arrived.payloads[0], SpokenTokens)
        assert arrived.payloads[0].token_ids.tolist() == [1, 2]


def test_a_lost_chunk_fails_its_request_at_once_and_names_edge_and_indices() -> None:
    with across(swallowing(3)) as (sender, receiver):
        receiver.load_async("r")
        for index in range(6):
            sender.save_async(chunk("r", index))
        got = receiver.arrivals()
        assert indices(got, "r") == [0, 1, 2]
        assert failures(got) == {
            "r": "chunk 4 arrived, 3 was expected; a chunk was lost in transit"
        }
        assert (receiver.num_dropped_chunks, receiver.num_streams) == (1, 0)


def test_a_lost_last_chunk_fails_its_request_when_the_deadline_is_over(clock: Clock) -> None:
    with across(swallowing(2), chunk_timeout_s=5.0) as (sender, receiver):
        receiver.load_async("r")
        for index in range(3):
            sender.save_async(chunk("r", index, last=index == 2))
        assert indices(receiver.arrivals(), "r") == [0, 1]
        clock.now_s += 4.9
        assert receiver.arrivals() == []
        clock.now_s += 0.2
        assert failures(receiver.arrivals()) == {
            "r": "waited 5.0 s for chunk 2 (chunk_timeout_s); is thinker alive?"
        }
        assert receiver.num_streams == 0
        assert receiver.arrivals() == []


def test_a_request_that_gets_no_chunk_at_all_fails_when_the_deadline_is_over(
    clock: Clock,
) -> None:
    with across(MemoryConnector(), chunk_timeout_s=5.0) as (_, receiver):
        receiver.load_async("r")
        clock.now_s += 4.9
        receiver.load_async("later")
        assert receiver.arrivals() == []
        clock.now_s += 0.2
        failed = failures(receiver.arrivals())
        assert set(failed) == {"r"}
        assert "waited 5.0 s for chunk 0" in failed["r"]


def test_each_chunk_moves_the_deadline(clock: Clock) -> None:
    with across(MemoryConnector(), chunk_timeout_s=5.0) as (sender, receiver):
        receiver.load_async("r")
        for index in range(20):
            clock.now_s += 4.0
            sender.save_async(chunk("r", index))
            assert not failures(receiver.arrivals())
        clock.now_s += 5.1
        assert "chunk 20" in failures(receiver.arrivals())["r"]


def test_a_duplicate_is_dropped_and_counted() -> None:
    with across(duplicating()) as (sender, receiver):
        receiver.load_async("r")
        for index in range(4):
            sender.save_async(chunk("r", index, last=index == 3))
        got = receiver.arrivals()
        assert indices(got, "r") == [0, 1, 2, 3]
        assert not failures(got)
        assert receiver.num_dropped_chunks == 4


def test_a_chunk_that_overtakes_another_is_a_failure_not_a_wait() -> None:
    with across(ReorderingConnector()) as (sender, receiver):
        receiver.load_async("r")
        sender.save_async(chunk("r", 0))
        sender.save_async(chunk("r", 1))
        assert "chunk 1 arrived, 0 was expected" in failures(receiver.arrivals())["r"]


def test_a_chunk_before_its_ticket_is_kept_for_it() -> None:
    with across(MemoryConnector()) as (sender, receiver):
        for index in range(3):
            sender.save_async(chunk("r", index))
        assert receiver.arrivals() == []
        receiver.load_async("r")
        assert indices(receiver.arrivals(), "r") == [0, 1, 2]
        assert receiver.num_dropped_chunks == 0


def test_early_chunks_stay_before_those_that_come_with_the_ticket() -> None:
    came_in = threading.Semaphore(0)
    with across(*shared_pair(), threaded=True, wake=came_in.release) as (sender, receiver):
        sender.save_async(chunk("r", 0))
        came_in.acquire(timeout=20.0)
        assert receiver.arrivals() == []
        sender.save_async(chunk("r", 1))
        came_in.acquire(timeout=20.0)
        receiver.load_async("r")
        got = receiver.arrivals()
        assert not failures(got)
        assert indices(got, "r") == [0, 1]


def test_early_chunks_are_not_kept_for_ever(clock: Clock) -> None:
    with across(MemoryConnector()) as (sender, receiver):
        sender.save_async(chunk("r", 0))
        sender.save_async(chunk("r", 1))
        assert receiver.arrivals() == []
        assert (receiver.num_streams, receiver.num_dropped_chunks) == (1, 0)
        clock.now_s += 11.0
        assert receiver.arrivals() == []
        assert (receiver.num_streams, receiver.num_dropped_chunks) == (0, 2)
        sender.save_async(chunk("r", 2))
        assert receiver.arrivals() == []
        assert receiver.num_dropped_chunks == 3


def test_what_comes_for_a_request_that_has_left_is_dropped_and_counted() -> None:
    with across(MemoryConnector()) as (sender, receiver):
        receiver.load_async("r")
        sender.save_async(chunk("r", 0))
        receiver.arrivals()
        receiver.drop("r")
        for index in (1, 2):
            sender.save_async(chunk("r", index))
        assert receiver.arrivals() == []
        assert (receiver.num_dropped_chunks, receiver.num_streams) == (2, 0)


def test_what_comes_behind_the_last_chunk_is_dropped_and_counted() -> None:
    with across(MemoryConnector()) as (sender, receiver):
        receiver.load_async("r")
        sender.save_async(chunk("r", 0, last=True))
        sender.save_async(chunk("r", 1, last=True))
        assert indices(receiver.arrivals(), "r") == [0]
        assert (receiver.num_dropped_chunks, receiver.num_streams) == (1, 0)


def test_an_aborted_request_among_others_takes_nothing_from_them() -> None:
    with across(MemoryConnector()) as (sender, receiver):
        for name in ("a", "b"):
            receiver.load_async(name)
        for index in range(3):
            for name in ("a", "b"):
                sender.save_async(chunk(name, index, last=index == 2))
            if index == 1:
                receiver.drop("a")
        got = receiver.arrivals()
        assert (indices(got, "a"), indices(got, "b")) == ([], [0, 1, 2])
        assert receiver.num_dropped_chunks == 3
        assert receiver.num_streams == 0


GARBAGE = {
    "nothing": b"",
    "half a length": b"abc",
    "noise": bytes(range(3, 200)),
    "a length past the end": b"\xff\xff\xff\xff",
    "another struct": b"\x08\x00\x00\x00\x81\xa5label\x05",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("threaded", [False, True])
def test_bytes_that_cannot_be_read_fail_their_request_and_no_other(
    garbage: bytes, threaded: bool
) -> None:
    with across(garbling(1, garbage), threaded=threaded, chunk_timeout_s=3.0) as (
        sender,
        receiver,
    ):
        for name in ("bad", "good"):
            receiver.load_async(name)
        sender.save_async(chunk("bad", 0))
        sender.save_async(chunk("bad", 1))
        sender.save_async(chunk("good", 0))
        got = arrivals_until(receiver, lambda got: bool(failures(got)) and "good" in ids(got))
        assert indices(got, "bad") == [0]
        assert indices(got, "good") == [0]
        assert failures(got)["bad"].startswith("chunk bad_0_1 cannot be read: ")


def test_a_chunk_that_is_named_and_not_there_fails_its_request_and_no_other() -> None:
    class LosingConnector(WrappedConnector):
        """Loses the bytes of the first chunk of `bad`, not its name."""

        def get(self, from_stage: str, to_stage: str, get_key: str, timeout: float) -> memoryview:
            data = self.inner.get(from_stage, to_stage, get_key, timeout)
            if get_key == "bad_0_0":
                raise TimeoutError(f"{from_stage}->{to_stage}: nothing under {get_key}")
            return data

    with across(LosingConnector()) as (sender, receiver):
        for name in ("bad", "good"):
            receiver.load_async(name)
        sender.save_async(chunk("bad", 0))
        sender.save_async(chunk("good", 0))
        got = receiver.arrivals()
        assert indices(got, "good") == [0]
        assert "nothing under bad_0_0" in failures(got)["bad"]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_payload_that_cannot_travel_fails_its_request_and_no_other(threaded: bool) -> None:
    foreign: Any = SpokenTokens(np.array([object()]))
    tensor: Any = SpokenTokens(torch.zeros(1))  # type: ignore[arg-type]
    with across(MemoryConnector(), threaded=threaded) as (sender, receiver):
        for name in ("bad", "worse", "good"):
            receiver.load_async(name)
        for name, payload in (("bad", foreign), ("worse", tensor)):
            sender.save_async(chunk(name, 0, payload))
        sender.save_async(chunk("good", 0))
        assert indices(arrivals_until(receiver, lambda got: "good" in ids(got)), "good") == [0]
        failed = failures(arrivals_until(sender, lambda got: len(got) == 2))
        assert all("chunk 0 was not sent" in failed[name] for name in ("bad", "worse"))


def test_a_chunk_that_cannot_be_sent_fails_its_request_in_the_sending_stage() -> None:
    connector = MemoryConnector()
    with across(connector) as (sender, _):
        connector.close()
        sender.save_async(chunk("r", 7))
        failed = failures(sender.arrivals())
        assert failed["r"].startswith("chunk 7 was not sent: ")


# ---- with threads and sockets --------------------------------------------------------------------


def shared_pair() -> tuple[OmniConnector, OmniConnector]:
    sender, receiver = (
        SharedMemoryConnector(end, inline_bytes=1000, send_timeout=5.0) for end in socket_pair()
    )
    return sender, receiver


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.001)


def ids(arrivals: Arrivals) -> set[str]:
    return {arrival.request_id for arrival in arrivals}


def arrivals_until(receiver: ChunkTransferAdapter, done: Callable[[Arrivals], bool]) -> Arrivals:
    got: Arrivals = []

    def enough() -> bool:
        got.extend(receiver.arrivals())
        return done(got)

    until(enough)
    return got


def test_two_real_threads_bring_everything_across_in_order() -> None:
    woken = threading.Event()
    with across(*shared_pair(), threaded=True, wake=woken.set) as (sender, receiver):
        rows = {n: os.urandom(2 * 16 * (1 + n * 7 % 90)) for n in range(120)}
        for name in ("a", "b", "c"):
            receiver.load_async(name)
        for n, data in rows.items():
            codes = np.frombuffer(data, np.int16).reshape(-1, 16)
            for name in ("a", "b", "c"):
                sender.save_async(chunk(name, n, CodecFrames(codes), last=n == 119))
        got = arrivals_until(receiver, lambda got: len(got) == 360)
        assert woken.is_set()
        for name in ("a", "b", "c"):
            mine = [a for a in got if isinstance(a, Chunk) and a.request_id == name]
            assert [a.index for a in mine] == list(range(120))
            payloads = [a.payloads[0] for a in mine]
            assert all(isinstance(payload, CodecFrames) for payload in payloads)
            assert [p.codes.tobytes() for p in payloads] == list(rows.values())  # type: ignore[union-attr]
        assert (receiver.num_streams, receiver.num_dropped_chunks) == (0, 0)


def test_what_is_queued_is_sent_before_the_adapter_closes() -> None:
    sending, receiving = shared_pair()
    with across(sending, receiving, threaded=True) as (sender, receiver):
        receiver.load_async("r")
        for index in range(200):
            sender.save_async(chunk("r", index, last=index == 199))
        sender.close()
        got = arrivals_until(receiver, lambda got: len(got) == 200)
        assert indices(got, "r") == list(range(200))


def test_a_receiver_that_is_gone_fails_the_request_and_wakes_the_engine() -> None:
    woken = threading.Event()
    sending, receiving = shared_pair()
    with across(sending, receiving, threaded=True, wake=woken.set) as (sender, receiver):
        receiver.close()
        sender.save_async(chunk("r", 0))
        assert woken.wait(20.0)
        assert "chunk 0 was not sent" in failures(sender.arrivals())["r"]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As in a process that has as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name.name) for name in Path("/proc/self/fd").iterdir())
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_chunk_that_finds_no_free_descriptor_fails_its_request_and_no_other() -> None:
    with across(*shared_pair()) as (sender, receiver):
        for name in ("large", "small"):
            receiver.load_async(name)
        frames = CodecFrames(np.zeros((1000, 16), np.int16))
        sender.save_async(chunk("large", 0, frames))
        sender.save_async(chunk("small", 0))
        with no_descriptor_left():
            got = receiver.arrivals()
        assert indices(got, "small") == [0]
        assert "chunk" in failures(got)["large"]


def test_closing_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with across(*shared_pair(), threaded=True) as (sender, receiver):
        started = set(threading.enumerate()) - before
        assert {t.name for t in started} == {"save thinker->talker", "recv thinker->talker"}
        sender.save_async(chunk("r", 0))
        receiver.arrivals()
    until(lambda: not set(threading.enumerate()) & started)
