"""Runs a step of a generation stage: everybody's next frames through the vocoder, in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    `prepared` are the calls to make ahead, as (rows, frames).
    """

    def __init__(self, model: Code2Wav, prepared: Sequence[tuple[int, int]] = ()) -> None:
        self._model = model
        self._prepared = prepared
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
    def prepare(self) -> Iterator[None]:
        """Calls with silence: kernels are made for each shape, at its first use (docs/log.md,
        "Kernels that are made at their first use").
        """
        for rows, frames in self._prepared:
            codes = torch.zeros(
                frames, self._model.config.num_codebooks, dtype=torch.int64,
                device=self._model.device,
            )  # fmt: skip
            self._model.feed([codes] * rows, [self._model.open() for _ in range(rows)])
            yield

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)
