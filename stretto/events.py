"""What the front and the stages say to each other (small), and what a request's owner hears.

front ── Admit, Abort, Ping, Shutdown ──────────────────────────────────> stage
front <── StageReady, TextOut, AudioOut, StageFinished, StageErred, Aborted, Pong ── stage
owner <── TextDelta, AudioDelta, then exactly one of Finished, Failed ── front
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.errors import RequestFailed
from stretto.request import FinishReason, StageRequest

# ---- front to stage ----------------------------------------------------------------------------


class Admit(msgspec.Struct, frozen=True, tag=True):
    ticket: StageRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget the request; answered by `Aborted` once nothing of it is left in the stage."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Admit | Abort | Ping | Shutdown

# ---- stage to front ----------------------------------------------------------------------------


class StageReady(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and the stage takes requests."""

    load_s: float
    num_threads: int


class TextOut(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    text: str
    token_ids: tuple[int, ...]


class AudioOut(msgspec.Struct, frozen=True, tag=True):
    """`samples` float32 in -1..1; `codes` int16 [frames, codebooks] if the request wants them."""

    request_id: str
    samples: np.ndarray
    num_frames: int
    codes: np.ndarray | None


class StageFinished(msgspec.Struct, frozen=True, tag=True):
    """The stage is done with the request; nothing about it follows from this stage.

    `num_units` counts tokens in an autoregressive stage, frames in a generation stage.
    """

    request_id: str
    finish_reason: FinishReason
    num_units: int
    queue_s: float
    busy_s: float
    num_cached_tokens: int = 0


class StageErred(msgspec.Struct, frozen=True, tag=True):
    """The request failed in this stage, which goes on serving the others."""

    request_id: str
    message: str


class Aborted(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """`step_age_s` is how long the step now running has been running; 0 between steps."""

    step_age_s: float
    num_running: int
    num_waiting: int
    num_waiting_for_chunk: int
    dropped_chunks: int
    kv_usage: float = 0.0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    # Nothing is left that an idle stage does ahead of requests.
    is_prepared: bool = True


class StageDied(msgspec.Struct, frozen=True, tag=True):
    """The engine loop raised; the process ends after this message."""

    message: str


Report = StageReady | TextOut | AudioOut | StageFinished | StageErred | Aborted | Pong | StageDied

# ---- front to owner ----------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; `audio_tokens` counts codec frames, 80 ms each."""

    prompt_tokens: int
    text_tokens: int
    audio_tokens: int
    # Of the prompt's: taken from the prefix cache.
    cached_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        return self.text_tokens + self.audio_tokens


class Timings(msgspec.Struct, frozen=True):
    """Seconds since submission. `rtf` is time to the last sound over its duration (api.md 4.9)."""

    ttft_s: float | None
    ttfp_s: float | None
    e2e_s: float
    rtf: float | None


class StageWork(msgspec.Struct, frozen=True):
    """What one stage did for a request: tokens or frames, the wait for a place, its steps' time."""

    stage: str
    num_units: int
    queue_s: float
    busy_s: float
    num_cached_tokens: int = 0


class TextDelta(msgspec.Struct, frozen=True):
    text: str
    token_ids: tuple[int, ...]


class AudioDelta(msgspec.Struct, frozen=True):
    """Sound that follows on the sound before it; float32 [n] in -1..1 at `sample_rate` Hz."""

    samples: np.ndarray
    sample_rate: int
    num_frames: int
    codes: np.ndarray | None


class Finished(msgspec.Struct, frozen=True):
    """The end. A reason is `length` when a limit cut the text or the sound; None: not asked for."""

    text_reason: FinishReason | None
    audio_reason: FinishReason | None
    usage: Usage
    timings: Timings
    # One for each stage that worked, in their order.
    stages: tuple[StageWork, ...] = ()

    @property
    def finish_reason(self) -> FinishReason:
        return "length" if "length" in (self.text_reason, self.audio_reason) else "stop"


class Failed(msgspec.Struct, frozen=True):
    """The other end: the request could not be finished."""

    error: RequestFailed


Event = TextDelta | AudioDelta | Finished | Failed
