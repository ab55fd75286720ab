"""Stand-ins that keep the Protocols of what they stand for; each does one thing wrong, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stretto.engine.runner import Materialized
from stretto.engine.scheduler import ARBatch, GenerationBatch
from stretto.payloads import (
    CodecFrames,
    Payload,
    SpeechStep,
    SpokenTokens,
    StageStep,
    TextStep,
    ThinkerPrompt,
)
from stretto.request import SamplingParams, SpeechOptions, StageRequest
from stretto.transfer.connector import Buffer
from stretto.transfer.memory_connector import MemoryConnector

NUM_CODEBOOKS = 4


def ticket(
    request_id: str,
    *,
    prompt: Sequence[int] = (),
    max_tokens: int | None = None,
    max_positions: int | None = None,
    stop_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    feeds_downstream: bool = False,
    initial_frames: int | None = 1,
    return_codes: bool = False,
) -> StageRequest:
    """A greedy request; by default with room for its prompt and its tokens and no more."""
    room = len(prompt) + (max_tokens or 0)
    return StageRequest(
        request_id=request_id,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop_token_ids),
            stop=tuple(stop),
            seed=0,
        ),
        max_positions=room if max_positions is None else max_positions,
        prompt_token_ids=tuple(prompt),
        speech=SpeechOptions(
            speaker="ethan",
            initial_codec_chunk_frames=initial_frames,
            residual_sampling=SamplingParams(),
            return_codes=return_codes,
        ),
        feeds_downstream=feeds_downstream,
    )


# ---- connectors ----------------------------------------------------------------------------------


class WrappedConnector:
    """A MemoryConnector that the variants below meddle with on the sender's side."""

    def __init__(self) -> None:
        self.inner = MemoryConnector()

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Sequence[Buffer]) -> int:
        return self.inner.put(from_stage, to_stage, put_key, data)

    def get(self, from_stage: str, to_stage: str, get_key: str, timeout: float) -> memoryview:
        return self.inner.get(from_stage, to_stage, get_key, timeout)

    def wait(self, timeout: float) -> str | None:
        return self.inner.wait(timeout)

    def discard(self, request_id: str) -> None:
        self.inner.discard(request_id)

    def close(self) -> None:
        self.inner.close()


class MeddlingConnector(WrappedConnector):
    """What `meddle(key index, bytes)` gives is put in place of each chunk, in its order."""

    def __init__(self, meddle: Callable[[int, bytes], list[bytes]]) -> None:
        super().__init__()
        self._meddle = meddle

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Sequence[Buffer]) -> int:
        whole = b"".join(data)
        stem, _, index = put_key.rpartition("_")
        for copy, piece in enumerate(self._meddle(int(index), whole)):
            # A connector delivers what is under a key once: a second copy has a key of its own.
            key = put_key if copy == 0 else f"{stem}_{index}{copy:09d}"
            self.inner.put(from_stage, to_stage, key, [piece])
        return len(whole)


def swallowing(index: int) -> MeddlingConnector:
    return MeddlingConnector(lambda at, data: [] if at == index else [data])


def duplicating() -> MeddlingConnector:
    return MeddlingConnector(lambda at, data: [data, data])


def garbling(index: int, garbage: bytes) -> MeddlingConnector:
    return MeddlingConnector(lambda at, data: [garbage] if at == index else [data])


class ReorderingConnector(WrappedConnector):
    """Each second chunk overtakes the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[str, str, str, bytes] | None = None

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Sequence[Buffer]) -> int:
        whole = b"".join(data)
        if self._held is None:
            self._held = (from_stage, to_stage, put_key, whole)
            return len(whole)
        held, self._held = self._held, None
        self.inner.put(from_stage, to_stage, put_key, [whole])
        self.inner.put(held[0], held[1], held[2], [held[3]])
        return len(whole)


# ---- inboxes and bridges -------------------------------------------------------------------------


class CountingInbox:
    """The inbox of an autoregressive stage over ThinkerPrompt and SpokenTokens.

    The prompt is what came until a piece with a head; each token covers one position more.
    """

    def __init__(self, prompt_length: int | None = None, ready: int = 0) -> None:
        self.prompt_length: int | None = prompt_length
        self.positions_ready = ready
        self.is_void = False

    def push(self, payload: Payload) -> None:
        match payload:
            case ThinkerPrompt(user_ids=user_ids, head_ids=head_ids):
                self.positions_ready += len(user_ids)
                if head_ids is not None:
                    self.prompt_length = self.positions_ready
            case SpokenTokens(token_ids=token_ids):
                self.positions_ready += len(token_ids)
            case CodecFrames():
                raise ValueError("frames where words are wanted")

    def end(self) -> None:
        self.is_void = self.prompt_length is None


class FrameQueue:
    """The inbox of a generation stage; each call takes one payload's frames."""

    def __init__(self) -> None:
        self._waiting: list[np.ndarray] = []
        self._ended = False

    @property
    def is_ready(self) -> bool:
        return bool(self._waiting)

    @property
    def is_done(self) -> bool:
        return self._ended and not self._waiting

    @property
    def portion_frames(self) -> int:
        return len(self._waiting[0])

    def take(self) -> tuple[np.ndarray, bool]:
        return self._waiting.pop(0), True

    def push(self, payload: Payload) -> None:
        assert isinstance(payload, CodecFrames)
        if len(payload.codes):
            self._waiting.append(payload.codes)

    def end(self) -> None:
        self._ended = True


