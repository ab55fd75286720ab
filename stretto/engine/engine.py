"""One stage's loop: take what arrived, schedule, run, book, hand on.

    commands ─┐                                                      ┌─> reports
              ├─> step(): arrivals, schedule, execute, update, submit ┤
    chunks  ──┘                                                      └─> chunks

Everything a request owns in this stage is owned here, by one thread: the caller's of `step`, or of
`run`. Others reach it through `post`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from stretto.engine.materializer import Materializer
from stretto.engine.runner import PendingOutput, Runner
from stretto.engine.scheduler import Scheduler, SchedulerLoad, StepResult
from stretto.events import Abort, Aborted, Admit, StageErred
from stretto.payloads import Chunk
from stretto.request import StageRequest
from stretto.trace import Tracer
from stretto.transfer.adapter import ChunkTransferAdapter, TransferError

log = logging.getLogger(__name__)

# An idle engine looks after its deadlines this often.
IDLE_S = 0.25


class StageEngine:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        adapter: ChunkTransferAdapter,
        materializer: Materializer,
        wake: threading.Event,
        tracer: Tracer,
        has_upstream: bool,
    ) -> None:
        """`wake` is set by whoever brings something for the loop."""
        self._scheduler = scheduler
        self._runner = runner
        self._adapter = adapter
        self._materializer = materializer
        self._wake = wake
        self._tracer = tracer
        # Whether the loop has waited for work since its last step.
        self._waited = True
        # Whether the last step's outputs were handed on with word that prompts would follow.
        self._prompts_follow = False
        self._has_upstream = has_upstream
        self._commands: queue.SimpleQueue[Admit | Abort | str] = queue.SimpleQueue()
        self._stopping = False
        # Whether the runner had nothing more to do ahead of requests, when it was last asked.
        self.is_prepared = False
        # When the step now running began, by time.monotonic(); None between steps.
        self.step_began_s: float | None = None

    # ---- any thread ------------------------------------------------------------------------------

    def post(self, command: Admit | Abort) -> None:
        self._commands.put(command)
        self._wake.set()

    def post_error(self, request_id: str) -> None:
        """The request has failed outside of the loop, and the front was told."""
        self._commands.put(request_id)
        self._wake.set()

    def stop(self) -> None:
        """Makes `run` return after the step it is in."""
        self._stopping = True
        self._wake.set()

    @property
    def step_age_s(self) -> float:
        began_s = self.step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    # ---- engine thread ---------------------------------------------------------------------------

    def run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            if self.step() or self._wake.wait(IDLE_S):
                continue
            if not self._scheduler.request_ids():
                self._prepare()

    def step(self) -> bool:
        """One turn; False when there was nothing to run."""
        self._take_commands()
        for arrival in self._adapter.arrivals():
            self._receive(arrival)
        void = self._scheduler.finish_void()
        if void:
            self._submit(None, void)
            self._release([result.request_id for result in void])
        batch = self._scheduler.schedule()
        if batch is None:
            self._waited = True
            kept_back = self._prompts_follow
            if kept_back:
                # The prompts were aborted, or wait for what others hold.
                self._prompts_follow = False
                self._materializer.submit(None, [], prompts_follow=False)
            return bool(void) or kept_back
        began_ns = time.monotonic_ns()
        self.step_began_s = began_ns / 1e9
        pending = self._runner.execute(batch)
        token_ids = pending.sampled()
        step_s = time.monotonic() - self.step_began_s
        self._tracer.span("step", began_ns, after_wait=self._waited, **batch.sizes())
        self._waited = False
        results = self._scheduler.update(batch, token_ids, step_s)
        self._submit(pending, results)
        self._release([r.request_id for r in results if r.finish_reason is not None])
        self.step_began_s = None
        return True

    def _submit(self, pending: PendingOutput | None, results: list[StepResult]) -> None:
        # A prompt that came during the step is still a command.
        self._prompts_follow = self._scheduler.has_prompts or not self._commands.empty()
        self._materializer.submit(pending, results, prompts_follow=self._prompts_follow)

    def _prepare(self) -> None:
        """What can be done ahead; whoever comes meanwhile waits for the piece at hand, not more."""
        while not self._wake.is_set():
            self.is_prepared = not self._runner.prepare()
            if self.is_prepared:
                return

    def close(self) -> None:
        """Ends the threads around the loop; nothing may be posted after it."""
        self._materializer.close()
        self._adapter.close()
        self._tracer.close()

    def load(self) -> SchedulerLoad:
        return self._scheduler.load()

    @property
    def is_empty(self) -> bool:
        """No trace of any request is left. For tests, while the loop stands still."""
        return (
            not self._scheduler.request_ids()
            and not self._adapter.num_streams
            and not self._materializer.num_outlets
        )

    @property
    def num_dropped_chunks(self) -> int:
        return self._adapter.num_dropped_chunks

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            match command:
                case Admit(ticket=ticket):
                    self._admit(ticket)
                case Abort(request_id=request_id):
                    self._forget(request_id)
                    self._materializer.drop(request_id, Aborted(request_id))
                case str() as request_id:
                    self._forget(request_id)

    def _admit(self, ticket: StageRequest) -> None:
        self._materializer.open(ticket)
        try:
            self._scheduler.add(ticket)
        except Exception as error:
            # As in `_receive`: the inbox is the bridge's.
            log.exception("request %s was refused", ticket.request_id)
            self._fail(ticket.request_id, f"{type(error).__name__}: {error}")
            return
        if self._has_upstream and not ticket.brings_all:
            self._adapter.load_async(ticket.request_id)

    def _receive(self, arrival: Chunk | TransferError) -> None:
        if isinstance(arrival, TransferError):
            self._fail(arrival.request_id, f"edge {arrival.edge}: {arrival.message}")
            return
        try:
            self._scheduler.receive(arrival.request_id, arrival.payloads, last=arrival.last)
        except Exception as error:
            # The inbox is the bridge's, and a bridge may be anyone's code: its request fails.
            log.exception("request %s: chunk %d was refused", arrival.request_id, arrival.index)
            self._fail(
                arrival.request_id, f"chunk {arrival.index}: {type(error).__name__}: {error}"
            )

    def _fail(self, request_id: str, message: str) -> None:
        self._forget(request_id)
        self._materializer.drop(request_id, StageErred(request_id, message))

    def _forget(self, request_id: str) -> None:
        """Frees all that the request holds on the engine's side."""
        self._scheduler.abort(request_id)
        self._release([request_id])

    def _release(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._runner.release(request_id)
            if self._has_upstream:
                self._adapter.drop(request_id)
