"""`/v1/audio/voices`: what a request may call a voice, and voices that clients bring."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from stretto.server.errors import ApiError, check_unicode, echo, invalid, json_response, nearest
from stretto.server.takes import Studio
from stretto.server.voice_store import MAX_SOUND_BYTES, new_voice
from stretto.server.voices import NO_VOICE

UPLOAD_FIELDS = (
    "name", "consent", "audio_sample", "speaker_embedding", "ref_text", "speaker_description",
)  # fmt: skip


def voice_routes(studio: Studio) -> APIRouter:
    router = APIRouter()
    store = studio.store

    @router.get("/v1/audio/voices")
    async def voices() -> Response:
        uploaded = await asyncio.to_thread(store.all) if studio.can_clone else []
        names = [*studio.speakers, *(voice.name for voice in uploaded)]
        return json_response({"voices": names, "uploaded_voices": uploaded})

    @router.post("/v1/audio/voices")
    async def upload(request: Request) -> Response:
        if not studio.can_clone:
            raise ApiError(404, "this model speaks with its own voices; it clones none")
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise ApiError(400, "an upload is sent as multipart/form-data")
        async with request.form(max_files=1, max_fields=len(UPLOAD_FIELDS) + 1) as form:
            sound = await _sound(form)
            texts = _texts(form)
        name, ref_text = texts.get("name", ""), (texts.get("ref_text") or "").strip()
        if name.lower() in (*studio.speakers, NO_VOICE):
            raise ApiError(
                409,
                f"{echo(name)} is a voice of the model's own; choose another name",
                param="name",
                code="voice_exists",
            )
        numbers = texts.get("speaker_embedding")
        voice, content = await asyncio.to_thread(
            new_voice,
            name=name,
            consent=texts.get("consent", ""),
            sound=sound,
            numbers=None if numbers is None else _numbers(numbers),
            ref_text=ref_text or None,
            speaker_description=texts.get("speaker_description") or None,
        )
        await asyncio.to_thread(store.add, voice, content)
        return json_response({"success": True, "voice": voice})

    @router.delete("/v1/audio/voices/{name}")
    async def delete(name: str) -> Response:
        if name.lower() in studio.speakers:
            raise invalid("name", f"{echo(name)} is a voice of the model's own; it stays")
        if not await asyncio.to_thread(store.remove, name):
            raise ApiError(404, f"there is no uploaded voice {echo(name)}", param="name")
        return json_response({"success": True, "message": f"voice {name} is deleted"})

    return router


async def _sound(form: FormData) -> bytes | None:
    """Raises ApiError."""
    given = form.get("audio_sample")
    if given is None:
        return None
    if not isinstance(given, UploadFile):
        raise invalid("audio_sample", "audio_sample must be a file, with a file name")
    # A byte more than is allowed: what reads it says that it is too large.
    return await given.read(MAX_SOUND_BYTES + 1)


def _texts(form: FormData) -> dict[str, str]:
    """Raises ApiError."""
    texts: dict[str, str] = {}
    for name, value in form.multi_items():
        if name not in UPLOAD_FIELDS:
            raise invalid(name, f"unknown field {echo(name)}{nearest(name, UPLOAD_FIELDS)}")
        if name == "audio_sample":
            continue
        if isinstance(value, UploadFile) or name in texts:
            raise invalid(name, f"{name} must be one text")
        check_unicode(name, value)
        texts[name] = value
    return texts


def _numbers(text: str) -> list[float]:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(text, type=list[float])
    except msgspec.MsgspecError as error:
        raise invalid("speaker_embedding", f"speaker_embedding: {error}; a JSON list of numbers is "
                      "expected") from error  # fmt: skip
