"""What the training runs share: one cosine, two optimisers, a run that resumes.

Matrices inside the layers are trained with Muon, embeddings, heads and vectors with AdamW.
The schedule is a function of the step number alone: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from training.parrot.workspace import load, save

_STEPS_A_LINE = 50
_STEPS_A_SAVE = 200


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal: every direction of a matrix learns equally fast.

    Takes matrices [rows, columns] and stacks of them [n, rows, columns]; those of one shape are
    orthogonalised together. With `kernels` three dimensions are a convolution's instead, one matrix
    [channels, others x taps]. At the same rate the step is as large as AdamW's, times `scale`.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        *,
        scale: float = 2.0,
        momentum: float = 0.95,
        weight_decay: float = 0.03,
        kernels: bool = False,
    ) -> None:
        super().__init__(list(matrices), {"lr": 0.0, "scale": scale})
        self._kernels = kernels
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
            shape = looking_ahead.flatten(1).shape if self._kernels else matrix.shape[-2:]
            by_shape[shape].append((matrix, looking_ahead))
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


def all_but(weights: Iterable[Tensor], taken: Iterable[Tensor]) -> list[Tensor]:
    """Those of `weights` that are not among the `taken`."""
    identities = {id(weight) for weight in taken}
    return [weight for weight in weights if id(weight) not in identities]


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


class TrainingRun:
    """A model and its optimisers, step by step; saved now and then, and begun where it was left.

    A state that was left under another `name` gives its model and nothing else.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        cosine: Cosine,
        *,
        stop_at: int | None = None,
        max_norm: float = 1.0,
    ) -> None:
        self.step = 0
        self._path = path
        self._name = name
        self._model = model
        self._optimizers = optimizers
        self._cosine = cosine
        self._stop_at = cosine.steps if stop_at is None else stop_at
        self._max_norm = max_norm
        self._means = RunningMeans()
        if path.exists():
            state = load(path)
            model.load_state_dict(state["model"])
            if state["run"] == name:
                for key, optimizer in optimizers.items():
                    optimizer.load_state_dict(state[key])
                self.step = state["step"]
        self._lap_began = self.step, time.monotonic()
        print(f"{name}: from step {self.step} to {self._stop_at}", flush=True)

    @property
    def is_done(self) -> bool:
        return self.step >= self._stop_at

    def finish_step(self, report: Mapping[str, float]) -> bool:
        """One step of all optimisers by the gradients that are there; True when it was saved."""
        rate = self._cosine.at(self.step)
        groups = [group for each in self._optimizers.values() for group in each.param_groups]
        norm = nn.utils.clip_grad_norm_(
            [weight for group in groups for weight in group["params"]], self._max_norm
        )
        for group in groups:
            # A group's own scale, where it has one.
            group["lr"] = rate * group.get("scale", 1.0)
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._means.add({**report, "norm": float(norm)})
        if self.step % _STEPS_A_LINE == 0:
            print(f"{self.step}: {self._means}, {self._lap():.3f} s a step", flush=True)
        if self.step % _STEPS_A_SAVE and not self.is_done:
            return False
        states = {key: optimizer.state_dict() for key, optimizer in self._optimizers.items()}
        save(self._path, run=self._name, model=self._model.state_dict(), step=self.step, **states)
        return True

    def _lap(self) -> float:
        """Seconds a step since the last time it was asked."""
        (step, at), now = self._lap_began, time.monotonic()
        self._lap_began = self.step, now
        return (now - at) / max(1, self.step - step)
