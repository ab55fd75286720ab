"""What the training runs share: one cosine, two optimisers, checkpoints that resume.

Matrices inside the layers are trained with Muon, embeddings, heads and vectors with AdamW.
The schedule is a function of the step number alone: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal: every direction of a matrix learns equally fast.

    Takes matrices [rows, columns] and stacks of them [n, rows, columns]; those of one shape are
    orthogonalised together. At the same rate the step is as large as AdamW's, times `scale`.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        *,
        scale: float = 2.0,
        momentum: float = 0.95,
        weight_decay: float = 0.03,
    ) -> None:
        super().__init__(list(matrices), {"lr": 0.0, "scale": scale})
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        by_shape: defaultdict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        (group,) = self.param_groups
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            state["momentum"].lerp_(matrix.grad, 1 - self._momentum)
            looking_ahead = matrix.grad.lerp(state["momentum"], self._momentum)
            by_shape[matrix.shape[-2:]].append((matrix, looking_ahead))
        for shape, members in by_shape.items():
            stacked = torch.cat([update.reshape(-1, *shape) for _, update in members])
            steps = orthogonal(stacked) * (0.2 * max(shape) ** 0.5)
            start = 0
            for matrix, update in members:
                count = update.numel() // (shape[0] * shape[1])
                matrix.mul_(1 - group["lr"] * self._weight_decay)
                step = steps[start : start + count].reshape(matrix.shape)
                matrix.sub_(step, alpha=group["lr"])
                start += count


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """About the nearest orthogonal matrices to [n, rows, columns], by Newton and Schulz."""
    # These coefficients pull all singular values towards 1 fast rather than exactly.
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.to(torch.bfloat16)
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


@dataclass(frozen=True)
class Cosine:
    """Warm-up, then half a cosine from `peak` down to `floor` times it."""

    peak: float
    steps: int
    warmup_steps: int = 150
    floor: float = 0.02

    def at(self, step: int) -> float:
        done = min(1.0, step / self.steps)
        warmth = min(1.0, (step + 1) / self.warmup_steps)
        return (
            self.peak
            * warmth
            * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))
        )


@dataclass
class RunningMeans:
    """Exponential means of what a run reports, over about fifty steps."""

    means: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            before = self.means.get(name, value)
            self.means[name] = 0.98 * before + 0.02 * value

    def __str__(self) -> str:
        return ", ".join(f"{name} {mean:.3f}" for name, mean in self.means.items())


class Pace:
    """Seconds a step since the last time it was asked."""

    def __init__(self, step: int) -> None:
        self._step, self._at = step, time.monotonic()

    def lap(self, step: int) -> float:
        now = time.monotonic()
        seconds = (now - self._at) / max(1, step - self._step)
        self._step, self._at = step, now
        return seconds


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Each group's rate is the common one times the group's own `scale`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)


def clip_and_step(
    optimizers: Iterable[torch.optim.Optimizer], parameters: list[Tensor], max_norm: float
) -> float:
    """One step of all optimisers; the gradient's norm before it was clipped."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(norm)
