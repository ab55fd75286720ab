"""From logits to ids: penalties, limits on what may come, then a draw.

Every request draws from a generator of its own, and always the same number of values per token
whatever stands beside it in the batch: so one seed gives one answer, alone or among many. A draw is
`argmax(p / e)` with e exponentially distributed, which picks index i with probability p_i and needs
no wait for the device.

The order (penalties, suppression, temperature, top-k, top-p, min-p) is that of transformers'
logits processors. All state is per row of the batch table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.request import SamplingParams

NEVER = float("-inf")


class Draw:
    """How one row picks: its parameters and its generator."""

    def __init__(self, params: SamplingParams, generator: torch.Generator | None) -> None:
        self.params = params
        # None for greedy rows.
        self.generator = generator

    def num_candidates(self, vocab_size: int) -> int:
        top_k = self.params.top_k
        return min(top_k, vocab_size) if top_k else vocab_size

    def noise(self, rows: int, vocab_size: int, device: torch.device) -> Tensor:
        """Exponential noise [rows, candidates] for `rows` draws."""
        noise = torch.empty(rows, self.num_candidates(vocab_size), device=device)
        return noise.exponential_(generator=self.generator)


def new_generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def draw(logits: Tensor, draws: Sequence[Draw], noises: Sequence[Tensor | None]) -> Tensor:
    """Ids [n] from float32 logits [n, V]; `noises[i]` [candidates] for the rows that sample."""
    greedy = logits.argmax(-1)
    if all(d.params.greedy for d in draws):
        return greedy
    vocab_size, device = logits.shape[-1], logits.device
    sampling = [not d.params.greedy for d in draws]
    widths = [
        d.num_candidates(vocab_size) if s else 1 for d, s in zip(draws, sampling, strict=True)
    ]
    temperature = _column([d.params.temperature or 1.0 for d in draws], device)
    values, ids = (logits / temperature).topk(max(widths), -1)
    if min(widths) < max(widths):
        beyond = torch.arange(max(widths), device=device) >= _column(widths, device)
        values = values.masked_fill(beyond, NEVER)
    probs = values.softmax(-1)
    keep = probs.cumsum(-1) - probs < _column([d.params.top_p for d in draws], device)
    if any(d.params.min_p > 0 for d in draws):
        keep &= probs >= _column([d.params.min_p for d in draws], device) * probs[:, :1]
    # The best candidate always stays, whatever rounding does to a tiny top_p.
    keep[:, 0] = True
    noise = torch.ones_like(probs)
    for row, own in enumerate(noises):
        if own is not None:
            noise[row, : len(own)] = own
    best = (probs * keep / noise).argmax(-1, keepdim=True)
    picked = ids.gather(-1, best).squeeze(-1)
    return picked if all(sampling) else torch.where(_flags(sampling, device), picked, greedy)


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
        self._seen = torch.zeros(max_rows, vocab_size, dtype=torch.bool, device=device)
        self._counts: Tensor | None = None

    def admit(self, row: int, params: SamplingParams, *, seed: int, prompt: Sequence[int]) -> Draw:
        """Makes `row` a new request's; `prompt` ids count for its repetition penalty."""
        generator = None if params.greedy else new_generator(seed, self._device)
        self._draws[row] = own = Draw(params, generator)
        self._num_drawn[row] = 0
        ids = params.stop_token_ids
        self._stop_ids[row] = torch.tensor(ids, device=self._device) if ids else None
        if _penalizes_repetition(params):
            self._seen[row] = False
            if prompt:
                self._seen[row, torch.tensor(prompt, device=self._device)] = True
        if _penalizes_counts(params):
            if self._counts is None:
                self._counts = torch.zeros_like(self._seen, dtype=torch.float32)
            self._counts[row] = 0
        return own

    def sample(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """One id per row, int64 [n], from float32 logits [n, V], which are changed."""
        draws = [self._draw_of(row) for row in rows]
        where = torch.tensor(rows, device=self._device)
        repetition = [d.params for d in draws if _penalizes_repetition(d.params)]
        if repetition:
            penalty = _column([d.params.repetition_penalty for d in draws], self._device)
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self._seen[where], penalized, logits)
        counted = [d.params for d in draws if _penalizes_counts(d.params)]
        if counted and self._counts is not None:
            counts = self._counts[where]
            logits -= counts * _column([d.params.frequency_penalty for d in draws], self._device)
            presence = _column([d.params.presence_penalty for d in draws], self._device)
            logits -= (counts > 0) * presence
        if self._suppressed is not None:
            logits = logits.masked_fill(self._suppressed, NEVER)
        for index, row in enumerate(rows):
            stop_ids = self._stop_ids[row]
            if stop_ids is not None and self._num_drawn[row] < draws[index].params.min_tokens:
                logits[index, stop_ids] = NEVER
        noises = [
            None if d.params.greedy else d.noise(1, self._vocab_size, self._device)[0]
            for d in draws
        ]
        ids = draw(logits, draws, noises)
        for row in rows:
            self._num_drawn[row] += 1
        if repetition:
            self._seen[where, ids] = True
        if counted and self._counts is not None:
            self._counts[where, ids] += 1
        return ids

    def _draw_of(self, row: int) -> Draw:
        own = self._draws[row]
        assert own is not None, f"row {row} was never admitted"
        return own


def _penalizes_repetition(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0


def _penalizes_counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None]


def _flags(values: Sequence[bool], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)
