"""Behind the steps: outputs to the client and to the next stage, in order, off the engine's path.

    engine thread       open(ticket)   submit(pending, results)   drop(id)
                             └──────────────── one queue ───────────┘
    materializer thread  copies, bridge stream, chunks to the adapter, reports to the front

One queue means one order: what a request said last is sent before its end, and its end before the
word that it was aborted. An error in here fails the request it belongs to and nobody else.

A stage that writes text keeps a request's first chunks back while other prompts wait for it: the
next stage's prompt would run beside theirs, and everybody's first word come later.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from stretto.bridges.bridge import Bridge, BridgeStream
from stretto.engine.runner import Materialized, PendingOutput
from stretto.engine.scheduler import StepResult
from stretto.events import AudioOut, Report, StageErred, StageFinished, TextOut
from stretto.payloads import Chunk, SpeechStep, StageStep, TextStep
from stretto.request import StageRequest
from stretto.trace import Tracer
from stretto.transfer.adapter import ChunkTransferAdapter

log = logging.getLogger(__name__)

# For so many steps at most, so that a stream of prompts does not silence who came first.
MAX_STEPS_KEPT_BACK = 2

StepKind = Literal["text", "speech", "audio"]


class _Open(msgspec.Struct, frozen=True):
    ticket: StageRequest


class _Step(msgspec.Struct, frozen=True):
    pending: PendingOutput | None
    results: list[StepResult]
    prompts_follow: bool


class _Drop(msgspec.Struct, frozen=True):
    request_id: str
    # What to tell the front: that the abort is done, or why the request failed.
    report: Report


class _Stop(msgspec.Struct, frozen=True):
    pass


_Task = _Open | _Step | _Drop | _Stop


class _Outlet:
    """One request's way out of this stage."""

    def __init__(self, ticket: StageRequest, stream: BridgeStream | None) -> None:
        self.ticket = ticket
        self.stream = stream
        self.next_index = 0


class _FirstChunks:
    """Sends chunks on, but those of requests that begin only when nobody's prompt is waiting."""

    def __init__(self, send: Callable[[Chunk], None]) -> None:
        self._send = send
        self._kept: dict[str, list[Chunk]] = {}
        self._num_steps = 0
        self._keep = False

    def next_step(self, *, keep: bool) -> None:
        """The chunks that follow are of another step; with `keep`, first ones are kept back."""
        self._num_steps += 1
        self._keep = keep
        if not keep or self._num_steps > MAX_STEPS_KEPT_BACK:
            kept, self._kept, self._num_steps = self._kept, {}, 0
            for chunks in kept.values():
                for chunk in chunks:
                    self._send(chunk)

    def send(self, chunk: Chunk, *, may_wait: bool) -> None:
        kept = self._kept.get(chunk.request_id)
        if kept is not None:
            kept.append(chunk)
        elif self._keep and may_wait and chunk.index == 0:
            self._kept[chunk.request_id] = [chunk]
        else:
            self._send(chunk)

    def drop(self, request_id: str) -> None:
        self._kept.pop(request_id, None)


