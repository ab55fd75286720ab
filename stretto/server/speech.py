"""`POST /v1/audio/speech` and its batch: given texts, read out.

The routes know bodies, formats and streams; what reads a text out is a `SpeechModel`. An Omni
model answers a text and does not read it, so with one the routes say 404.

    stream absent, or stream_format "audio"    the file's bytes as they are made (OpenAI's default)
    stream true, or stream_format "sse"        the same bytes in events, each a base64 text
    stream false                               the whole file, lengths in its header

The default format is mp3, as at OpenAI; that of a batch, which only vllm-omni knows, is its wav.
Once bytes have left, only a broken transfer can still say that something failed; events say it
themselves.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.server.encoders import MEDIA_TYPES
from stretto.server.errors import ApiError, checked, invalid, json_response
from stretto.server.protocol import (
    BatchResult,
    SpeechBatch,
    SpeechBatchRequest,
    SpeechDelta,
    SpeechDone,
    SpeechError,
    SpeechFailed,
    SpeechRequest,
)
from stretto.server.streaming import Streamed, attended, sse
from stretto.server.takes import Studio, Take, encoded, open_stream, sample_rate_of, whole_file

BATCH_DEFAULTS = {"response_format": "wav"}


def speech_routes(studio: Studio) -> APIRouter:
    router = APIRouter()
    service = studio.service

    @router.post("/v1/audio/speech")
    async def speech(body: SpeechRequest, request: Request) -> Response:
        # Before anything else of the body is judged: with such a model nothing else matters.
        _ = studio.model
        label: str = request.state.request_id
        media_type = MEDIA_TYPES[body.response_format]
        headers = {
            "x-sample-rate": str(sample_rate_of(body)),
            "x-channels": "1",
            "x-bit-depth": "16",
        }
        is_sse = body.stream_format == "sse" or (body.stream and body.stream_format is None)

        async def whole() -> Response:
            take = studio.take(await studio.read(body, label=label), body.input)
            content = await whole_file(take, body)
            usage = take.usage
            figures = {
                "x-vllm-omni-input-tokens": str(usage.input_tokens),
                "x-vllm-omni-output-tokens": str(usage.output_tokens),
                "x-vllm-omni-total-tokens": str(usage.total_tokens),
                "x-finish-reason": take.finish_reason,
            }
            return Response(content, media_type=media_type, headers={**headers, **figures})

        async def first() -> tuple[bytes, AsyncGenerator[bytes, None]]:
            take = studio.take(await studio.read(body, label=label), body.input)
            made = encoded(take, open_stream(body), service.meters)
            pieces = _events(take, made, body.response_format) if is_sse else made
            # A take without a single frame may have no bytes at all.
            return await anext(pieces, b""), pieces

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

    @router.post("/v1/audio/speech/batch")
    async def batch(body: SpeechBatchRequest, request: Request) -> Response:
        _ = studio.model
        label: str = request.state.request_id
        shared = {**BATCH_DEFAULTS, **(body.model_extra or {})}
        _check_defaults(shared)

        async def side_by_side() -> list[BatchResult]:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        _batch_item(studio, {**shared, **item}, index=index, label=label)
                    )
                    for index, item in enumerate(body.items)
                ]
            return [task.result() for task in tasks]

        results = await attended(request, side_by_side())
        succeeded = sum(result.status == "success" for result in results)
        made = SpeechBatch(
            f"speech-batch-{secrets.token_hex(8)}",
            results,
            total=len(results),
            succeeded=succeeded,
            failed=len(results) - succeeded,
        )
        return json_response(made)

    return router


def _check_defaults(shared: dict[str, Any]) -> None:
    """What a batch says for all of its items is wrong for all of them, or for none."""
    if "input" in shared:
        raise invalid("input", "input goes into items, one for each")
    checked(SpeechRequest, {**shared, "input": "-"})
    if shared.get("stream") or shared.get("stream_format") not in (None, "audio"):
        raise invalid("stream", "a batch is answered whole; leave stream and stream_format out")


async def _batch_item(
    studio: Studio, fields: dict[str, Any], *, index: int, label: str
) -> BatchResult:
    """What became of one item; only the client's going ends it otherwise."""
    try:
        body = checked(SpeechRequest, fields)
        take = studio.take(await studio.read(body, label=f"{label}[{index}]"), body.input)
        # More items than places are no error: they wait for each other.
        content = await whole_file(take, body, patient=True)
    except ApiError as error:
        wire = error.error
        return BatchResult(index=index, status="error", error=wire.message, param=wire.param)
    return BatchResult(
        index=index,
        status="success",
        audio_data=base64.b64encode(content).decode(),
        media_type=MEDIA_TYPES[body.response_format],
        usage=take.usage,
        finish_reason=take.finish_reason,
    )


async def _events(
    take: Take, pieces: AsyncGenerator[bytes, None], audio_format: str
) -> AsyncGenerator[bytes, None]:
    began = False
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                began = True
                body = SpeechDelta(base64.b64encode(piece).decode(), audio_format)
                yield sse(body, event="speech.audio.delta")
        except ApiError as error:
            if not began:
                raise
            wire = error.in_stream().error
            failed = SpeechError(wire.message, wire.type, wire.param, wire.code)
            yield sse(SpeechFailed(failed), event="speech.audio.error")
            return
    yield sse(SpeechDone(take.usage, take.finish_reason), event="speech.audio.done")
