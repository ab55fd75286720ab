"""The code predictor's part of a frame, recorded and replayed: a thousand small steps as one call.

A record stands for a way of drawing (how many candidates, which limits); everything else it is
given as tensors. Making one takes two seconds: it is traced, and its first calls look at what they
are given and then compile. The first frame of all waits for that, which is the warm-up's and drawn
as deployed; from then on frames of a new kind run step by step, and an engine with nothing to do
makes their record, piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engine.sampler import DrawPlan, Noise, PlanShape
from stretto.models.code_predictor import CodePredictor
from stretto.models.recording import Frame, Recorder, Run

# Calls of a new record until it is as fast as it will be.
SLOW_CALLS = 3
# More are not kept: a server that meets more ways of drawing runs the rest step by step.
MOST_RECORDS = 16


@dataclass(frozen=True)
class _Example:
    """A frame to record by: how its rows draw, and one that was asked for."""

    plan: DrawPlan
    hidden: Tensor
    first: Tensor
    noise: Noise


@dataclass
class _Draft:
    """A record whose slow calls are not all done."""

    shape: PlanShape
    run: Run
    inputs: list[Tensor]
    calls_left: int = SLOW_CALLS


class RecordedFrames:
    """Frames of a code predictor; with `record` None all step by step."""

    def __init__(self, predictor: CodePredictor, record: Recorder | None) -> None:
        self._predictor = predictor
        self._record = record
        self._records: dict[PlanShape, Run] = {}
        self._wanted: dict[PlanShape, _Example] = {}
        self._draft: _Draft | None = None

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

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Does a piece of a record that was missed; False when there is none."""
        if self._draft is not None:
            self._go_on(self._draft)
        elif self._wanted:
            shape = next(iter(self._wanted))
            self._draft = self._drafted(self._wanted[shape])
        else:
            return False
        return True

    @torch.inference_mode()
    def _miss(self, example: _Example) -> None:
        if self._record is None:
            return
        if not self._records and not self._wanted:
            draft = self._drafted(example)
            while draft.calls_left:
                self._go_on(draft)
        elif len(self._records) + len(self._wanted) < MOST_RECORDS:
            self._wanted.setdefault(example.plan.shape, example)

    def _drafted(self, example: _Example) -> _Draft:
        assert self._record is not None
        own = example.plan.tensors()

        def run(hidden: Tensor, first: Tensor, *rest: Tensor) -> Frame:
            plan = example.plan.with_tensors(rest[: len(own)])
            given = iter(rest[len(own) :])
            noise = [None if part is None else next(given) for part in example.noise]
            return self._step_by_step(hidden, first, plan, noise)

        inputs = [example.hidden, example.first, *own, *_present(example.noise)]
        return _Draft(example.plan.shape, self._record(run, inputs), inputs)

    def _go_on(self, draft: _Draft) -> None:
        """One of its slow calls; after the last one it is a record."""
        draft.run(*draft.inputs)
        draft.calls_left -= 1
        if not draft.calls_left:
            self._records[draft.shape] = draft.run
            self._wanted.pop(draft.shape, None)
            self._draft = None

    def _step_by_step(self, hidden: Tensor, first: Tensor, plan: DrawPlan, noise: Noise) -> Frame:
        return self._predictor.generate(
            hidden, first, lambda logits, step: plan.pick(logits, noise, step)
        )


def _present(noise: Noise) -> list[Tensor]:
    return [part for part in noise if part is not None]
