"""Runs a step of a generation stage: everybody's next frames through the vocoder, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.engine.host_copy import HostCopy
from stretto.engine.runner import Materialized
from stretto.engine.scheduler import GenerationBatch
from stretto.models.code2wav import Code2Wav, VocoderState


class GenerationPending:
    def __init__(self, samples: Sequence[Tensor]) -> None:
        self._samples = [HostCopy(part) for part in samples]

    def sampled(self) -> list[int]:
        return []

    def materialize(self) -> Materialized:
        return Materialized(samples=tuple(part.wait().numpy() for part in self._samples))


class GenerationRunner:
    """Keeps one vocoder state per request, from its first frames to its release.

    `calls` are those to make ahead, as (rows, frames).
    """

    def __init__(self, model: Code2Wav, calls: Sequence[tuple[int, int]] = ()) -> None:
        self._model = model
        self._calls = list(calls)
        self._states: dict[str, VocoderState] = {}

    @torch.inference_mode()
    def execute(self, batch: GenerationBatch) -> GenerationPending:
        for admission in batch.admitted:
            self._states[admission.ticket.request_id] = self._model.open()
        codes = [
            torch.from_numpy(item.frames).to(self._model.device, torch.int64)
            for item in batch.items
        ]
        states = [self._states[item.request_id] for item in batch.items]
        return GenerationPending(self._model.feed(codes, states))

    @torch.inference_mode()
    def prepare(self) -> bool:
        """A call with silence: kernels are made for each shape, at its first use (docs/log.md,
        "Kernels that are made at their first use").
        """
        if not self._calls:
            return False
        rows, frames = self._calls.pop(0)
        model = self._model
        shape = frames, model.config.num_codebooks
        codes = torch.zeros(shape, dtype=torch.int64, device=model.device)
        model.feed([codes] * rows, [model.open() for _ in range(rows)])
        return True

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)
