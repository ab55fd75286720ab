"""From logits to ids: penalties, limits on what may come, then a draw.

Every request draws from a generator of its own, and always the same number of values per token
whatever stands beside it in the batch: so one seed gives one answer, alone or among many. A draw is
`argmax(p / e)` with e exponentially distributed, which picks index i with probability p_i and needs
no wait for the device.

The order (penalties, suppression, temperature, top-k, top-p, min-p) is that of transformers'
logits processors. What a batch's parameters mean is worked out once per batch, not per step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stretto.request import SamplingParams

NEVER = float("-inf")


class Draw:
    """How one row picks: its parameters and its generator, None for greedy rows."""

    def __init__(self, params: SamplingParams, generator: torch.Generator | None) -> None:
        self.params = params
        self.generator = generator

    def num_candidates(self, vocab_size: int) -> int:
        top_k = self.params.top_k
        return min(top_k, vocab_size) if top_k else vocab_size


def new_generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# What the draws of a batch need: [steps, rows, width] for each group of rows, None for greedy ones.
Noise = list[Tensor | None]
# What plans have in common that do the same with their tensors, for any number of rows.
PlanShape = tuple[tuple[int, ...], ...]


class DrawPlan:
    """How the rows of one batch draw from a vocabulary, as tensors.

    Rows with equally many candidates draw together, so that who is a candidate (of equal logits)
    does not depend on the batch. Mostly there is one such group.
    """

    def __init__(self, draws: Sequence[Draw], vocab_size: int, device: torch.device) -> None:
        by_width: dict[int, list[int]] = {}
        for row, own in enumerate(draws):
            width = 0 if own.params.greedy else own.num_candidates(vocab_size)
            by_width.setdefault(width, []).append(row)
        self._groups = [
            _Group([draws[row] for row in rows], width, device) for width, rows in by_width.items()
        ]
        self._rows = [torch.tensor(rows, device=device) for rows in by_width.values()]
        self.shape: PlanShape = tuple(group.shape for group in self._groups)

    def tensors(self) -> list[Tensor]:
        """What `pick` reads beside logits and noise."""
        return [*self._rows, *(part for group in self._groups for part in group.tensors())]

    def with_tensors(self, tensors: Sequence[Tensor]) -> DrawPlan:
        """This plan with others in place of its `tensors()`."""
        plan = copy.copy(self)
        given = iter(tensors)
        plan._rows = [next(given) for _ in self._rows]
        plan._groups = [group.with_tensors(given) for group in self._groups]
        return plan

    def noise(self, steps: int) -> Noise:
        """What `steps` draws of every row need; for `pick`."""
        return [group.noise(steps) for group in self._groups]

    def pick(self, logits: Tensor, noise: Noise, step: int) -> Tensor:
        """Ids [rows] of draw `step` from logits [rows, V]."""
        if len(self._groups) == 1:
            return self._groups[0].pick(logits, noise[0], step)
        ids = torch.empty_like(logits[:, 0], dtype=torch.int64)
        for group, rows, own in zip(self._groups, self._rows, noise, strict=True):
            ids[rows] = group.pick(logits[rows], own, step)
        return ids


class _Group:
    """Rows with the same number of candidates; 0 stands for greedy rows."""

    def __init__(self, draws: Sequence[Draw], width: int, device: torch.device) -> None:
        params = [own.params for own in draws]
        self._draws = draws
        self._width = width
        self._device = device
        temperatures = [own.temperature for own in params]
        self._temperature = _column_unless(temperatures, 1.0, device)
        self._top_p = _column_unless([own.top_p for own in params], 1.0, device)
        self._min_p = _column_unless([own.min_p for own in params], 0.0, device)

    @property
    def _limits(self) -> tuple[Tensor | None, ...]:
        return self._temperature, self._top_p, self._min_p

    @property
    def shape(self) -> tuple[int, ...]:
        return self._width, *(limit is not None for limit in self._limits)

    def tensors(self) -> list[Tensor]:
        return [limit for limit in self._limits if limit is not None]

    def with_tensors(self, given: Iterator[Tensor]) -> _Group:
        group = copy.copy(self)
        group._temperature, group._top_p, group._min_p = (
            None if limit is None else next(given) for limit in self._limits
        )
        return group

    def noise(self, steps: int) -> Tensor | None:
        """[steps, rows, width], each row's from its own generator; None for greedy rows."""
        if not self._width:
            return None
        shape = (steps, self._width)
        rows = [
            torch.empty(shape, device=self._device).exponential_(generator=own.generator)
            for own in self._draws
        ]
        return rows[0][:, None] if len(rows) == 1 else torch.stack(rows, 1)

    def pick(self, logits: Tensor, noise: Tensor | None, step: int) -> Tensor:
        if noise is None:
            return logits.argmax(-1)
        scores, ids = logits.topk(self._width, -1)
        scores = scores.to(torch.float32)
        if self._temperature is not None:
            scores = scores / self._temperature
        probs = scores.softmax(-1)
        weights = probs / noise[step]
        if self._top_p is not None:
            # A candidate stays while those before it do not make up top_p; the best always does.
            before = probs.cumsum(-1) - probs
            before[:, 0] = NEVER
            weights.masked_fill_(before >= self._top_p, 0.0)
        if self._min_p is not None:
            weights.masked_fill_(probs < self._min_p * probs[:, :1], 0.0)
        return ids.gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1)