class Materializer:
    def __init__(
        self,
        *,
        kind: StepKind,
        is_output: bool,
        bridge: Bridge | None,
        adapter: ChunkTransferAdapter,
        publish: Callable[[Report], None],
        on_error: Callable[[str], None],
        tracer: Tracer,
        threaded: bool,
    ) -> None:
        """`on_error(request_id)` tells the engine to let go of a request that failed in here."""
        self._kind = kind
        self._is_output = is_output
        self._bridge = bridge
        self._publish = publish
        self._on_error = on_error
        self._tracer = tracer
        self._outlets: dict[str, _Outlet] = {}
        self._first_chunks = _FirstChunks(adapter.save_async)
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="materializer", daemon=True)
            self._thread.start()

    # ---- engine thread ---------------------------------------------------------------------------

    def open(self, ticket: StageRequest) -> None:
        """A request whose outputs will come."""
        self._put(_Open(ticket))

    def submit(
        self, pending: PendingOutput | None, results: list[StepResult], *, prompts_follow: bool
    ) -> None:
        """The outputs of a step; of results alone where nothing ran.

        `prompts_follow`: prompts are waiting, and a later call will say that none are.
        """
        self._put(_Step(pending, results, prompts_follow))

    def drop(self, request_id: str, report: Report) -> None:
        """Nothing more of this request goes out but `report`."""
        self._put(_Drop(request_id, report))

    def close(self) -> None:
        """Finishes what is queued."""
        self._put(_Stop())
        if self._thread is not None:
            self._thread.join()

    @property
    def num_outlets(self) -> int:
        return len(self._outlets)

    def _put(self, task: _Task) -> None:
        if self._thread is None:
            self._handle(task)
        else:
            self._tasks.put(task)

    # ---- materializer thread ---------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            task = self._tasks.get()
            self._handle(task)
            if isinstance(task, _Stop):
                return

    def _handle(self, task: _Task) -> None:
        match task:
            case _Open(ticket=ticket):
                self._guarded(ticket.request_id, lambda: self._open_outlet(ticket))
            case _Step(pending=pending, results=results, prompts_follow=prompts_follow):
                began_ns = time.monotonic_ns()
                self._first_chunks.next_step(keep=prompts_follow and self._kind == "text")
                self._finish_step(pending, results)
                self._tracer.span("materialize", began_ns, requests=len(results))
            case _Drop(request_id=request_id, report=report):
                self._outlets.pop(request_id, None)
                self._first_chunks.drop(request_id)
                self._publish(report)
            case _Stop():
                self._first_chunks.next_step(keep=False)

    def _finish_step(self, pending: PendingOutput | None, results: list[StepResult]) -> None:
        try:
            done = Materialized() if pending is None else pending.materialize()
        except Exception as error:
            for result in results:
                self._fail(result.request_id, error)
            return
        for result in results:
            outlet = self._outlets.get(result.request_id)
            if outlet is not None:
                self._guarded(
                    result.request_id,
                    lambda o=outlet, r=result: self._deliver(o, r, done),  # type: ignore[misc]
                )

    def _guarded(self, request_id: str, action: Callable[[], None]) -> None:
        """Runs `action`; an error in it ends this request. A bridge may be anyone's code."""
        try:
            action()
        except Exception as error:
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        log.error("request %s failed as its output was handed on", request_id, exc_info=error)
        self._outlets.pop(request_id, None)
        self._first_chunks.drop(request_id)
        self._publish(StageErred(request_id, f"{type(error).__name__}: {error}"))
        self._on_error(request_id)

    def _open_outlet(self, ticket: StageRequest) -> None:
        stream = None
        if ticket.feeds_downstream:
            assert self._bridge is not None
            stream = self._bridge.open(ticket)
        self._outlets[ticket.request_id] = _Outlet(ticket, stream)

    def _deliver(self, outlet: _Outlet, result: StepResult, done: Materialized) -> None:
        self._hand_on(outlet, result, done)
        if self._is_output:
            self._report(outlet, result, done)
        if result.finish_reason is not None:
            del self._outlets[result.request_id]
            self._publish(
                StageFinished(
                    request_id=result.request_id,
                    finish_reason=result.finish_reason,
                    num_units=result.num_units,
                    queue_s=result.queue_s,
                    busy_s=result.busy_s,
                    num_cached_tokens=result.num_cached_tokens,
                )
            )

    def _hand_on(self, outlet: _Outlet, result: StepResult, done: Materialized) -> None:
        """What the next stage gets of this step, as one chunk."""
        if outlet.stream is None:
            return
        payloads = outlet.stream.push(self._step(result, done))
        last = result.finish_reason is not None
        if last:
            payloads += outlet.stream.finish()
        if payloads or last:
            chunk = Chunk(result.request_id, outlet.next_index, last, payloads)
            outlet.next_index += 1
            # A prompt that comes in cells has nobody to wait for but itself.
            self._first_chunks.send(chunk, may_wait=result.token_id is not None)

    def _step(self, result: StepResult, done: Materialized) -> StageStep:
        if self._kind == "text":
            return TextStep(result.num_prompt_rows, result.token_id, result.finish_reason)
        index = result.output_index
        return SpeechStep(None if index is None else done.frames[index])

    def _report(self, outlet: _Outlet, result: StepResult, done: Materialized) -> None:
        """What the client gets of this step."""
        if self._kind == "text":
            if result.token_id is not None:
                self._publish(TextOut(result.request_id, result.text, (result.token_id,)))
        elif result.output_index is not None:
            assert result.frames is not None
            speech = outlet.ticket.speech
            wants_codes = speech is not None and speech.return_codes
            self._publish(
                AudioOut(
                    request_id=result.request_id,
                    samples=done.samples[result.output_index],
                    num_frames=len(result.frames),
                    codes=result.frames if wants_codes else None,
                )
            )
