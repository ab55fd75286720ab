"""Both connectors keep one contract: bytes under a key, once, in order, nothing left over."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.transfer.connector import (
    Buffer,
    ConnectorClosed,
    OmniConnector,
    chunk_key,
    request_of,
)
from stretto.transfer.memory_connector import MemoryConnector
from stretto.transfer.shm_connector import SharedMemoryConnector, socket_pair

# Sender's and receiver's end; one object where both live in one process.
Ends = tuple[OmniConnector, OmniConnector]


def memory_ends() -> Ends:
    both = MemoryConnector()
    return both, both


def shared_ends(inline_bytes: int = 4096, send_timeout: float = 5.0) -> Ends:
    sender, receiver = (
        SharedMemoryConnector(end, inline_bytes=inline_bytes, send_timeout=send_timeout)
        for end in socket_pair()
    )
    return sender, receiver


KINDS: dict[str, Callable[[], Ends]] = {"memory": memory_ends, "shared": shared_ends}


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = KINDS[request.param]()
    yield made
    for end in made:
        end.close()


def put(ends: Ends, key: str, *data: Buffer) -> int:
    return ends[0].put("a", "b", key, data)


def get(ends: Ends, key: str, timeout: float = 5.0) -> bytes:
    return bytes(ends[1].get("a", "b", key, timeout))


def names(ends: Ends, count: int) -> list[str | None]:
    return [ends[1].wait(5.0) for _ in range(count)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_names() -> set[str]:
    """Without semaphores: those are other people's."""
    return {name.name for name in Path("/dev/shm").iterdir() if not name.name.startswith("sem.")}


def test_bytes_come_out_as_they_were_put_and_in_order(ends: Ends) -> None:
    sent = {f"r_{n}": os.urandom(n * 3000) for n in range(6)}
    for key, data in sent.items():
        assert put(ends, key, data) == len(data)
    assert names(ends, len(sent)) == list(sent)
    assert {key: get(ends, key) for key in sent} == sent


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.lists(st.binary(max_size=3000), max_size=6), min_size=1, max_size=6),
    st.randoms(),
)
def test_the_buffers_of_a_piece_are_one_behind_the_other_whenever_it_is_got(
    kind: str, pieces: list[list[bytes]], random: object
) -> None:
    ends = KINDS[kind]()
    try:
        keys = [f"r_0_{n}" for n in range(len(pieces))]
        for key, buffers in zip(keys, pieces, strict=True):
            assert put(ends, key, *buffers) == sum(map(len, buffers))
        assert names(ends, len(keys)) == keys
        order = list(range(len(pieces)))
        random.shuffle(order)  # type: ignore[attr-defined]
        for at in order:
            assert get(ends, keys[at]) == b"".join(pieces[at])
    finally:
        for end in ends:
            end.close()


def test_more_buffers_than_one_call_of_the_kernel_takes(ends: Ends) -> None:
    buffers = [bytes([n % 256]) for n in range(1500)]
    put(ends, "k", *buffers)
    assert get(ends, "k") == b"".join(buffers)


def test_nothing_is_a_piece_too(ends: Ends) -> None:
    assert put(ends, "none") == 0
    assert put(ends, "empty", b"") == 0
    assert names(ends, 2) == ["none", "empty"]
    assert (get(ends, "none"), get(ends, "empty")) == (b"", b"")


