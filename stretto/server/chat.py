"""`POST /v1/chat/completions`: what a request asks for. How it is answered stands in `dialects`.

    `audio` object         OpenAI's dialect, else vllm-omni's
    `modalities`           given: just these
    none, but something    an `audio` object, a voice, `initial_codec_chunk_frames`, sampling for
    about sound            the Talker: text and sound, for such a field is not to be passed over
    neither                text, as at OpenAI. vllm-omni would send all it can, and a client that
                           knows only text would take base64 for words; a server that stands in for
                           vllm-omni gets its way with `ServerSettings.default_modalities`

`max_tokens` and the other sampling fields are the Thinker's, a field of `sampling_params_list[0]`
going before its namesake; `sampling_params_list[1]` is the Talker's. Fields that would change the
outcome and cannot be honoured are refused unless they have the value that changes nothing; those
that only concern accounting at OpenAI are passed over; a field nobody knows is refused, since it
may be a misspelt one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.api import collect
from stretto.errors import InvalidRequest
from stretto.events import Finished
from stretto.pipeline.omni_frontend import OmniFrontend
from stretto.request import SamplingParams, merge_sampling
from stretto.server.dialects import ChatWriter, Reply, Wishes, completion, encoded_sound
from stretto.server.errors import (
    ApiError,
    check_model,
    check_unicode,
    echo,
    internal,
    invalid,
    json_response,
    nearest,
    unsupported,
)
from stretto.server.protocol import ChatMessage, ChatRequest
from stretto.server.service import Replies, Service
from stretto.server.settings import Modality
from stretto.server.streaming import DONE, Job, Streamed, attended, sse
from stretto.server.voices import speaker_of

log = logging.getLogger(__name__)

SAMPLING_FIELDS = {
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
    "ignore_eos",
}  # fmt: skip
MAX_STOPS = 16

# Accounting at OpenAI, hints for caches that are not here.
IRRELEVANT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "cache_salt",
}  # fmt: skip
# What is not done here, and the values that ask for nothing; null always asks for nothing.
NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,),
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (0,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "reasoning_effort": ("none",), "verbosity": ("medium",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "prediction": (), "web_search_options": (),
    "moderation": (), "documents": ([],), "chat_template": (), "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "echo": (False,),
    "add_special_tokens": (False,), "skip_special_tokens": (True,), "priority": (0,),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "mm_processor_kwargs": ({},), "additional_information": ({},), "language": ("Auto", "auto"),
    "instructions": ("",), "task_type": (), "ref_audio": (), "ref_text": (),
    "max_new_tokens": (), "extra_body": (),
}  # fmt: skip
# vLLM's sampling dicts say how text is made of tokens; it is always made here.
DETOKENIZE = "detokenize"


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        if not isinstance(service.omni.frontend, OmniFrontend):
            raise ApiError(
                404,
                f"the model {service.names[0]!r} reads texts out and answers none; use "
                "/v1/audio/speech",
            )
        wishes, messages, options = read_chat(body, service)
        label: str = request.state.request_id

        async def begin() -> tuple[Job, Reply]:
            prepared = await service.prepared(
                lambda: service.omni.prepare(messages, label=label, **options)
            )
            reply = Reply.new(service.names[0], num_prompt_tokens=len(prepared.prompt_token_ids))
            return service.job(prepared), reply

        async def whole() -> Response:
            job, reply = await begin()
            async with aclosing(job.events()) as stream:
                events = [event async for event in stream]
            answer, end = collect(events), events[-1]
            assert isinstance(end, Finished)
            sound = b""
            if wishes.audio:
                sound = await asyncio.to_thread(encoded_sound, answer, wishes)
            made = completion(
                answer, end, sound, reply=reply, wishes=wishes, replies=service.replies
            )
            return json_response(made)

        async def first() -> tuple[bytes, AsyncGenerator[bytes, None]]:
            job, reply = await begin()
            pieces = _pieces(job, ChatWriter.open(reply, wishes, service.replies))
            return await anext(pieces), pieces

        if not body.stream:
            return await attended(request, whole())
        piece, rest = await attended(request, first())
        return Streamed(
            piece,
            rest,
            media_type="text/event-stream",
            ping_s=service.settings.ping_s,
            stall_s=service.settings.stall_s,
        )

    return router


async def _pieces(job: Job, writer: ChatWriter) -> AsyncGenerator[bytes, None]:
    """The stream. An error before the first piece is raised, for it can still have a status."""
    began = False
    async with aclosing(job.events()) as events:
        try:
            async for event in events:
                chunks = writer.chunks(event)
                if chunks:
                    began = True
                    yield b"".join(map(sse, chunks))
        except ApiError as error:
            if not began:
                raise
            yield sse(error.in_stream())
        except Exception:
            # A fault of ours; the client's going is no Exception.
            job.blame = "unknown"
            if not began:
                raise
            log.exception("a stream failed while it was written")
            yield sse(internal().in_stream())
    yield DONE


# ---- reading -------------------------------------------------------------------------------------


def read_chat(
    body: ChatRequest, service: Service
) -> tuple[Wishes, list[dict[str, str]], dict[str, Any]]:
    """What the answer has to look like, the conversation, and `Options` for the pipeline.

    Raises:
        ApiError: names the field at fault.
    """
    check_model(body.model, service.names)
    _check_extras(body)
    talker = _talker_sampling(body, service)
    _stage_sampling(body, 2, service)
    modalities = _modalities(body, service, talker)
    is_stream, audio = bool(body.stream), body.audio
    options = body.stream_options
    if options is not None and not is_stream:
        raise invalid("stream_options", "stream_options is allowed only with stream: true")
    if audio is not None and is_stream and audio.format not in (None, "pcm16", "pcm"):
        raise unsupported(
            "audio.format",
            f"audio.format is {audio.format!r}; with stream: true and an audio object it must be "
            "'pcm16'. For a WAV per chunk leave out the audio object, for other formats the stream",
        )
    wishes = Wishes(
        dialect="vllm-omni" if audio is None else "openai",
        text="text" in modalities,
        audio="audio" in modalities,
        audio_format="wav" if audio is None or audio.format is None else audio.format,
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        stage_metrics=bool(body.return_stage_metrics),
        token_ids=bool(body.return_token_ids),
        stages=service.omni.model.config.stages,
    )
    voices = {
        "audio.voice": None if audio is None else audio.voice,
        "voice": body.voice,
        "speaker": body.speaker,
    }
    return (
        wishes,
        _conversation(body.messages, service.replies),
        {
            "speak": wishes.audio,
            "speaker": speaker_of(voices, service.speakers),
            "sampling": _thinker_sampling(body, service),
            "talker_sampling": talker,
            "initial_codec_chunk_frames": body.initial_codec_chunk_frames,
        },
    )


def _modalities(
    body: ChatRequest, service: Service, talker: Mapping[str, Any]
) -> Sequence[Modality]:
    possible: list[Modality] = [
        stage.output for stage in service.omni.model.config.stages if stage.output is not None
    ]
    if body.modalities is not None:
        for modality in body.modalities:
            if modality not in possible:
                raise unsupported(
                    "modalities",
                    f"this model has no {modality} output; it has {', '.join(possible)}",
                )
        return body.modalities
    about_sound = (body.audio, body.voice, body.speaker, body.initial_codec_chunk_frames)
    if talker or any(field is not None for field in about_sound):
        return possible
    return service.settings.default_modalities


def _check_extras(body: ChatRequest) -> None:
    known = {*ChatRequest.model_fields, *IRRELEVANT, *NOT_HONOURED}
    for name, value in (body.model_extra or {}).items():
        if name in IRRELEVANT or value is None:
            continue
        if name not in NOT_HONOURED:
            raise invalid(name, f"unknown field {echo(name)}{nearest(name, known)}")
        if value not in NOT_HONOURED[name]:
            neutral = NOT_HONOURED[name]
            allowed = f"allowed is {' or '.join(map(repr, neutral))}" if neutral else "leave it out"
            raise unsupported(name, f"{name} is not supported here; {allowed}")


def _conversation(messages: Sequence[ChatMessage], replies: Replies) -> list[dict[str, str]]:
    turns: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.tool_calls or message.function_call:
            raise unsupported(f"{where}.tool_calls", f"{where}: this model has no tools")
        text = _text(message, where)
        if not text and message.role == "assistant" and message.audio is not None:
            text = replies.transcript(message.audio.id)
            if text is None:
                raise invalid(
                    f"{where}.audio.id",
                    f"{where}.audio.id {echo(message.audio.id)} is unknown or has expired; send "
                    "what was said as the message's content",
                )
        if text is None:
            raise invalid(f"{where}.content", f"{where}.content is missing")
        check_unicode(f"{where}.content", text)
        if message.role == "user" and not text.strip():
            raise invalid(f"{where}.content", f"{where}.content is empty")
        turns.append({"role": "system" if message.role == "developer" else message.role,
                      "content": text})  # fmt: skip
    return turns


def _text(message: ChatMessage, where: str) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for number, part in enumerate(message.content):
        place = f"{where}.content[{number}]"
        if part.type != "text":
            raise unsupported(
                f"{place}.type",
                f"{place}.type is {echo(part.type)}; this server takes text only, so allowed is "
                "'text'",
            )
        if part.text is None:
            raise invalid(f"{place}.text", f"{place}.text is missing")
        texts.append(part.text)
    return "".join(texts)


def _thinker_sampling(body: ChatRequest, service: Service) -> dict[str, Any]:
    given = body.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    limit = body.max_completion_tokens
    if limit is not None:
        if given.get("max_tokens", limit) != limit:
            raise invalid("max_completion_tokens", "max_completion_tokens contradicts max_tokens")
        given["max_tokens"] = limit
    stops = given.get("stop")
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} strings; allowed are up to {MAX_STOPS}")
    return {**_checked(given, ""), **_stage_sampling(body, 0, service)}


def _talker_sampling(body: ChatRequest, service: Service) -> dict[str, Any]:
    given = _stage_sampling(body, 1, service)
    end = service.omni.frontend.spec.talker.codec_ids.eos
    if given.get("stop_token_ids", []) not in ([], [end]):
        raise unsupported(
            "sampling_params_list[1].stop_token_ids",
            f"the Talker ends at its own end code and at no other; allowed is [{end}]",
        )
    return given


def _stage_sampling(body: ChatRequest, index: int, service: Service) -> dict[str, Any]:
    """What `sampling_params_list` says for a stage; checked, also where a stage draws nothing."""
    dicts = body.sampling_params_list or []
    if len(dicts) > len(service.stages):
        raise invalid(
            "sampling_params_list",
            f"sampling_params_list has {len(dicts)} entries; the stages are "
            f"{', '.join(service.stages)}, and the last ones may be left out",
        )
    if index >= len(dicts):
        return {}
    given = {name: value for name, value in dicts[index].items() if name != DETOKENIZE}
    return _checked(given, f"sampling_params_list[{index}].")


def _checked(given: dict[str, Any], where: str) -> dict[str, Any]:
    """`given` as `merge_sampling` takes it. What depends on the prompt is checked with it."""
    if given.get("top_k") == -1:
        # vLLM's way of saying that it is off.
        given = {**given, "top_k": 0}
    for name, value in given.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                check_unicode(f"{where}{name}", item)
    try:
        merge_sampling(SamplingParams(), given)
    except InvalidRequest as error:
        raise invalid(f"{where}{error.param}", f"{where}{error}") from error
    return given
