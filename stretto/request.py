"""What a stage knows about one request: the ticket it was given, and where it stands.

    Pipeline.submit ── StageRequest (frozen ticket) ──> every stage at once
                                                           │
                                     Request (one stage's mutable view, engine thread only)

A status is the queue a request stands in: `RequestTable` keeps both as one thing.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from stretto.errors import InvalidRequest
from stretto.payloads import Payload
from stretto.text import TextStream

FinishReason = Literal["stop", "length", "abort"]

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
# Larger than any vocabulary, context or batch.
NUMBER_LIMIT = 2**31
Count = Annotated[int, msgspec.Meta(ge=0, lt=NUMBER_LIMIT)]

# What OpenAI allows; outside of it the logits of a float32 model lose their meaning.
PENALTY_LIMIT = 2.0
# A quotient by a smaller temperature has no float32 left to tell candidates apart.
GREEDY_BELOW = 1e-5
# A torch.Generator takes a signed 64-bit seed.
SEED_LIMIT = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one stage picks its tokens. Temperature 0 is greedy; `top_k` 0 and `min_p` 0 are off.

    `max_tokens` None means: as many as the context has room for. Repetition penalty counts prompt
    and output, presence and frequency count output only, as vLLM does; the Talker's prompt is rows,
    not ids, so there only output counts.
    """

    temperature: float = 0.0
    top_k: Count = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: Count = 0
    max_tokens: Annotated[int, msgspec.Meta(lt=NUMBER_LIMIT)] | None = None
    stop_token_ids: tuple[Count, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise self._bad("temperature", self.temperature, "0 (greedy) to 100")
        if not 0 < self.top_p <= 1:
            raise self._bad("top_p", self.top_p, "above 0, up to 1")
        if not 0 <= self.min_p <= 1:
            raise self._bad("min_p", self.min_p, "0 (off) to 1")
        if self.top_k < 0:
            raise self._bad("top_k", self.top_k, "0 (off) or more")
        if not 0 < self.repetition_penalty <= 100:
            raise self._bad("repetition_penalty", self.repetition_penalty, "above 0, up to 100")
        penalties = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        for name, value in penalties.items():
            if not -PENALTY_LIMIT <= value <= PENALTY_LIMIT:
                raise self._bad(name, value, f"{-PENALTY_LIMIT} to {PENALTY_LIMIT}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise self._bad("max_tokens", self.max_tokens, "1 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise self._bad(
                "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise self._bad("stop_token_ids", self.stop_token_ids, "ids of 0 or more")
        if any(not text for text in self.stop):
            raise self._bad("stop", self.stop, "strings that are not empty")
        if self.seed is not None and not -SEED_LIMIT <= self.seed < SEED_LIMIT:
            raise self._bad("seed", self.seed, "a signed 64-bit integer")

    @staticmethod
    def _bad(param: str, value: object, allowed: str) -> InvalidRequest:
        return InvalidRequest(param, f"{param} is {value!r}; allowed is {allowed}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def merge_sampling(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`defaults` with the fields of `given` put over them.

    Raises:
        InvalidRequest: a field is unknown, of the wrong type, or out of range.
    """
    fields = msgspec.structs.asdict(defaults)
    for name in given:
        if name not in fields:
            raise InvalidRequest(
                name, f"unknown sampling field {name!r}; there are {', '.join(sorted(fields))}"
            )
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), str):
            given = {**given, name: (given[name],)}
    try:
        return msgspec.convert({**fields, **given}, SamplingParams)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        # "Expected `int`, got `str` - at `$.stop_token_ids[0]`"
        named = re.search(r"`\$\.(\w+)", str(error))
        raise InvalidRequest(named[1] if named else "sampling", str(error)) from error


# In `SpeechPrompt.codec_ids`: a row with no codec beside its text; the row of the given voice.
NO_CODEC = -1
GIVEN_VOICE = -2


class SpeechPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a Talker hears that reads a text out by itself (Qwen3-TTS): head, reference, text.

    The head is `head_ids` of text, each with its entry of `codec_ids` beside it. A reference to
    speak like is its text and its frames, int16 [n, num_codebooks]; a given voice a speaker
    embedding, float32 [H].
    """

    head_ids: tuple[int, ...]
    codec_ids: tuple[int, ...]
    # The text as far as it is known; more comes in pieces if `text_follows`.
    text_ids: tuple[int, ...]
    text_follows: bool = False
    # The whole text stands before the first frame, instead of one token beside each frame.
    text_first: bool = False
    reference_text_ids: tuple[int, ...] = ()
    reference_codes: np.ndarray | None = None
    speaker_embedding: np.ndarray | None = None


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about its sound. `speaker` is a name of the checkpoint, lower case."""

    speaker: str
    # Frames in the first chunk for the vocoder; None: chosen from the load when the Talker begins.
    initial_codec_chunk_frames: int | None
    # The residual codebooks' own sampling; greedy when the Talker itself is greedy.
    residual_sampling: SamplingParams
    return_codes: bool = False
    # For a Talker that has no Thinker before it.
    prompt: SpeechPrompt | None = None


class StageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The ticket: all that one stage needs to know before the first data arrives."""

    # Given by the pipeline, which mints it.
    request_id: str = ""
    sampling: SamplingParams
    # Cache positions the request can need at most; reserved when it is admitted.
    max_positions: int
    # The entry stage's prompt; empty for the others, which wait for their upstream.
    prompt_token_ids: tuple[int, ...] = ()
    speech: SpeechOptions | None = None
    # Nothing follows from upstream: the ticket brings all of the request's input.
    brings_all: bool = False
    # Whether a downstream stage holds a ticket of this request too.
    feeds_downstream: bool = False


class RequestStatus(enum.Enum):
    # Could run as soon as there is room.
    WAITING = enum.auto()
    # Its inbox covers no further position.
    WAITING_FOR_CHUNK = enum.auto()
    # Holds a place in the batch.
    RUNNING = enum.auto()


class Inbox(Protocol):
    """What has arrived from upstream for one request. Written and read by the engine thread."""

    def push(self, payload: Payload) -> None: ...

    def end(self) -> None:
        """Upstream has ended; nothing follows."""


InboxT = TypeVar("InboxT", bound=Inbox)


class Request(Generic[InboxT]):
    """One stage's mutable view of a request. Touched by the engine thread alone."""

    def __init__(self, ticket: StageRequest, inbox: InboxT, text: TextStream | None) -> None:
        self.ticket = ticket
        self.request_id = ticket.request_id
        self.inbox = inbox
        self.text = text
        self.status = RequestStatus.WAITING_FOR_CHUNK
        self.num_computed_tokens = 0
        # Positions of the prompt that were not computed but taken from the prefix cache.
        self.num_cached_tokens = 0
        self.output_ids: list[int] = []
        # None until the request is admitted.
        self.place: Place | None = None
        self.added_s = time.monotonic()
        self.queue_s = 0.0
        # Time of the steps the request took part in.
        self.busy_s = 0.0

    def admit(self, place: Place) -> None:
        self.place = place
        self.queue_s = time.monotonic() - self.added_s


class Place(msgspec.Struct, frozen=True):
    """What an admitted request holds in the runner: a table row and a run of KV blocks."""

    row: int
    first_block: int
    num_blocks: int


RequestT = TypeVar("RequestT", bound=Request[Any])


class RequestTable(Generic[RequestT]):
    """All requests of a stage, by status, each queue in order of arrival."""

    def __init__(self) -> None:
        self._by_status: dict[RequestStatus, dict[str, RequestT]] = {
            status: {} for status in RequestStatus
        }
        self._all: dict[str, RequestT] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._all.values())

    def add(self, request: RequestT) -> None:
        assert request.request_id not in self._all, f"request id {request.request_id} is reused"
        self._all[request.request_id] = request
        self._by_status[request.status][request.request_id] = request

    def find(self, request_id: str) -> RequestT | None:
        return self._all.get(request_id)

    def move(self, request: RequestT, status: RequestStatus) -> None:
        """The only way to change a status: the status is the queue the request stands in."""
        del self._by_status[request.status][request.request_id]
        request.status = status
        self._by_status[status][request.request_id] = request

    def remove(self, request: RequestT) -> None:
        del self._all[request.request_id]
        del self._by_status[request.status][request.request_id]

    def with_status(self, status: RequestStatus) -> list[RequestT]:
        return list(self._by_status[status].values())

    def count(self, status: RequestStatus) -> int:
        return len(self._by_status[status])
