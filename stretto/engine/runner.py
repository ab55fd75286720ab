"""What the engine asks of a runner, and what a step gives back.

pending = runner.execute(batch)     launched
pending.sampled()                   ids, as soon as they are there: the next step needs them
pending.materialize()               everything else, for the materializer, at its leisure
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np


class Materialized(msgspec.Struct, frozen=True):
    """Host copies of a step's outputs, by output index. One of the two, or neither for text."""

    # A Talker's codec frames, int16 [num_codebooks]; None for the step that ended it.
    frames: tuple[np.ndarray | None, ...] = ()
    # A vocoder's samples, float32 [n].
    samples: tuple[np.ndarray, ...] = ()


class PendingOutput(Protocol):
    def sampled(self) -> list[int]:
        """Token ids by output index; waits for their copy only. Engine thread."""

    def materialize(self) -> Materialized:
        """Waits for the copies of the payload. Materializer thread."""


class Runner(Protocol):
    def execute(self, batch: Any) -> PendingOutput:
        """Runs a batch of this stage's scheduler. Engine thread."""

    def prepare(self) -> bool:
        """A piece of work ahead, for an engine with nothing to do; False when there is none.

        Engine thread.
        """

    def release(self, request_id: str) -> None:
        """The request is gone; frees what was kept for it."""