@pytest.mark.parametrize("num_bytes", [4095, 4096, 4097, 65536, 65537, 3_000_000])
def test_large_pieces_come_out_the_same(ends: Ends, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    put(ends, "k", memoryview(data))
    assert get(ends, "k") == data


def test_the_receivers_copy_is_its_own(ends: Ends) -> None:
    for num_bytes in (100, 100_000):
        data = bytearray(num_bytes)
        put(ends, f"k{num_bytes}", memoryview(data))
        data[:] = b"\xff" * num_bytes
        assert get(ends, f"k{num_bytes}") == bytes(num_bytes)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("num_items", [100, 10_000])
def test_a_buffer_is_as_long_as_its_bytes(kind: str, num_items: int) -> None:
    ends = KINDS[kind]()
    numbers = np.arange(num_items, dtype=np.int32)
    assert put(ends, "k", numbers.data) == numbers.nbytes
    assert get(ends, "k") == numbers.tobytes()
    for end in ends:
        end.close()


def test_a_key_is_named_once(ends: Ends) -> None:
    put(ends, "k", b"1")
    assert ends[1].wait(5.0) == "k"
    assert ends[1].wait(0.0) is None
    assert ends[1].wait(0.05) is None


def test_a_piece_is_got_once(ends: Ends) -> None:
    put(ends, "k", b"1")
    assert get(ends, "k") == b"1"
    with pytest.raises(TimeoutError, match="a->b: nothing under k"):
        get(ends, "k", timeout=0.05)


def test_waiting_for_what_does_not_come_has_an_end_and_names_the_edge(ends: Ends) -> None:
    put(ends, "other", b"1")
    with pytest.raises(TimeoutError, match="a->b: nothing under k"):
        get(ends, "k", timeout=0.05)
    assert get(ends, "other") == b"1"


def test_who_waits_is_woken(ends: Ends) -> None:
    got: list[str | None] = []
    waiter = threading.Thread(target=lambda: got.append(ends[1].wait(30.0)))
    waiter.start()
    put(ends, "k", b"1")
    waiter.join(30.0)
    assert got == ["k"]


def test_closing_the_receiver_wakes_who_waits(ends: Ends) -> None:
    ended: list[str] = []

    def wait() -> None:
        try:
            ended.append(str(ends[1].wait(30.0)))
        except ConnectorClosed:
            ended.append("closed")

    waiter = threading.Thread(target=wait)
    waiter.start()
    ends[1].close()
    waiter.join(30.0)
    assert ended in (["closed"], ["None"])


def test_what_was_sent_before_the_end_still_arrives_and_then_comes_the_end(ends: Ends) -> None:
    put(ends, "small", b"1")
    put(ends, "large", bytes(50_000))
    ends[0].close()
    assert names(ends, 2) == ["small", "large"]
    assert (get(ends, "small"), get(ends, "large")) == (b"1", bytes(50_000))
    with pytest.raises(ConnectorClosed):
        ends[1].wait(0.05)


def test_nothing_can_be_sent_to_an_end_that_is_closed(ends: Ends) -> None:
    ends[1].close()
    for data in (b"1", bytes(50_000)):
        with pytest.raises(ConnectorClosed):
            put(ends, "k", data)


def test_an_end_may_be_closed_twice(ends: Ends) -> None:
    for end in (*ends, *ends):
        end.close()


def test_what_is_discarded_is_gone_and_the_rest_is_not(ends: Ends) -> None:
    keys = [chunk_key(request, 0, n) for n in (0, 1) for request in ("a_b", "a", "b")]
    for key in keys:
        put(ends, key, key.encode())
    assert get(ends, "b_0_1") == b"b_0_1"
    ends[1].discard("a")
    assert names(ends, 4) == ["a_b_0_0", "b_0_0", "a_b_0_1", "b_0_1"]
    with pytest.raises(TimeoutError):
        get(ends, "a_0_0", timeout=0.05)
    assert get(ends, "a_b_0_0") == b"a_b_0_0"


@given(st.text(max_size=40), st.integers(0, 9), st.integers(0, 10**9))
def test_a_key_tells_its_request(request_id: str, stage_id: int, index: int) -> None:
    assert request_of(chunk_key(request_id, stage_id, index)) == request_id


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_many_large_pieces_leave_no_descriptor_and_no_name(kind: str) -> None:
    names_before = shared_names()
    ends = KINDS[kind]()
    before = open_descriptors()
    data = os.urandom(200_000)
    for n in range(500):
        put(ends, f"r_0_{n}", data)
        assert ends[1].wait(5.0) == f"r_0_{n}"
        if n % 2:
            ends[1].discard("r")
        else:
            assert len(ends[1].get("a", "b", f"r_0_{n}", 5.0)) == len(data)
    assert open_descriptors() == before
    for end in ends:
        end.close()
    assert shared_names() <= names_before


def test_a_failed_put_leaves_no_descriptor() -> None:
    sender, receiver = shared_ends()
    receiver.close()
    before = open_descriptors()
    for n in range(20):
        with pytest.raises(ConnectorClosed):
            sender.put("a", "b", f"r_0_{n}", [bytes(50_000)])
    assert open_descriptors() == before
    sender.close()


@pytest.mark.parametrize("num_bytes", [1000, 50_000])
def test_a_receiver_that_takes_nothing_is_noticed_and_named(num_bytes: int) -> None:
    sender, receiver = shared_ends(send_timeout=0.05)
    with pytest.raises(TimeoutError, match=r"b took nothing for 0\.05 s"):
        for n in range(100_000):
            sender.put("a", "b", f"r_0_{n}", [bytes(num_bytes)])
    sender.close()
    receiver.close()


def test_a_small_piece_needs_no_memory_file_and_a_large_one_no_room_in_the_socket() -> None:
    first, second = socket_pair()
    first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sender = SharedMemoryConnector(first, inline_bytes=1000, send_timeout=1.0)
    receiver = SharedMemoryConnector(second, inline_bytes=1000, send_timeout=1.0)
    for data in (bytes(1000), bytes(10_000_000)):
        sender.put("a", "b", "k", [data])
        assert bytes(receiver.get("a", "b", "k", 5.0)) == data
    sender.close()
    receiver.close()
