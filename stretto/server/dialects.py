"""How a chat is answered, in OpenAI's words and in vllm-omni's.

                 OpenAI                                   vllm-omni
    text         delta.audio.transcript if there is       delta.content
                 sound, else delta.content
    sound        delta.audio.data: PCM; the joined        delta.content: a whole WAV per chunk
                 data of all chunks is one base64 text
    which it is  the keys of the delta                    `modality` (OpenAI's chunks have it too)

    stream       head and content ..., finish reason, usage if asked for, expiry if there is sound

No delta is ever empty: the bench takes the first chunk of a modality for its first packet.
"""

from __future__ import annotations

import abc
import base64
import secrets
import time
from typing import Literal, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from stretto import audio
from stretto.api import Answer
from stretto.api import Delta as Event
from stretto.config.deployment import StageConfig
from stretto.events import AudioDelta, Finished, StageWork, TextDelta, Timings, Usage
from stretto.server.encoders import encode_whole
from stretto.server.protocol import (
    AudioMessage,
    AudioMetadata,
    AudioPart,
    ChatAudioFormat,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    FinishReason,
    MessageBody,
    Metrics,
    StageMetrics,
    UsageBody,
)
from stretto.server.service import Replies
from stretto.server.settings import Modality

# Three samples: base64 of a multiple of three bytes has no padding, so that clients may join the
# texts, and a multiple of two bytes tears no sample.
PCM_UNIT = 6


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer has to look like."""

    dialect: Literal["openai", "vllm-omni"]
    text: bool
    audio: bool
    audio_format: ChatAudioFormat
    include_usage: bool
    continuous_usage: bool
    stage_metrics: bool
    token_ids: bool
    stages: tuple[StageConfig, ...]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in all of an answer."""

    id: str
    audio_id: str
    created: int
    model: str
    num_prompt_tokens: int

    @classmethod
    def new(cls, model: str, *, num_prompt_tokens: int) -> Reply:
        key = secrets.token_hex(12)
        return cls(
            id=f"chatcmpl-{key}",
            audio_id=f"audio_{key}",
            created=int(time.time()),
            model=model,
            num_prompt_tokens=num_prompt_tokens,
        )


def encoded_sound(answer: Answer, wishes: Wishes) -> bytes:
    """A whole file of the answer's sound. Minutes of it take seconds."""
    container = "pcm" if wishes.audio_format == "pcm16" else wishes.audio_format
    return encode_whole(container, answer.audio, answer.sample_rate)


def completion(
    answer: Answer, end: Finished, sound: bytes, *, reply: Reply, wishes: Wishes, replies: Replies
) -> Completion:
    """An answer in one piece."""
    message_audio: AudioMessage | UnsetType = UNSET
    metadata: AudioMetadata | UnsetType = UNSET
    if wishes.audio:
        message_audio = AudioMessage(
            id=reply.audio_id,
            data=_base64(sound),
            expires_at=replies.keep(reply.audio_id, answer.text),
            transcript=answer.text,
        )
        if wishes.dialect == "vllm-omni":
            metadata = AudioMetadata(wishes.audio_format, answer.sample_rate, len(answer.audio))
    has_words = wishes.text and (wishes.dialect == "vllm-omni" or not wishes.audio)
    choice = Choice(
        message=MessageBody(content=answer.text if has_words else None, audio=message_audio),
        finish_reason=_finish_reason(end),
        token_ids=answer.token_ids if wishes.token_ids else UNSET,
        audio_metadata=metadata,
    )
    return Completion(
        id=reply.id,
        created=reply.created,
        model=reply.model,
        choices=(choice,),
        usage=UsageBody.of(end.usage),
        metrics=_metrics(wishes, end) if wishes.stage_metrics else UNSET,
    )


class ChatWriter(abc.ABC):
    """The chunks of one stream."""

    def __init__(self, reply: Reply, wishes: Wishes, replies: Replies) -> None:
        self._reply = reply
        self._wishes = wishes
        self._replies = replies
        self._has_begun = False
        self._num_text_tokens = 0
        # Tokens whose text is still held back.
        self._token_ids: tuple[int, ...] = ()

    @staticmethod
    def open(reply: Reply, wishes: Wishes, replies: Replies) -> ChatWriter:
        kinds = {"openai": OpenAIWriter, "vllm-omni": VllmOmniWriter}
        return kinds[wishes.dialect](reply, wishes, replies)

    def chunks(self, event: Event) -> list[Chunk]:
        """What an event of the pipeline adds to the stream."""
        match event:
            case TextDelta():
                content = self._text_chunks(event)
            case AudioDelta():
                content = self._audio(event)
            case Finished():
                content = [*self._rest(), *self._end(event)]
            case other:
                assert_never(other)
        if content and not self._has_begun:
            self._has_begun = True
            return [*self._head(), *content]
        return content

    def _text_chunks(self, event: TextDelta) -> list[Chunk]:
        self._num_text_tokens += len(event.token_ids)
        self._token_ids += event.token_ids
        if not event.text:
            return []
        chunks = self._text(event.text)
        self._token_ids = ()
        return chunks

    def _end(self, end: Finished) -> list[Chunk]:
        wishes = self._wishes
        metrics = _metrics(wishes, end) if wishes.stage_metrics else UNSET
        stop = ChunkChoice(delta=Delta(), finish_reason=_finish_reason(end))
        if not wishes.include_usage:
            return [self._chunk(stop, metrics=metrics)]
        return [
            self._chunk(stop),
            self._chunk(metrics=metrics, usage=UsageBody.of(end.usage)),
        ]

    def _chunk(
        self,
        *choices: ChunkChoice,
        modality: Modality | UnsetType = UNSET,
        usage: UsageBody | UnsetType = UNSET,
        metrics: Metrics | UnsetType | None = UNSET,
    ) -> Chunk:
        return Chunk(
            id=self._reply.id,
            created=self._reply.created,
            model=self._reply.model,
            choices=choices,
            modality=modality,
            usage=usage,
            metrics=metrics,
        )

    def _usage_so_far(self) -> UsageBody | UnsetType:
        if not self._wishes.continuous_usage:
            return UNSET
        return UsageBody.of(Usage(self._reply.num_prompt_tokens, self._num_text_tokens, 0))

    @abc.abstractmethod
    def _head(self) -> list[Chunk]:
        """What goes before the first content."""

    @abc.abstractmethod
    def _text(self, text: str) -> list[Chunk]: ...

    @abc.abstractmethod
    def _audio(self, event: AudioDelta) -> list[Chunk]: ...

    @abc.abstractmethod
    def _rest(self) -> list[Chunk]:
        """Content that was held back until the end."""


