"""Recorders: a function of tensors once as Python, and from then on as one call.

    trace         on a CPU: the same kernels in the same order, with no Python between them and
                  without its lock, so that other threads run meanwhile; the same bits
    CudaGraphs    on CUDA: a graph for each shape of the inputs, one launch

What is recorded may read tensors that it is not given (weights), and must not write them: a trace
takes them for constants, and constants of equal content for one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Residual codes [rows, num_codebooks - 1] and the sum of all code embeddings [rows, H].
Frame = tuple[Tensor, Tensor]
Run = Callable[..., Frame]
Recorder = Callable[[Run, Sequence[Tensor]], Run]


def trace(run: Run, inputs: Sequence[Tensor]) -> Run:
    """Records on a CPU. Of torch's ways the one that takes no minutes of compiling."""
    with warnings.catch_warnings():
        # In every release that we allow it works, and says that it is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        traced: Run = torch.jit.trace(  # type: ignore[no-untyped-call]
            run, tuple(inputs), check_trace=False
        )
    return traced


class CudaGraphs:
    """Records on CUDA, at the first frame with so many rows.

    A result holds until the next replay of any graph.
    """

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run, inputs: Sequence[Tensor]) -> Run:
        graphs: dict[tuple[torch.Size, ...], Run] = {}

        def replay(*given: Tensor) -> Frame:
            shapes = tuple(tensor.shape for tensor in given)
            if shapes not in graphs:
                graphs[shapes] = self._graph(run, given)
            return graphs[shapes](*given)

        return replay

    def _graph(self, run: Run, inputs: Sequence[Tensor]) -> Run:
        own = [tensor.clone() for tensor in inputs]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Libraries choose kernels and take work space in their first calls.
            run(*own)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for copies meanwhile: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run(*own)

        def replay(*given: Tensor) -> Frame:
            for mine, new in zip(own, given, strict=True):
                mine.copy_(new)
            graph.replay()
            return outputs

        return replay
