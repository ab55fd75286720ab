"""Chunks between the engine of a stage and the connectors on either side of it.

    save_async(chunk) ──> queue ──> save_loop: encode, put                        (outgoing edge)
    arrivals() <── queue <── recv_loop: wait, get, decode                         (incoming edge)

The loops only move and translate. Which request a chunk belongs to, whether it is the next one,
whether it is late: that is judged in `arrivals`, on the engine thread, by one `InboundStream` per
request. So no state is shared between threads, and without threads (`threaded=False`, for stages
that run inline) the same code runs in the caller's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from stretto.payloads import Chunk
from stretto.trace import Tracer
from stretto.transfer.connector import ConnectorClosed, OmniConnector, chunk_key, request_of
from stretto.wire import Codec

T = TypeVar("T")

# How often a loop looks whether it is to end.
POLL_S = 0.5
# A chunk may overtake its request's ticket, which comes another way, by this much at most.
EARLY_S = 10.0
# Ids of requests that have left, so that what comes late for them is told from what comes early.
REMEMBERED_REQUESTS = 4096


class TransferError(msgspec.Struct, frozen=True):
    """A chunk of a request was lost, late or unreadable; takes the chunk's place in `arrivals`."""

    request_id: str
    edge: str
    message: str


class Edge(msgspec.Struct, frozen=True):
    """One edge as an adapter sees it. `from_id` is the sending stage's number, for keys."""

    from_stage: str
    to_stage: str
    from_id: int

    @property
    def label(self) -> str:
        return f"{self.from_stage}->{self.to_stage}"


