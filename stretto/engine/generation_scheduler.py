"""Which requests' frames the vocoder decodes next: one portion of every request that has one.

The vocoder keeps a state per request, from its first portion to its end. A request is finished when
its upstream has ended and its last portion was decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from stretto.engine.scheduler import (
    GenerationBatch,
    ScheduledFrames,
    StepResult,
    TableScheduler,
)
from stretto.request import FinishReason, Inbox, Place, Request, RequestStatus, StageRequest

# A vocoder's state has no place in a table: the runner keeps it by request.
NOWHERE = Place(row=0, first_block=0, num_blocks=0)


class FrameInbox(Inbox, Protocol):
    """What a generation stage asks an inbox."""

    @property
    def is_ready(self) -> bool:
        """There is a portion to decode."""

    @property
    def is_done(self) -> bool:
        """Upstream has ended and everything was taken."""

    def take(self) -> tuple[np.ndarray, bool]:
        """The next portion, and whether its sound is heard."""


class GenerationRequest(Request[FrameInbox]):
    def __init__(self, ticket: StageRequest, inbox: FrameInbox) -> None:
        super().__init__(ticket, inbox, text=None)
        self.num_frames = 0


class GenerationScheduler(TableScheduler[GenerationRequest]):
    """At most `max_num_seqs` requests and about `max_frames` frames per call.

    The others' turn is the next one: what a call has decoded leaves when it ends, so that a call
    with everybody in it would make everybody wait for the last.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        open_inbox: Callable[[StageRequest], FrameInbox],
        max_frames: int | None = None,
    ) -> None:
        super().__init__()
        self._max_frames = max_frames
        self._max_num_seqs = max_num_seqs
        self._open_inbox = open_inbox

    def schedule(self) -> GenerationBatch | None:
        admitted = [
            self._admit(request, NOWHERE)
            for request in self._table.with_status(RequestStatus.WAITING)
        ]
        items: list[ScheduledFrames] = []
        num_frames = 0
        for request in self._table.with_status(RequestStatus.RUNNING)[: self._max_num_seqs]:
            if self._max_frames is not None and num_frames >= self._max_frames:
                break
            frames, heard = request.inbox.take()
            num_frames += len(frames)
            items.append(ScheduledFrames(request.request_id, NOWHERE, frames, heard))
            # To the end of the queue: it has had its turn.
            self._table.move(request, RequestStatus.RUNNING)
        return GenerationBatch(tuple(admitted), tuple(items)) if items else None

    def update(
        self, batch: GenerationBatch, token_ids: list[int], step_s: float
    ) -> list[StepResult]:
        results: list[StepResult] = []
        for index, item in enumerate(batch.items):
            request = self._table.find(item.request_id)
            if request is None:
                # Aborted while its step ran.
                continue
            request.busy_s += step_s
            reason: FinishReason | None = "stop" if request.inbox.is_done else None
            if item.heard:
                request.num_frames += len(item.frames)
            self._settle(request, reason)
            results.append(
                self._result(
                    request,
                    finish_reason=reason,
                    output_index=index if item.heard else None,
                    frames=item.frames if item.heard else None,
                )
            )
        return results

    def _open(self, ticket: StageRequest) -> GenerationRequest:
        return GenerationRequest(ticket, self._open_inbox(ticket))

    def _can_run(self, request: GenerationRequest) -> bool:
        return request.inbox.is_ready

    def _is_void(self, request: GenerationRequest) -> bool:
        return request.inbox.is_done

    def _num_units(self, request: GenerationRequest) -> int:
        return request.num_frames