class _BatchPlan:
    """What a sampler needs to know of one batch of rows."""

    def __init__(
        self, rows: Sequence[int], draws: list[Draw], vocab_size: int, device: torch.device
    ):
        params = [own.params for own in draws]
        self.rows = torch.tensor(rows, device=device)
        self.draw = DrawPlan(draws, vocab_size, device)
        self.repetition = _column_unless([own.repetition_penalty for own in params], 1.0, device)
        self.presence = _column_unless([own.presence_penalty for own in params], 0.0, device)
        self.frequency = _column_unless([own.frequency_penalty for own in params], 0.0, device)
        self.with_minimum = [
            (index, row) for index, row in enumerate(rows) if params[index].min_tokens
        ]


class Sampler:
    """Draws tokens for rows of a batch table of `max_rows`, over `vocab_size` ids.

    `suppressed` [V] marks ids that may never come.
    """

    def __init__(
        self, *, max_rows: int, vocab_size: int, device: torch.device, suppressed: Tensor | None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._suppressed = suppressed
        self._draws: list[Draw | None] = [None] * max_rows
        self._stop_ids: list[Tensor | None] = [None] * max_rows
        self._num_drawn = [0] * max_rows
        # Ids seen (prompt and output), and how often each was output; made when first needed.
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        # Of the batch last drawn for; batches seldom change from step to step.
        self._plan: tuple[list[int], _BatchPlan] | None = None

    def admit(self, row: int, params: SamplingParams, *, seed: int, prompt: Sequence[int]) -> Draw:
        """Makes `row` a new request's; `prompt` ids count for its repetition penalty."""
        generator = None if params.greedy else new_generator(seed, self._device)
        self._draws[row] = own = Draw(params, generator)
        self._plan = None
        self._num_drawn[row] = 0
        # A stop id that the vocabulary has not can never be drawn.
        ids = [token_id for token_id in params.stop_token_ids if token_id < self._vocab_size]
        self._stop_ids[row] = torch.tensor(ids, device=self._device) if ids else None
        if params.repetition_penalty != 1.0:
            self._seen = self._table(self._seen, torch.bool)
            self._seen[row] = False
            if prompt:
                self._seen[row, torch.tensor(prompt, device=self._device)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = self._table(self._counts, torch.float32)
            self._counts[row] = 0
        return own

    def sample(self, logits: Tensor, rows: list[int]) -> Tensor:
        """One id per row, int64 [n], from float32 logits [n, V], which may be changed."""
        plan = self._plan_of(rows)
        if plan.repetition is not None and self._seen is not None:
            penalty = plan.repetition
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self._seen[plan.rows], penalized, logits)
        if self._counts is not None and (plan.presence is not None or plan.frequency is not None):
            counts = self._counts[plan.rows]
            if plan.frequency is not None:
                logits = logits - counts * plan.frequency
            if plan.presence is not None:
                logits = logits - (counts > 0) * plan.presence
        if self._suppressed is not None:
            logits = logits.masked_fill(self._suppressed, NEVER)
        for index, row in plan.with_minimum:
            stop_ids = self._stop_ids[row]
            if stop_ids is not None and self._num_drawn[row] < self._draw_of(row).params.min_tokens:
                logits[index, stop_ids] = NEVER
        ids = plan.draw.pick(logits, plan.draw.noise(1), 0)
        for row in rows:
            self._num_drawn[row] += 1
        if plan.repetition is not None and self._seen is not None:
            self._seen[plan.rows, ids] = True
        if self._counts is not None and (plan.presence is not None or plan.frequency is not None):
            self._counts[plan.rows, ids] += 1
        return ids

    def _plan_of(self, rows: list[int]) -> _BatchPlan:
        if self._plan is None or self._plan[0] != rows:
            draws = [self._draw_of(row) for row in rows]
            self._plan = rows, _BatchPlan(rows, draws, self._vocab_size, self._device)
        return self._plan[1]

    def _draw_of(self, row: int) -> Draw:
        own = self._draws[row]
        assert own is not None, f"row {row} was never admitted"
        return own

    def _table(self, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        if table is not None:
            return table
        shape = (len(self._draws), self._vocab_size)
        return torch.zeros(shape, dtype=dtype, device=self._device)


def _column_unless(values: list[float], neutral: float, device: torch.device) -> Tensor | None:
    """The values as a column [n, 1]; None where all are neutral and nothing need be done."""
    if all(value == neutral for value in values):
        return None
    return torch.tensor(values, device=device)[:, None]
