"""`POST /v1/audio/speech` and `/v1/audio/voices`: a given text, read out.

The route knows bodies, formats and streams; what reads a text out is a `SpeechModel`. An Omni
model answers a text and does not read it, so with one the route says 404.

    stream absent, or stream_format "audio"    the file's bytes as they are made (OpenAI's default)
    stream true, or stream_format "sse"        the same bytes in events, each a base64 text
    stream false                               the whole file, lengths in its header

The default format is mp3, as at OpenAI. Once bytes have left, only a broken transfer can still
say that something failed; events say it themselves.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.api import collect
from stretto.events import AudioDelta, Finished
from stretto.pipeline.pipeline import SAMPLE_RATE, PipelineRequest
from stretto.server.encoders import (
    MEDIA_TYPES,
    EncodedStream,
    encode_whole,
    filtered,
    open_encoder,
    open_filters,
)
from stretto.server.errors import ApiError, check_model, check_unicode, invalid, json_response
from stretto.server.meters import Meters
from stretto.server.protocol import (
    SpeechDelta,
    SpeechDone,
    SpeechError,
    SpeechFailed,
    SpeechRequest,
    SpeechUsage,
)
from stretto.server.service import Service
from stretto.server.streaming import Job, Streamed, attended, sse
from stretto.server.voices import speaker_of

log = logging.getLogger(__name__)

# OpenAI's limit.
MAX_INPUT_CHARS = 4096
# What agent frameworks call a speech model unless told otherwise.
MODEL_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")


class SpeechInput(msgspec.Struct, frozen=True, kw_only=True):
    """A text to be read out. None or empty: as the model does by itself."""

    text: str
    speaker: str | None
    instructions: str | None
    language: str | None
    sampling: Mapping[str, Any]
    initial_codec_chunk_frames: int | None
    label: str


class SpeechModel(Protocol):
    """A pipeline that reads texts out."""

    @property
    def speakers(self) -> Sequence[str]: ...

    def prepare(self, speech: SpeechInput) -> PipelineRequest:
        """Raises InvalidRequest."""


def speech_routes(service: Service, model: SpeechModel | None) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/audio/voices")
    async def voices() -> Response:
        names = service.speakers if model is None else model.speakers
        return json_response({"voices": list(names), "uploaded_voices": []})

    @router.post("/v1/audio/speech")
    async def speech(body: SpeechRequest, request: Request) -> Response:
        if model is None:
            raise ApiError(
                404,
                f"the model {service.names[0]!r} answers texts and does not read them out; use "
                "/v1/chat/completions with modalities ['text', 'audio']",
            )
        spoken = _read(body, model, service, label=request.state.request_id)
        filters = open_filters(
            speed=body.speed, rate_in=SAMPLE_RATE, rate_out=body.sample_rate or SAMPLE_RATE
        )
        media_type = MEDIA_TYPES[body.response_format]
        headers = {
            "x-sample-rate": str(body.sample_rate or SAMPLE_RATE),
            "x-channels": "1",
            "x-bit-depth": "16",
        }
        is_sse = body.stream_format == "sse" or (body.stream and body.stream_format is None)

        async def whole() -> Response:
            job = service.job(await service.prepared(lambda: model.prepare(spoken)))
            async with aclosing(job.events()) as stream:
                answer = collect([event async for event in stream])

            def encode() -> bytes:
                samples = filtered(filters, answer.audio)
                return encode_whole(body.response_format, samples, int(headers["x-sample-rate"]))

            return Response(await asyncio.to_thread(encode), media_type=media_type, headers=headers)

        async def first() -> tuple[bytes, AsyncGenerator[bytes, None]]:
            job = service.job(await service.prepared(lambda: model.prepare(spoken)))
            rate = int(headers["x-sample-rate"])
            stream = EncodedStream(filters, open_encoder(body.response_format, rate))
            made = _events(job, stream, body.response_format) if is_sse else _bytes(job, stream)
            pieces = _counted(made, service.meters)
            return await anext(pieces), pieces

        if body.stream is False and not is_sse:
            return await attended(request, whole())
        piece, rest = await attended(request, first())
        return Streamed(
            piece,
            rest,
            media_type="text/event-stream" if is_sse else media_type,
            headers=headers,
            ping_s=service.settings.ping_s if is_sse else None,
            stall_s=service.settings.stall_s,
        )

    return router


def _read(body: SpeechRequest, model: SpeechModel, service: Service, *, label: str) -> SpeechInput:
    """What is to be read out. Raises ApiError."""
    check_model(body.model, (*service.names, *MODEL_ALIASES))
    if not body.input.strip():
        raise invalid("input", "input is empty; there is nothing to read out")
    if len(body.input) > MAX_INPUT_CHARS:
        raise invalid(
            "input",
            f"input has {len(body.input)} characters; at most {MAX_INPUT_CHARS} are allowed",
        )
    check_unicode("input", body.input)
    limits = {"max_tokens": body.max_new_tokens, "seed": body.seed}
    return SpeechInput(
        text=body.input,
        speaker=speaker_of({"voice": body.voice, "speaker": body.speaker}, model.speakers),
        instructions=body.instructions,
        language=body.language,
        sampling={name: value for name, value in limits.items() if value is not None},
        initial_codec_chunk_frames=body.initial_codec_chunk_frames,
        label=label,
    )


# Encoders run in threads: two seconds of sound are 40 ms of work as Opus.


async def _bytes(job: Job, stream: EncodedStream) -> AsyncGenerator[bytes, None]:
    async with aclosing(job.events()) as events:
        async for event in events:
            if isinstance(event, AudioDelta):
                piece = await asyncio.to_thread(stream.push, event.samples)
                if piece:
                    yield piece
    yield stream.finish()


async def _events(
    job: Job, stream: EncodedStream, audio_format: str
) -> AsyncGenerator[bytes, None]:
    began, usage = False, SpeechUsage(0, 0, 0)

    def delta(piece: bytes) -> bytes:
        body = SpeechDelta(base64.b64encode(piece).decode(), audio_format)
        return sse(body, event="speech.audio.delta")

    async with aclosing(job.events()) as events:
        try:
            async for event in events:
                if isinstance(event, AudioDelta):
                    piece = await asyncio.to_thread(stream.push, event.samples)
                    if piece:
                        began = True
                        yield delta(piece)
                elif isinstance(event, Finished):
                    made, read = event.usage.audio_tokens, event.usage.prompt_tokens
                    usage = SpeechUsage(read, made, read + made)
        except ApiError as error:
            if not began:
                raise
            wire = error.in_stream().error
            failed = SpeechError(wire.message, wire.type, wire.param, wire.code)
            yield sse(SpeechFailed(failed), event="speech.audio.error")
            return
    rest = stream.finish()
    if rest:
        yield delta(rest)
    yield sse(SpeechDone(usage), event="speech.audio.done")


async def _counted(
    pieces: AsyncGenerator[bytes, None], meters: Meters
) -> AsyncGenerator[bytes, None]:
    """Passes pieces on and counts how the stream ended."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    except ApiError:
        meters.speech_aborted("error")
        raise
    except (asyncio.CancelledError, GeneratorExit):
        meters.speech_aborted("closed")
        raise
    meters.speech_completed()
