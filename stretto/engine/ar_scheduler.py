"""Which positions run next in an autoregressive stage.

Every running request with its next position covered gets one decode row; prompts run in cells of
`prefill_chunk_tokens` on a fixed grid, at most one cell's worth of prompt rows per step:

    prompt of 1100     [0 .. 511][512 .. 1023][1024 .. 1099]      whatever arrived when

A cell runs when its last position is covered, so a prompt that streams in is cut exactly as one
that came at once, and gives the same bits. A request whose inbox covers no further position waits
in WAITING_FOR_CHUNK and holds no place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from stretto.engine.block_manager import BlockManager
from stretto.engine.prefix_cache import PrefixCache
from stretto.engine.scheduler import (
    Admission,
    ARBatch,
    ScheduledRows,
    SchedulerLoad,
    StepResult,
    TableScheduler,
)
from stretto.request import FinishReason, Inbox, Place, Request, RequestStatus, StageRequest
from stretto.text import TextStream

# Longer circles than so many ids are not looked for.
MAX_PERIOD = 8


class ARInbox(Inbox, Protocol):
    """What an autoregressive stage asks an inbox."""

    prompt_length: int | None

    @property
    def positions_ready(self) -> int:
        """Positions whose input is there, from 0 on."""

    @property
    def is_void(self) -> bool:
        """Upstream has ended and left nothing to run."""


class ARRequest(Request[ARInbox]):
    def __init__(self, ticket: StageRequest, inbox: ARInbox, text: TextStream | None) -> None:
        super().__init__(ticket, inbox, text)
        # Cached prompt positions that the bridge has yet to be told of.
        self.num_unreported = 0
        # For each period up to MAX_PERIOD, how many ids in a row were those one period before.
        self._repeated = [0] * MAX_PERIOD

    def take_unreported(self) -> int:
        count, self.num_unreported = self.num_unreported, 0
        return count

    def count_repeats(self) -> None:
        """Looks at the last id; once for each, where circles are looked for."""
        *before, last = self.output_ids[-MAX_PERIOD - 1 :]
        for index, count in enumerate(self._repeated):
            again = len(before) > index and before[-index - 1] == last
            self._repeated[index] = count + 1 if again else 0

    @property
    def num_repeated(self) -> int:
        """For how many ids it has been going round in a circle."""
        return max(self._repeated)

    @property
    def is_in_prompt(self) -> bool:
        prompt = self.inbox.prompt_length
        return prompt is None or self.num_computed_tokens < prompt

    def next_stop(self, cell: int) -> int | None:
        """Where the next rows of this request end; None while its input does not reach that far."""
        inbox, start = self.inbox, self.num_computed_tokens
        prompt = inbox.prompt_length
        if self.is_in_prompt:
            end_of_cell = (start // cell + 1) * cell
            stop = end_of_cell if prompt is None else min(end_of_cell, prompt)
        else:
            stop = start + 1
        return stop if stop <= inbox.positions_ready else None


class ARScheduler(TableScheduler[ARRequest]):
    def __init__(
        self,
        *,
        max_num_seqs: int,
        prefill_chunk_tokens: int,
        blocks: BlockManager,
        max_repeated: int | None = None,
        prefix_cache: PrefixCache | None = None,
        open_inbox: Callable[[StageRequest], ARInbox],
        open_text: Callable[[StageRequest], TextStream] | None,
    ) -> None:
        super().__init__()
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._cell = prefill_chunk_tokens
        self._blocks = blocks
        self._max_repeated = max_repeated
        self._prefix_cache = prefix_cache
        # Read by other threads, which must not walk the table.
        self._num_held_blocks = 0
        self._open_inbox = open_inbox
        self._open_text = open_text

    def schedule(self) -> ARBatch | None:
        items: list[ScheduledRows] = []
        prompt_budget = self._cell
        for request in self._table.with_status(RequestStatus.RUNNING):
            prompt_budget = self._take(request, items, prompt_budget)
        admitted: list[Admission] = []
        for request in self._table.with_status(RequestStatus.WAITING):
            run = self._reserve(request.ticket.max_positions) if self._free_rows else None
            if run is None:
                # Strictly in order of arrival: a large request is not overtaken for ever.
                break
            first, count = run
            self._num_held_blocks += count
            admission = self._admit(request, Place(self._free_rows.pop(), first, count))
            admitted.append(self._behind_prefix(request, admission))
            prompt_budget = self._take(request, items, prompt_budget)
        return ARBatch(tuple(admitted), tuple(items)) if items or admitted else None

    def update(self, batch: ARBatch, token_ids: list[int], step_s: float) -> list[StepResult]:
        results: list[StepResult] = []
        num_drawn = 0
        for item in batch.items:
            index = num_drawn if item.draws else None
            num_drawn += item.draws
            request = self._table.find(item.request_id)
            if request is None:
                # Aborted while its step ran.
                continue
            request.num_computed_tokens = item.start + item.num_rows
            request.busy_s += step_s
            token_id = None if index is None else token_ids[index]
            text, reason = "", None
            if token_id is not None:
                request.output_ids.append(token_id)
                if self._max_repeated is not None:
                    request.count_repeats()
                text, reason = self._end_of(request, token_id)
            self._settle(request, reason)
            results.append(
                self._result(
                    request,
                    finish_reason=reason,
                    output_index=index,
                    num_prompt_rows=item.num_prompt_rows + request.take_unreported(),
                    token_id=token_id,
                    text=text,
                )
            )
        return results

    def _open(self, ticket: StageRequest) -> ARRequest:
        text = self._open_text(ticket) if self._open_text is not None else None
        return ARRequest(ticket, self._open_inbox(ticket), text)

    def _can_run(self, request: ARRequest) -> bool:
        return request.next_stop(self._cell) is not None

    def _is_void(self, request: ARRequest) -> bool:
        return request.inbox.is_void

    def _num_units(self, request: ARRequest) -> int:
        return len(request.output_ids)

    @property
    def has_prompts(self) -> bool:
        return self._table.count(RequestStatus.WAITING) > 0 or any(
            request.is_in_prompt for request in self._table.with_status(RequestStatus.RUNNING)
        )

    def load(self) -> SchedulerLoad:
        load, cache = super().load(), self._prefix_cache
        return msgspec.structs.replace(
            load,
            kv_usage=self._num_held_blocks / self._blocks.num_blocks,
            prefix_queried_tokens=0 if cache is None else cache.num_queried_tokens,
            prefix_hit_tokens=0 if cache is None else cache.num_hit_tokens,
        )

    def _remove(self, request: ARRequest) -> None:
        super()._remove(request)
        if request.place is None:
            return
        self._free_rows.append(request.place.row)
        first, count = request.place.first_block, request.place.num_blocks
        self._num_held_blocks -= count
        if self._prefix_cache is None:
            self._blocks.release(first, count)
            return
        token_ids = (*request.ticket.prompt_token_ids, *request.output_ids)
        computed = token_ids[: request.num_computed_tokens]
        self._prefix_cache.keep(computed, first_block=first, num_blocks=count)

    def _reserve(self, num_positions: int) -> tuple[int, int] | None:
        """Blocks for a request, out of the prefix cache's if need be."""
        run = self._blocks.reserve(num_positions)
        while run is None and self._prefix_cache is not None and self._prefix_cache.evict():
            run = self._blocks.reserve(num_positions)
        return run

    def _behind_prefix(self, request: ARRequest, admission: Admission) -> Admission:
        """The admission with what the prefix cache has of the prompt; its blocks are reserved."""
        if self._prefix_cache is None:
            return admission
        first, count = self._prefix_cache.match(request.ticket.prompt_token_ids)
        cached = count * self._blocks.block_size
        request.num_computed_tokens = request.num_cached_tokens = request.num_unreported = cached
        return msgspec.structs.replace(admission, copied_from=first, num_copied_blocks=count)

    def _take(self, request: ARRequest, items: list[ScheduledRows], prompt_budget: int) -> int:
        """Puts the request's next rows into the batch if they may run; the budget that is left."""
        stop = request.next_stop(self._cell)
        if stop is None:
            self._table.move(request, RequestStatus.WAITING_FOR_CHUNK)
            return prompt_budget
        start, prompt = request.num_computed_tokens, request.inbox.prompt_length
        in_prompt = request.is_in_prompt
        if in_prompt and stop - start > prompt_budget:
            return prompt_budget
        assert request.place is not None
        items.append(
            ScheduledRows(
                request_id=request.request_id,
                place=request.place,
                start=start,
                num_rows=stop - start,
                num_prompt_rows=stop - start if in_prompt else 0,
                draws=prompt is not None and stop >= prompt,
                inbox=request.inbox,
            )
        )
        return prompt_budget - (stop - start) if in_prompt else prompt_budget

    def _end_of(self, request: ARRequest, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that a token adds, and whether the request ends with it."""
        sampling, text = request.ticket.sampling, ""
        is_end_token = token_id in sampling.stop_token_ids
        if request.text is not None and not is_end_token:
            text = request.text.push(token_id)
        reason: FinishReason | None = None
        if is_end_token or (request.text is not None and request.text.stopped):
            reason = "stop"
        elif len(request.output_ids) == sampling.max_tokens or self._is_circling(request):
            reason = "length"
        if reason is not None and request.text is not None:
            text += request.text.finish()
        return text, reason

    def _is_circling(self, request: ARRequest) -> bool:
        return self._max_repeated is not None and request.num_repeated >= self._max_repeated