class TransferAdapter:
    """Owns the threads of one stage's transfers; what they do is the subclass's."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def _start(self, name: str, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _join(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=2 * POLL_S)


class InboundStream:
    """What is expected next of one request on the incoming edge."""

    def __init__(self, deadline: float) -> None:
        self.next_index = 0
        # Of the next chunk, by time.monotonic().
        self.deadline = deadline


class ChunkTransferAdapter(TransferAdapter):
    """The two edges of one stage; either may be absent."""

    def __init__(
        self,
        *,
        inbound: tuple[Edge, OmniConnector] | None,
        outbound: tuple[Edge, OmniConnector] | None,
        chunk_timeout_s: float,
        wake: Callable[[], None],
        tracer: Tracer,
        threaded: bool,
    ) -> None:
        super().__init__()
        self._inbound = inbound
        self._outbound = outbound
        self._chunk_timeout_s = chunk_timeout_s
        self._wake = wake
        self._tracer = tracer
        self._threaded = threaded
        self._codec: Codec[Chunk] = Codec(Chunk)
        self._streams: dict[str, InboundStream] = {}
        self._early: dict[str, tuple[float, list[Chunk | TransferError]]] = {}
        # Judged already: chunks that had come before their request.
        self._accepted: list[Chunk | TransferError] = []
        self._left: OrderedDict[str, None] = OrderedDict()
        self._received: queue.SimpleQueue[Chunk | TransferError] = queue.SimpleQueue()
        self._unsent: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._unsendable: queue.SimpleQueue[TransferError] = queue.SimpleQueue()
        self.num_dropped_chunks = 0
        if threaded and inbound is not None:
            self._start(f"recv {inbound[0].label}", self._recv_loop)
        if threaded and outbound is not None:
            self._start(f"save {outbound[0].label}", self._save_loop)

    # ---- engine thread ---------------------------------------------------------------------------

    def load_async(self, request_id: str) -> None:
        """Chunks of this request are wanted from now on."""
        self._streams[request_id] = InboundStream(time.monotonic() + self._chunk_timeout_s)
        if request_id in self._early:
            _, chunks = self._early.pop(request_id)
            for chunk in chunks:
                self._accepted += self._judge(chunk)
            self._wake()

    def arrivals(self) -> list[Chunk | TransferError]:
        """What came in since the last call, in order per request. Never waits."""
        if not self._threaded and self._inbound is not None:
            while self._receive(timeout=0.0):
                pass
        accepted, self._accepted = [*self._accepted, *_drain(self._unsendable)], []
        for arrival in _drain(self._received):
            accepted += self._judge(arrival)
        return accepted + self._overdue()

    def drop(self, request_id: str) -> None:
        """Nothing more of this request is wanted, and what still comes is dropped."""
        self._streams.pop(request_id, None)
        self._early.pop(request_id, None)
        self._left[request_id] = None
        if len(self._left) > REMEMBERED_REQUESTS:
            self._left.popitem(last=False)

    @property
    def num_streams(self) -> int:
        return len(self._streams) + len(self._early)

    def _judge(self, arrival: Chunk | TransferError) -> list[Chunk | TransferError]:
        assert self._inbound is not None
        stream = self._streams.get(arrival.request_id)
        if stream is None:
            self._put_aside(arrival)
            return []
        if isinstance(arrival, TransferError):
            self.drop(arrival.request_id)
            return [arrival]
        if arrival.index < stream.next_index:
            self.num_dropped_chunks += 1
            return []
        if arrival.index > stream.next_index:
            self.drop(arrival.request_id)
            return [
                TransferError(
                    arrival.request_id,
                    self._inbound[0].label,
                    f"chunk {arrival.index} arrived, {stream.next_index} was expected; "
                    "a chunk was lost in transit",
                )
            ]
        stream.next_index += 1
        stream.deadline = time.monotonic() + self._chunk_timeout_s
        if arrival.last:
            self.drop(arrival.request_id)
        return [arrival]

    def _put_aside(self, arrival: Chunk | TransferError) -> None:
        if arrival.request_id in self._left:
            self.num_dropped_chunks += 1
            return
        until = time.monotonic() + EARLY_S
        self._early.setdefault(arrival.request_id, (until, []))[1].append(arrival)

    def _overdue(self) -> list[Chunk | TransferError]:
        now = time.monotonic()
        for request_id in [name for name, (until, _) in self._early.items() if until < now]:
            self.num_dropped_chunks += len(self._early[request_id][1])
            self.drop(request_id)
        late: list[Chunk | TransferError] = []
        for request_id, stream in list(self._streams.items()):
            if stream.deadline < now:
                assert self._inbound is not None
                edge = self._inbound[0]
                late.append(
                    TransferError(
                        request_id,
                        edge.label,
                        f"waited {self._chunk_timeout_s:.1f} s for chunk {stream.next_index} "
                        f"(chunk_timeout_s); is {edge.from_stage} alive?",
                    )
                )
                self.drop(request_id)
        return late

    # ---- materializer thread ---------------------------------------------------------------------

    def save_async(self, chunk: Chunk) -> None:
        """Sends a chunk behind those before it."""
        if self._threaded:
            self._unsent.put(chunk)
        else:
            self._save(chunk)

    # ---- the loops -------------------------------------------------------------------------------

    def _recv_loop(self) -> None:
        while not self._closing.is_set():
            try:
                received = self._receive(timeout=POLL_S)
            except ConnectorClosed:
                # The sending stage has ended. Its requests are failed by whoever noticed that;
                # those already handed over whole are none the worse.
                return
            if received:
                self._wake()

    def _receive(self, *, timeout: float) -> bool:
        assert self._inbound is not None
        edge, connector = self._inbound
        key = connector.wait(timeout)
        if key is None:
            return False
        began_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        try:
            data = connector.get(edge.from_stage, edge.to_stage, key, timeout=POLL_S)
            self._received.put(self._codec.decode(data))
        except (ValueError, TimeoutError) as error:
            message = f"chunk {key} cannot be read: {error}"
            self._received.put(TransferError(request_of(key), edge.label, message))
        else:
            cpu_us = (time.thread_time_ns() - cpu_ns) / 1e3
            self._tracer.span("get", began_ns, key=key, bytes=len(data), cpu_us=cpu_us)
        return True

    def _save_loop(self) -> None:
        while (chunk := self._unsent.get()) is not None:
            self._save(chunk)

    def _save(self, chunk: Chunk) -> None:
        assert self._outbound is not None
        edge, connector = self._outbound
        key = chunk_key(chunk.request_id, edge.from_id, chunk.index)
        began_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        try:
            size = connector.put(edge.from_stage, edge.to_stage, key, self._codec.encode(chunk))
            cpu_us = (time.thread_time_ns() - cpu_ns) / 1e3
            self._tracer.span("put", began_ns, key=key, bytes=size, cpu_us=cpu_us)
        except (ConnectorClosed, TimeoutError, OSError, TypeError, ValueError) as error:
            message = f"chunk {chunk.index} was not sent: {error}"
            self._unsendable.put(TransferError(chunk.request_id, edge.label, message))
            self._wake()

    def close(self) -> None:
        """Ends the loops, what is queued for sending sent first, and closes the connectors."""
        self._unsent.put(None)
        self._join()
        for end in (self._inbound, self._outbound):
            if end is not None:
                end[1].close()


def _drain(waiting: queue.SimpleQueue[T]) -> Iterator[T]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return