class FakeStream:
    """Hands each step's token or frame on at once; raises at the step that `fail` names."""

    def __init__(self, fail: Callable[[str, StageStep | None], bool], request_id: str) -> None:
        self._fail = fail
        self._request_id = request_id

    def push(self, step: StageStep) -> tuple[Payload, ...]:
        if self._fail(self._request_id, step):
            raise RuntimeError("this bridge is broken")
        match step:
            case TextStep(token_id=None) | SpeechStep(frame=None):
                return ()
            case TextStep(token_id=token_id):
                return (SpokenTokens(np.array([token_id], np.int32)),)
            case SpeechStep(frame=frame):
                assert frame is not None
                return (CodecFrames(frame[None]),)

    def finish(self) -> tuple[Payload, ...]:
        if self._fail(self._request_id, None):
            raise RuntimeError("this bridge is broken at the end")
        return ()


def never(request_id: str, step: StageStep | None) -> bool:
    return False


class FakeBridge:
    def __init__(
        self,
        *,
        fail: Callable[[str, StageStep | None], bool] = never,
        fail_open: Callable[[str], bool] = lambda request_id: False,
        fail_inbox: Callable[[str], bool] = lambda request_id: False,
        make_inbox: Callable[[], Any] = FrameQueue,
    ) -> None:
        self._fail = fail
        self._fail_open = fail_open
        self._fail_inbox = fail_inbox
        self._make_inbox = make_inbox

    def open(self, ticket: StageRequest) -> FakeStream:
        if self._fail_open(ticket.request_id):
            raise RuntimeError("this bridge does not open")
        return FakeStream(self._fail, ticket.request_id)

    def inbox(self, ticket: StageRequest) -> Any:
        if self._fail_inbox(ticket.request_id):
            raise RuntimeError("this bridge has no inbox")
        return self._make_inbox()


# ---- runners -------------------------------------------------------------------------------------


class FakePending:
    def __init__(self, token_ids: list[int], materialize: Callable[[], Materialized]) -> None:
        self._token_ids = token_ids
        self._materialize = materialize

    def sampled(self) -> list[int]:
        return self._token_ids

    def materialize(self) -> Materialized:
        return self._materialize()


class FakeRunner:
    """An autoregressive runner: each request draws `next_token(request_id, n)` as its nth token.

    `batches` are those it was given; `released` the requests it was told are gone.
    """

    def __init__(
        self,
        next_token: Callable[[str, int], int] = lambda request_id, n: 1000 + n,
        *,
        speaks: bool = False,
        fail_materialize: bool = False,
    ) -> None:
        self._next_token = next_token
        self._speaks = speaks
        self._fail_materialize = fail_materialize
        self._num_drawn: dict[str, int] = {}
        self.batches: list[ARBatch] = []
        self.released: list[str] = []
        self.num_prepared = 0

    def prepare(self) -> bool:
        if self.num_prepared == 3:
            return False
        self.num_prepared += 1
        return True

    def execute(self, batch: ARBatch) -> FakePending:
        self.batches.append(batch)
        token_ids = []
        for item in batch.items:
            if item.draws:
                drawn = self._num_drawn.get(item.request_id, 0)
                self._num_drawn[item.request_id] = drawn + 1
                token_ids.append(self._next_token(item.request_id, drawn))
        return FakePending(token_ids, lambda: self._copies(token_ids))

    def _copies(self, token_ids: list[int]) -> Materialized:
        if self._fail_materialize:
            raise RuntimeError("the device has lost the copy")
        if not self._speaks:
            return Materialized()
        return Materialized(
            frames=tuple(np.full(NUM_CODEBOOKS, token_id, np.int16) for token_id in token_ids)
        )

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self._num_drawn.pop(request_id, None)


class FakeVocoder:
    """A generation runner: a frame sounds as two samples of its first code."""

    def __init__(self) -> None:
        self.batches: list[GenerationBatch] = []
        self.released: list[str] = []

    def prepare(self) -> bool:
        return False

    def execute(self, batch: GenerationBatch) -> FakePending:
        self.batches.append(batch)
        samples = tuple(np.repeat(item.frames[:, 0].astype(np.float32), 2) for item in batch.items)
        return FakePending([], lambda: Materialized(samples=samples))

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
