"""The code predictor's part of a frame, recorded and replayed: a thousand small steps as one call.

A record stands for a way of drawing (how many candidates, which limits); everything else it is
given as tensors. Making one takes a third of a second. The first frame of all waits for that, which
is the warm-up's and drawn as deployed; from then on frames of a new kind run step by step, and an
engine with nothing to do makes their record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engine.sampler import DrawPlan, Noise, PlanShape
from stretto.models.code_predictor import CodePredictor
from stretto.models.recording import Frame, Recorder, Run

# More are not kept: a server that meets more ways of drawing runs the rest step by step.
MOST_RECORDS = 16


@dataclass(frozen=True)
class _Example:
    """A frame to record by: how its rows draw, and one that was asked for."""

    plan: DrawPlan
    hidden: Tensor
    first: Tensor
    noise: Noise


class RecordedFrames:
    """Frames of a code predictor; with `record` None all step by step."""

    def __init__(self, predictor: CodePredictor, record: Recorder | None) -> None:
        self._predictor = predictor
        self._record = record
        self._records: dict[PlanShape, Run] = {}
        self._wanted: dict[PlanShape, _Example] = {}

    @property
    def num_records(self) -> int:
        return len(self._records)

    def generate(self, hidden: Tensor, first: Tensor, plan: DrawPlan, noise: Noise) -> Frame:
        """One frame of the rows that `plan` is for.

        `hidden` is the Talker's normed output, `first` the embedding of code 0, [rows, H] each.
        """
        if plan.shape not in self._records:
            self._miss(_Example(plan, hidden, first, noise))
        record = self._records.get(plan.shape)
        if record is None:
            return self._step_by_step(hidden, first, plan, noise)
        return record(hidden, first, *plan.tensors(), *_present(noise))

    def prepare(self) -> bool:
        """Makes one of the records that were missed; False when there is none."""
        if not self._wanted:
            return False
        self._make(self._wanted.pop(next(iter(self._wanted))))
        return True

    def _miss(self, example: _Example) -> None:
        if self._record is None:
            return
        if not self._records and not self._wanted:
            self._make(example)
        elif len(self._records) + len(self._wanted) < MOST_RECORDS:
            self._wanted.setdefault(example.plan.shape, example)

    @torch.inference_mode()
    def _make(self, example: _Example) -> None:
        assert self._record is not None
        own = example.plan.tensors()

        def run(hidden: Tensor, first: Tensor, *rest: Tensor) -> Frame:
            plan = example.plan.with_tensors(rest[: len(own)])
            given = iter(rest[len(own) :])
            noise = [None if part is None else next(given) for part in example.noise]
            return self._step_by_step(hidden, first, plan, noise)

        inputs = [example.hidden, example.first, *own, *_present(example.noise)]
        self._records[example.plan.shape] = self._record(run, inputs)

    def _step_by_step(self, hidden: Tensor, first: Tensor, plan: DrawPlan, noise: Noise) -> Frame:
        return self._predictor.generate(
            hidden, first, lambda logits, step: plan.pick(logits, noise, step)
        )


def _present(noise: Noise) -> list[Tensor]:
    return [part for part in noise if part is not None]
