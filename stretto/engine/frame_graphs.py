"""The code predictor's part of a frame as CUDA graphs: one launch in place of a thousand.

    hidden, embedding of code 0 ─┐
    noise of all draws ──────────┼─ copied ─> tensors of the graph ─ replay ─> codes, their sum
    parameters of the draws ─────┘

A graph stands for a number of rows and a way of drawing (how many candidates, which limits); what
differs between frames and batches goes into tensors that it reads. Graphs are recorded when they
are first needed, and share their memory: what one gave is used up before the next one runs.

Recording is for CUDA; the bookkeeping around it is not, and `record` is an argument for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.engine.sampler import DrawPlan, Noise
from stretto.models.code_predictor import CodePredictor

Frame = tuple[Tensor, Tensor]
Run = Callable[[], Frame]


def generate_frame(
    predictor: CodePredictor, hidden: Tensor, first: Tensor, plan: DrawPlan, noise: Noise
) -> Frame:
    """Residual codes [rows, num_codebooks - 1] and the sum of all code embeddings [rows, H]."""
    return predictor.generate(hidden, first, lambda logits, step: plan.pick(logits, noise, step))


class CudaRecorder:
    """Records what a function does on the current device; calling the result does it again."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Libraries choose kernels and take work space in their first calls.
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for copies meanwhile: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()

        def replay() -> Frame:
            graph.replay()
            return outputs

        return replay


@dataclass(frozen=True)
class _Recorded:
    inputs: list[Tensor]
    replay: Run


class FrameGraphs:
    def __init__(self, predictor: CodePredictor, record: Callable[[Run], Run]) -> None:
        self._predictor = predictor
        self._record = record
        self._recorded: dict[Any, _Recorded] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def generate(self, hidden: Tensor, first: Tensor, plan: DrawPlan, noise: Noise) -> Frame:
        """As `generate_frame`; the result holds until the next call."""
        inputs = [hidden, first, *plan.tensors(), *(part for part in noise if part is not None)]
        recorded = self._recorded.get(plan.shape)
        if recorded is None:
            recorded = self._recorded[plan.shape] = self._new(hidden, first, plan, noise)
        for own, given in zip(recorded.inputs, inputs, strict=True):
            own.copy_(given)
        return recorded.replay()

    def _new(self, hidden: Tensor, first: Tensor, plan: DrawPlan, noise: Noise) -> _Recorded:
        own_hidden, own_first, own_plan = hidden.clone(), first.clone(), plan.copy()
        own_noise = [None if part is None else part.clone() for part in noise]
        replay = self._record(
            lambda: generate_frame(self._predictor, own_hidden, own_first, own_plan, own_noise)
        )
        parts = [part for part in own_noise if part is not None]
        return _Recorded([own_hidden, own_first, *own_plan.tensors(), *parts], replay)
