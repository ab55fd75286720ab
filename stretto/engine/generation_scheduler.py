"""Which requests' frames the vocoder decodes next: those whose listeners run dry first.

    dry at      the time at which a player that began with the first sound has played all of it
    a call      the request that is dry first, and with it those behind it with portions of like
                length, up to so many frames; 1, 2, 4, 8 ... of them, the others' turn is the next

What a call has decoded leaves when it ends, so a call with everybody in it would make everybody
wait for the last, and a short portion beside a long one would wait for the long one.

The vocoder keeps a state per request, from its first portion to its end. A request is finished when
its upstream has ended and its last portion was decoded.
"""

from __future__ import annotations

import time
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
# Frames come at 12.5 Hz.
FRAME_S = 0.08
# A listener who has heard nothing yet waits, but has no gap: those who would have one go first.
FIRST_SOUND_S = 0.3
# Shorter rows are padded to the longest of their call, which is work.
LIKE_LENGTH = 2


class FrameInbox(Inbox, Protocol):
    """What a generation stage asks an inbox."""

    @property
    def is_ready(self) -> bool:
        """There is a portion to decode."""

    @property
    def is_done(self) -> bool:
        """Upstream has ended and everything was taken."""

    @property
    def portion_frames(self) -> int:
        """Frames of the portion that is ready."""

    def take(self) -> tuple[np.ndarray, bool]:
        """The next portion, and whether its sound is heard."""


class GenerationRequest(Request[FrameInbox]):
    def __init__(self, ticket: StageRequest, inbox: FrameInbox) -> None:
        super().__init__(ticket, inbox, text=None)
        self.num_frames = 0
        # When its listener has heard all that was decoded, by the scheduler's clock.
        self.dry_s = 0.0

    def hear(self, num_frames: int, now_s: float) -> None:
        """Frames were decoded: a player that has stood still goes on from now."""
        begins_s = max(self.dry_s, now_s) if self.num_frames else now_s
        self.dry_s = begins_s + num_frames * FRAME_S
        self.num_frames += num_frames


class GenerationScheduler(TableScheduler[GenerationRequest]):
    """At most `max_num_seqs` requests per call, and `max_frames` with padding.

    One portion alone may have more.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        open_inbox: Callable[[StageRequest], FrameInbox],
        max_frames: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._max_frames = max_frames
        self._max_num_seqs = max_num_seqs
        self._open_inbox = open_inbox
        self._clock = clock

    def schedule(self) -> GenerationBatch | None:
        admitted = []
        for request in self._table.with_status(RequestStatus.WAITING):
            request.dry_s = self._clock() + FIRST_SOUND_S
            admitted.append(self._admit(request, NOWHERE))
        ready = sorted(
            self._table.with_status(RequestStatus.RUNNING), key=lambda request: request.dry_s
        )
        items = [
            ScheduledFrames(request.request_id, NOWHERE, *request.inbox.take())
            for request in self._call_of(ready)
        ]
        return GenerationBatch(tuple(admitted), tuple(items)) if items else None

    def _call_of(self, ready: list[GenerationRequest]) -> list[GenerationRequest]:
        """Who goes into the next call, of those that are ready in the order of their need."""
        chosen: list[GenerationRequest] = []
        longest = shortest = 0
        for request in ready:
            portion = request.inbox.portion_frames
            if chosen:
                if len(chosen) == self._max_num_seqs:
                    break
                wide, narrow = max(longest, portion), min(shortest, portion)
                padded = (len(chosen) + 1) * wide
                if wide > LIKE_LENGTH * narrow or padded > (self._max_frames or padded):
                    continue
            chosen.append(request)
            longest = max(longest, portion)
            shortest = min(shortest, portion) if shortest else portion
        # A vocoder's kernels are made for each number of rows: powers of two are few.
        return chosen[: 1 << len(chosen).bit_length() - 1] if chosen else []

    def update(
        self, batch: GenerationBatch, token_ids: list[int], step_s: float
    ) -> list[StepResult]:
        results: list[StepResult] = []
        now_s = self._clock()
        for index, item in enumerate(batch.items):
            request = self._table.find(item.request_id)
            if request is None:
                # Aborted while its step ran.
                continue
            request.busy_s += step_s
            reason: FinishReason | None = "stop" if request.inbox.is_done else None
            if item.heard:
                request.hear(len(item.frames), now_s)
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

    @property
    def has_prompts(self) -> bool:
        return False

    def _open(self, ticket: StageRequest) -> GenerationRequest:
        return GenerationRequest(ticket, self._open_inbox(ticket))

    def _can_run(self, request: GenerationRequest) -> bool:
        return request.inbox.is_ready

    def _is_void(self, request: GenerationRequest) -> bool:
        return request.inbox.is_done

    def _num_units(self, request: GenerationRequest) -> int:
        return request.num_frames
