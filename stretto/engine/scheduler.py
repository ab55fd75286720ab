"""What every scheduler does for the engine, and the batches that go to the runners."""

from __future__ import annotations

import abc
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from stretto.payloads import Payload
from stretto.request import (
    FinishReason,
    Place,
    Request,
    RequestStatus,
    RequestTable,
    StageRequest,
)


class ScheduledRows(msgspec.Struct, frozen=True):
    """Positions `start` to `start + num_rows` of one request in an autoregressive step.

    `inbox` is what the runner reads its inputs from, while the step is launched. `draws` says
    whether the last row's logits are wanted: always, but for a prompt cell that is not the last.
    """

    request_id: str
    place: Place
    start: int
    num_rows: int
    num_prompt_rows: int
    draws: bool
    inbox: Any


class ScheduledFrames(msgspec.Struct, frozen=True):
    """The next frames of one request for the vocoder, int16 [n, num_codebooks].

    Those not `heard` are a reference to speak like; their sound goes to nobody.
    """

    request_id: str
    place: Place
    frames: np.ndarray
    heard: bool


class Admission(msgspec.Struct, frozen=True):
    """A request that takes its place with this batch.

    Its first `num_copied_blocks` blocks are copied from the run at block `copied_from`.
    """

    ticket: StageRequest
    place: Place
    copied_from: int = 0
    num_copied_blocks: int = 0


class ARBatch(msgspec.Struct, frozen=True):
    admitted: tuple[Admission, ...]
    items: tuple[ScheduledRows, ...]

    def sizes(self) -> dict[str, int]:
        """For traces."""
        prompt_rows = sum(item.num_prompt_rows for item in self.items)
        return {"requests": len(self.items), "prompt_rows": prompt_rows}


class GenerationBatch(msgspec.Struct, frozen=True):
    admitted: tuple[Admission, ...]
    items: tuple[ScheduledFrames, ...]

    def sizes(self) -> dict[str, int]:
        """For traces."""
        frames = sum(len(item.frames) for item in self.items)
        return {"requests": len(self.items), "frames": frames}


class StepResult(msgspec.Struct, frozen=True):
    """What a step meant for one request, as far as the scheduler sees it.

    For the client `text`; for the bridge `num_prompt_rows`, `token_id` and, at the end,
    `finish_reason`. `output_index` is the place of the request's output among those of the step.
    """

    request_id: str
    num_prompt_rows: int = 0
    token_id: int | None = None
    text: str = ""
    output_index: int | None = None
    # What a vocoder's step decoded, int16 [n, num_codebooks].
    frames: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    num_units: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    busy_s: float = 0.0


class SchedulerLoad(msgspec.Struct, frozen=True):
    num_running: int
    num_waiting: int
    num_waiting_for_chunk: int
    # Share of the KV blocks that requests hold.
    kv_usage: float = 0.0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler(Protocol):
    """What the engine asks of a scheduler. Engine thread only."""

    def add(self, ticket: StageRequest) -> None:
        """A request from now on, waiting for its first input."""

    def receive(self, request_id: str, payloads: tuple[Payload, ...], *, last: bool) -> None:
        """A chunk of a request that this scheduler holds."""

    def schedule(self) -> Any | None:
        """The next batch for the runner; None when nothing can run."""

    def update(self, batch: Any, token_ids: list[int], step_s: float) -> list[StepResult]:
        """Books the step; finished requests are gone with this call."""

    def finish_void(self) -> list[StepResult]:
        """Requests whose upstream ended and that have nothing left to run; gone with this call."""

    def abort(self, request_id: str) -> bool:
        """Forgets a request and frees what it held; False if it is not here."""

    def holds(self, request_id: str) -> bool: ...

    def request_ids(self) -> list[str]: ...

    def load(self) -> SchedulerLoad: ...

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt is waiting for its turn, or for the rest of it."""


RequestT = TypeVar("RequestT", bound=Request[Any])


class TableScheduler(abc.ABC, Generic[RequestT]):
    """The part that is the same whatever a step is: the table of requests and who wakes when."""

    def __init__(self) -> None:
        self._table: RequestTable[RequestT] = RequestTable()

    @abc.abstractmethod
    def _open(self, ticket: StageRequest) -> RequestT:
        """The request of a ticket, its inbox as full as the ticket makes it."""

    @abc.abstractmethod
    def _can_run(self, request: RequestT) -> bool:
        """Its inbox covers the next thing to do."""

    @abc.abstractmethod
    def _is_void(self, request: RequestT) -> bool:
        """Its upstream has ended and there is nothing left to run."""

    @abc.abstractmethod
    def _num_units(self, request: RequestT) -> int:
        """What it has made so far: tokens, or frames."""

    def add(self, ticket: StageRequest) -> None:
        request = self._open(ticket)
        self._table.add(request)
        self._wake(request)

    def receive(self, request_id: str, payloads: tuple[Payload, ...], *, last: bool) -> None:
        request = self._table.find(request_id)
        assert request is not None
        for payload in payloads:
            request.inbox.push(payload)
        if last:
            request.inbox.end()
        self._wake(request)

    def finish_void(self) -> list[StepResult]:
        waiting = self._table.with_status(RequestStatus.WAITING_FOR_CHUNK)
        void = [request for request in waiting if self._is_void(request)]
        for request in void:
            self._remove(request)
        return [self._result(request, finish_reason="stop") for request in void]

    def abort(self, request_id: str) -> bool:
        request = self._table.find(request_id)
        if request is None:
            return False
        self._remove(request)
        return True

    def holds(self, request_id: str) -> bool:
        return self._table.find(request_id) is not None

    def request_ids(self) -> list[str]:
        return [request.request_id for request in self._table]

    def load(self) -> SchedulerLoad:
        count = self._table.count
        return SchedulerLoad(
            num_running=count(RequestStatus.RUNNING),
            num_waiting=count(RequestStatus.WAITING),
            num_waiting_for_chunk=count(RequestStatus.WAITING_FOR_CHUNK),
        )

    def _admit(self, request: RequestT, place: Place) -> Admission:
        request.admit(place)
        self._table.move(request, RequestStatus.RUNNING)
        return Admission(request.ticket, place)

    def _wake(self, request: RequestT) -> None:
        if request.status is RequestStatus.WAITING_FOR_CHUNK and self._can_run(request):
            placed = request.place is not None
            self._table.move(request, RequestStatus.RUNNING if placed else RequestStatus.WAITING)

    def _remove(self, request: RequestT) -> None:
        self._table.remove(request)

    def _settle(self, request: RequestT, finish_reason: FinishReason | None) -> None:
        """Where a request stands after a step: gone, waiting for its next chunk, or running."""
        if finish_reason is not None:
            self._remove(request)
        elif not self._can_run(request):
            self._table.move(request, RequestStatus.WAITING_FOR_CHUNK)

    def _result(
        self,
        request: RequestT,
        *,
        finish_reason: FinishReason | None,
        output_index: int | None = None,
        num_prompt_rows: int = 0,
        token_id: int | None = None,
        text: str = "",
        frames: np.ndarray | None = None,
    ) -> StepResult:
        return StepResult(
            request_id=request.request_id,
            num_prompt_rows=num_prompt_rows,
            token_id=token_id,
            text=text,
            output_index=output_index,
            frames=frames,
            finish_reason=finish_reason,
            num_units=self._num_units(request),
            num_cached_tokens=request.num_cached_tokens,
            queue_s=request.queue_s,
            busy_s=request.busy_s,
        )