class OpenAIWriter(ChatWriter):
    def __init__(self, reply: Reply, wishes: Wishes, replies: Replies) -> None:
        super().__init__(reply, wishes, replies)
        self._transcript: list[str] = []
        self._has_sound = False
        self._pcm = b""

    def _head(self) -> list[Chunk]:
        return [self._chunk(ChunkChoice(delta=Delta(role="assistant", refusal=None)))]

    def _text(self, text: str) -> list[Chunk]:
        if self._wishes.audio:
            part = AudioPart(
                id=UNSET if self._transcript else self._reply.audio_id, transcript=text
            )
            delta = Delta(content=UNSET if self._transcript else None, audio=part)
            self._transcript.append(text)
        else:
            delta = Delta(content=text)
        choice = ChunkChoice(
            delta=delta, token_ids=self._token_ids if self._wishes.token_ids else UNSET
        )
        return [self._chunk(choice, modality="text", usage=self._usage_so_far())]

    def _audio(self, event: AudioDelta) -> list[Chunk]:
        pcm = self._pcm + audio.pcm16(event.samples)
        whole = len(pcm) - len(pcm) % PCM_UNIT
        self._pcm = pcm[whole:]
        return self._data(pcm[:whole])

    def _rest(self) -> list[Chunk]:
        return self._data(self._pcm)

    def _data(self, pcm: bytes) -> list[Chunk]:
        if not pcm:
            return []
        audio_id = UNSET if self._has_sound else self._reply.audio_id
        self._has_sound = True
        part = AudioPart(id=audio_id, data=_base64(pcm))
        return [self._chunk(ChunkChoice(delta=Delta(audio=part)), modality="audio")]

    def _end(self, end: Finished) -> list[Chunk]:
        chunks = super()._end(end)
        if self._wishes.audio:
            expires_at = self._replies.keep(self._reply.audio_id, "".join(self._transcript))
            delta = Delta(audio=AudioPart(expires_at=expires_at))
            expiry = self._chunk(ChunkChoice(delta=delta, finish_reason=UNSET))
            chunks.append(expiry)
        return chunks


class VllmOmniWriter(ChatWriter):
    def _head(self) -> list[Chunk]:
        if not self._wishes.text:
            return []
        delta = Delta(role="assistant", content="")
        return [self._chunk(ChunkChoice(delta=delta, logprobs=None), modality="text")]

    def _text(self, text: str) -> list[Chunk]:
        if not self._wishes.text:
            return []
        choice = ChunkChoice(
            delta=Delta(content=text),
            logprobs=None,
            token_ids=self._token_ids if self._wishes.token_ids else None,
        )
        usage = self._usage_so_far()
        return [self._chunk(choice, modality="text", usage=usage, metrics=None)]

    def _audio(self, event: AudioDelta) -> list[Chunk]:
        wav = audio.wav_bytes(event.samples, event.sample_rate)
        choice = ChunkChoice(
            delta=Delta(role="assistant", content=_base64(wav)),
            audio_metadata=AudioMetadata("wav", event.sample_rate, len(event.samples)),
            logprobs=None,
            stop_reason=None,
            token_ids=None,
        )
        # Its tokens are counted at the end; here the bench only looks for the prompt's.
        usage = UsageBody.of(Usage(self._reply.num_prompt_tokens, 0, 0))
        return [self._chunk(choice, modality="audio", usage=usage, metrics=None)]

    def _rest(self) -> list[Chunk]:
        return []


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _finish_reason(end: Finished) -> FinishReason:
    reason = end.finish_reason
    # An aborted request has nobody to tell.
    assert reason != "abort"
    return reason


def _metrics(wishes: Wishes, end: Finished) -> Metrics:
    return Metrics(
        {
            str(index): _stage_metrics(index, wishes.stages[index], work, end.usage, end.timings)
            for index, work in enumerate(end.stages)
        }
    )


def _stage_metrics(
    index: int, stage: StageConfig, work: StageWork, usage: Usage, timings: Timings
) -> StageMetrics:
    first_s = {"text": timings.ttft_s, "audio": timings.ttfp_s, None: None}[stage.output]
    return StageMetrics(
        stage_id=index,
        final_output_type=stage.output,
        output_unit_type="token" if stage.worker_type == "ar" else "audio_frame",
        num_tokens_in=usage.prompt_tokens if index == 0 else usage.text_tokens,
        num_tokens_out=work.num_units,
        output_unit_count=work.num_units,
        stage_gen_time_ms=work.busy_s * 1000,
        queue_time_ms=work.queue_s * 1000,
        serving_time_to_first_output_ms=None if first_s is None else first_s * 1000,
    )
