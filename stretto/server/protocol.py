"""The bodies that come in and go out: field names, types and shapes, no meaning.

Requests are pydantic models, read strictly (a number in quotes is no number), so that FastAPI can
describe and check them. Ranges of sampling values are not repeated here: `SamplingParams` knows
them, and every way into the pipeline passes there. Answers are msgspec structs, written fast; a
field that is UNSET does not appear at all, which is how the two dialects of one route differ.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stretto.events import Usage
from stretto.server.settings import Modality
from stretto.server.speech_model import TaskType

# ---- requests ------------------------------------------------------------------------------------


class Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class VoiceId(Body):
    id: str


Voice = str | VoiceId
ChatAudioFormat = Literal["wav", "mp3", "flac", "opus", "pcm16", "pcm"]


class AudioOptions(Body):
    model_config = ConfigDict(extra="forbid")

    voice: Voice | None = None
    format: ChatAudioFormat | None = None


class AudioReference(Body):
    """An earlier answer by its id; clients that echo a whole message send its data along."""

    id: str


class ContentPart(Body):
    type: str
    text: str | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    audio: AudioReference | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(Body):
    """Fields beyond these are looked at in `chat`: some mean nothing here, others are refused."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    modalities: list[Modality] | None = Field(default=None, min_length=1)
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    voice: Voice | None = None
    speaker: Voice | None = None
    sampling_params_list: list[dict[str, Any]] | None = None
    initial_codec_chunk_frames: int | None = None
    return_stage_metrics: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        return flatten(body)


class SpeechFields(Body):
    """How a text is to be spoken; one set of names for all speech routes."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    voice: Voice | None = None
    speaker: Voice | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    speed: float = Field(default=1.0, ge=0.25, le=4.0)
    sample_rate: Literal[8000, 12000, 16000, 24000, 48000] | None = None
    task_type: TaskType | None = None
    instructions: str | None = None
    language: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool | None = None
    speaker_embedding: list[float] | None = None
    non_streaming_mode: bool | None = None
    max_new_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    initial_codec_chunk_frames: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        return flatten(body)


class SpeechRequest(SpeechFields):
    input: str
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None


MAX_BATCH_ITEMS = 32


class SpeechBatchRequest(Body):
    """Items are checked one by one, over what the body says beside them."""

    model_config = ConfigDict(extra="allow")

    items: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_BATCH_ITEMS)

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        return flatten(body)


class SessionConfig(SpeechFields):
    type: Literal["session.config"]
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "pcm"
    # Frames as they are made, or one for each file.
    stream_audio: bool = True
    split_granularity: Literal["none", "sentence", "clause"] = "none"
    # One request that is fed the text as it comes.
    text_streaming: bool = False


class InputText(Body):
    type: Literal["input.text"]
    text: str


def flatten(body: Any) -> Any:
    """A body with its nested `extra_body`, as people write it with curl, one level up.

    The OpenAI SDK does that itself. Raises ValueError when the two levels contradict each other.
    """
    if not isinstance(body, dict) or not isinstance(body.get("extra_body"), dict):
        return body
    outer = {name: value for name, value in body.items() if name != "extra_body"}
    for name, value in body["extra_body"].items():
        if name in outer and outer[name] != value:
            raise ValueError(f"extra_body.{name} contradicts {name}; give one of them")
    return {**outer, **body["extra_body"]}


# ---- answers -------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length"]


class PromptDetails(msgspec.Struct, frozen=True):
    text_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    text_tokens: int
    audio_tokens: int
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptDetails(
                usage.prompt_tokens, cached_tokens=usage.cached_tokens
            ),
            completion_tokens_details=CompletionDetails(usage.text_tokens, usage.audio_tokens),
        )


class AudioMetadata(msgspec.Struct, frozen=True):
    format: str
    sample_rate_hz: int
    frame_count: int
    channels: int = 1


class AudioPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of `delta.audio`; its pieces add up to an `AudioMessage`."""

    id: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    audio: AudioPart | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    finish_reason: FinishReason | UnsetType | None = None
    logprobs: UnsetType | None = UNSET
    stop_reason: UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType | None = UNSET
    audio_metadata: AudioMetadata | UnsetType = UNSET


class StageMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What vllm-omni tells of a stage when a request has `return_stage_metrics`."""

    stage_id: int
    final_output_type: Literal["text", "audio"] | None
    output_unit_type: Literal["token", "audio_frame"]
    num_tokens_in: int
    num_tokens_out: int
    output_unit_count: int
    stage_gen_time_ms: float
    queue_time_ms: float
    serving_time_to_first_output_ms: float | None


class Metrics(msgspec.Struct, frozen=True):
    stage_metrics: dict[str, StageMetrics]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    modality: Modality | UnsetType = UNSET
    metrics: Metrics | UnsetType | None = UNSET
    usage: UsageBody | UnsetType | None = UNSET


class AudioMessage(msgspec.Struct, frozen=True):
    id: str
    data: str
    expires_at: int
    transcript: str


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: tuple[()] = ()
    audio: AudioMessage | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: MessageBody
    finish_reason: FinishReason
    logprobs: None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    audio_metadata: AudioMetadata | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: UsageBody
    metrics: Metrics | UnsetType = UNSET


class SpeechUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.delta"):
    audio: str
    response_format: str


class SpeechDone(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.done"):
    usage: SpeechUsage
    finish_reason: FinishReason


class SpeechError(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None
    partial_audio: bool = True
    action: Literal["discard"] = "discard"


class SpeechFailed(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.error"):
    error: SpeechError


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    status: Literal["success", "error"]
    audio_data: str | None = None
    media_type: str | None = None
    usage: SpeechUsage | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    param: str | None = None


class SpeechBatch(msgspec.Struct, frozen=True):
    id: str
    results: list[BatchResult]
    total: int
    succeeded: int
    failed: int


# ---- the speech socket ---------------------------------------------------------------------------


class AudioStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="audio.start"):
    utterance_index: int
    sentence_index: int
    sentence_text: str
    format: str
    sample_rate: int


class AudioDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="audio.done"):
    utterance_index: int
    sentence_index: int
    total_bytes: int
    error: bool
    finish_reason: FinishReason | None


class SessionDone(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="session.done"):
    utterance_index: int
    total_sentences: int


class SocketError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    message: str
    param: str | None
    code: str | int | None


SocketEvent = AudioStart | AudioDone | SessionDone | SocketError
