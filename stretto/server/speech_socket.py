"""WebSocket `/v1/audio/speech/stream`: text comes while it is being written, sound goes back.

    client                                   server
    session.config   (again between utterances)
    input.text ...
    input.done       ends an utterance       audio.start, frames, audio.done ...; session.done
    session.close    as input.done, and      ... the connection closes when all has been said

One task reads and one speaks, utterance by utterance, so that the client's going is noticed at once
and ends whatever is under way. How an utterance becomes requests:

    split_granularity none                   one request at input.done
    split_granularity sentence, clause       a request for each, as soon as it is certain
    text_streaming                           one request at the first word, fed with what follows

Every audio.start has one audio.done. A client's error is answered by an error and ends nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from stretto.sentences import Splitter
from stretto.server.errors import (
    ApiError,
    check_unicode,
    checked,
    echo,
    internal,
    invalid,
    shutting_down,
)
from stretto.server.protocol import (
    AudioDone,
    AudioStart,
    InputText,
    SessionConfig,
    SessionDone,
    SocketError,
    SocketEvent,
)
from stretto.server.speech_model import SpeechInput
from stretto.server.streaming import ClientGone, ended
from stretto.server.takes import (
    Studio,
    Take,
    encoded,
    open_stream,
    sample_rate_of,
    whole_file,
    with_seed,
)

log = logging.getLogger(__name__)

# vllm-omni's limits.
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_TEXT_BYTES = 128 * 2**10
# Utterances that wait behind the one that is being spoken.
MAX_WAITING = 16
MESSAGES = ("session.config", "input.text", "input.done", "session.close")

NORMAL, GOING_AWAY, POLICY = 1000, 1001, 1008


def socket_routes(studio: Studio) -> APIRouter:
    router = APIRouter()

    @router.websocket("/v1/audio/speech/stream")
    async def stream(socket: WebSocket) -> None:
        try:
            _check_origin(socket.headers.get("origin"), studio.service.settings.allowed_origins)
            _ = studio.model
        except ApiError as error:
            await socket.send_denial_response(error.response())
            return
        await socket.accept()
        await _Session(studio, socket).run()

    return router


def _check_origin(origin: str | None, allowed: Sequence[str]) -> None:
    """Browsers let any page open a socket, and only say which. Raises ApiError."""
    if origin is not None and "*" not in allowed and origin not in allowed:
        raise ApiError(403, f"pages of {echo(origin)} may not use this server")


class _Utterance:
    """Text up to an `input.done`, in pieces to be spoken; written by one task, read by another."""

    def __init__(
        self, index: int, config: SessionConfig, speech: SpeechInput, *, max_chars: int
    ) -> None:
        self.index = index
        self.config = config
        self.speech = speech
        self.num_chars = 0
        self.written = asyncio.Event()
        self._splitter: Splitter | None = None
        if config.split_granularity != "none":
            self._splitter = Splitter(granularity=config.split_granularity, max_chars=max_chars)
        self._kept = ""
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()

    def push(self, text: str) -> None:
        self.num_chars += len(text)
        if self.config.text_streaming:
            self._put([text])
        elif self._splitter is not None:
            self._put(self._splitter.push(text))
        else:
            self._kept += text

    def end(self) -> None:
        self._put([self._kept] if self._splitter is None else self._splitter.finish())
        self.written.set()
        self._pieces.put_nowait(None)

    def _put(self, pieces: list[str]) -> None:
        for piece in pieces:
            if piece:
                self._pieces.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[str]:
        """To be iterated once."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


class _Session:
    def __init__(self, studio: Studio, socket: WebSocket) -> None:
        self._studio = studio
        self._socket = socket
        self._settings = studio.service.settings
        self._label: str = socket.state.request_id
        # None until there is a valid one, since when nobody spoke.
        self._config: tuple[SessionConfig, SpeechInput] | None = None
        # The utterance that is being written.
        self._current: _Utterance | None = None
        self._indices = itertools.count()
        # Those that are to be spoken, the one being spoken not among them; None: no more come.
        self._waiting: asyncio.Queue[_Utterance | None] = asyncio.Queue()
        self._spoken: _Utterance | None = None
        self._is_closing = False
        self._active_s = time.monotonic()

    async def run(self) -> None:
        reading = asyncio.create_task(self._read())
        speaking = asyncio.create_task(self._speak())
        code = NORMAL
        try:
            await asyncio.wait({reading, speaking}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                code = reading.result()
            else:
                speaking.result()
        except ClientGone:
            return
        finally:
            await ended(reading, speaking)
        await self._socket.close(code)

    # ---- reading ---------------------------------------------------------------------------------

    async def _read(self) -> int:
        """Takes messages until nothing more is to come; the code to close with.

        Raises:
            ClientGone: the client closed the connection.
        """
        while True:
            try:
                message = await self._message()
            except TimeoutError:
                limit = "idle for" if self._config is not None else "without session.config for"
                seconds = self._patience_s()
                await self._send(
                    SocketError(f"the session was {limit} {seconds:g} s", None, "idle_timeout")
                )
                return GOING_AWAY if self._config is not None else POLICY
            try:
                await self._handle(message)
            except ApiError as error:
                await self._tell(error)

    async def _message(self) -> Any:
        """The next message. Raises TimeoutError, ClientGone."""
        while True:
            # What has been ended is being said, and may take its time.
            is_busy = self._spoken is not None and self._spoken.written.is_set()
            since_s = time.monotonic() if is_busy or self._is_closing else self._active_s
            left_s = since_s + self._patience_s() - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            try:
                async with asyncio.timeout(left_s):
                    message = await self._socket.receive()
            except TimeoutError:
                continue
            if message["type"] == "websocket.disconnect":
                raise ClientGone
            if self._config is not None:
                self._active_s = time.monotonic()
            return message

    def _patience_s(self) -> float:
        settings = self._settings
        return settings.socket_config_s if self._config is None else settings.socket_idle_s

    async def _handle(self, message: Any) -> None:
        """Raises ApiError."""
        text = message.get("text")
        if text is None:
            raise invalid("type", "messages are JSON texts; binary ones are not taken here")
        if len(text.encode()) > MAX_MESSAGE_BYTES:
            raise ApiError(413, f"a message has at most {MAX_MESSAGE_BYTES} bytes")
        try:
            fields = msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ApiError(400, f"the message is no JSON: {error}") from error
        kind = fields.get("type") if isinstance(fields, dict) else None
        if kind not in MESSAGES:
            raise invalid("type", f"type is {echo(kind)}; allowed are {', '.join(MESSAGES)}")
        if self._is_closing:
            raise invalid("type", f"{kind} after session.close")
        match kind:
            case "session.config":
                await self._configure(fields)
            case "input.text":
                self._write(checked(InputText, fields).text)
            case "input.done":
                self._utterance().end()
                self._current = None
            case _:
                self._is_closing = True
                if self._current is not None:
                    self._current.end()
                self._waiting.put_nowait(None)

    async def _configure(self, fields: dict[str, Any]) -> None:
        if self._current is not None:
            raise invalid("type", "session.config comes between utterances; send input.done first")
        # A wrong one leaves none: what follows is not to be heard in a voice that was not meant.
        self._config, self._active_s = None, time.monotonic()
        config = checked(SessionConfig, fields)
        if config.text_streaming and config.split_granularity != "none":
            raise invalid(
                "split_granularity",
                f"split_granularity is {config.split_granularity!r}; with text_streaming the text "
                "goes into one request, so it must be 'none'",
            )
        speech = await self._studio.read(config, label=self._label)
        self._config = config, with_seed(speech) if config.split_granularity != "none" else speech
        self._active_s = time.monotonic()

    def _write(self, text: str) -> None:
        if len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
            raise invalid("text", f"text has more than {MAX_TEXT_BYTES} bytes; send it in pieces")
        check_unicode("text", text)
        before, most = self._current, self._settings.max_input_chars
        num_chars = len(text) + (0 if before is None else before.num_chars)
        if num_chars > most:
            raise invalid(
                "text",
                f"the utterance would have {num_chars} characters; at most {most} are allowed, so "
                "this piece is left out",
            )
        self._utterance().push(text)

    def _utterance(self) -> _Utterance:
        """The one that is being written; a new one if there is none. Raises ApiError."""
        if self._current is None:
            if self._config is None:
                raise invalid("type", "session.config comes first")
            if self._studio.service.gate.is_draining:
                raise shutting_down()
            if self._waiting.qsize() >= MAX_WAITING:
                raise ApiError(
                    429, f"{MAX_WAITING} utterances are waiting to be spoken", kind="requests",
                    code="rate_limit_exceeded",
                )  # fmt: skip
            config, speech = self._config
            self._current = _Utterance(
                next(self._indices), config, speech, max_chars=self._settings.segment_chars
            )
            self._waiting.put_nowait(self._current)
        return self._current

    # ---- speaking --------------------------------------------------------------------------------

    async def _speak(self) -> None:
        """Says one utterance after the other, to the end of the session. Raises ClientGone."""
        gate = self._studio.service.gate
        while (utterance := await self._waiting.get()) is not None:
            self._spoken = utterance
            gate.num_inside += 1
            try:
                total = await self._say_utterance(utterance)
            finally:
                gate.num_inside -= 1
                self._spoken = None
            await self._send(SessionDone(utterance_index=utterance.index, total_sentences=total))

    async def _say_utterance(self, utterance: _Utterance) -> int:
        """How many sentences it had."""
        total, studio = 0, self._studio
        pieces = utterance.pieces()
        async for text in pieces:
            if utterance.config.text_streaming:
                # The first word, with whatever stood before it.
                while not text.strip():
                    following = await anext(pieces, None)
                    if following is None:
                        return total
                    text += following
                take = studio.take_in_pieces(utterance.speech, _chained(text, pieces))
            elif any(map(str.isalnum, text)):
                take = studio.take(utterance.speech, text)
            else:
                # A line of dashes, a lonely smiley: a model would make something up.
                continue
            await self._say(utterance, take, total, text)
            total += 1
        # A limit may have ended the speech before its text.
        await utterance.written.wait()
        return total

    async def _say(self, utterance: _Utterance, take: Take, index: int, text: str) -> None:
        config = utterance.config
        where = {"utterance_index": utterance.index, "sentence_index": index}
        await self._send(
            AudioStart(
                sentence_text=text,
                format=config.response_format,
                sample_rate=sample_rate_of(config),
                **where,
            )
        )
        num_bytes, reason = 0, None
        try:
            async with aclosing(self._frames(take, config)) as frames:
                async for frame in frames:
                    await self._send(frame)
                    num_bytes += len(frame)
            reason = take.finish_reason
        except ClientGone:
            raise
        except ApiError as error:
            await self._tell(error)
        except Exception:
            log.exception("%s: an utterance failed while it was spoken", self._label)
            await self._tell(internal())
        await self._send(
            AudioDone(total_bytes=num_bytes, error=reason is None, finish_reason=reason, **where)
        )

    async def _frames(self, take: Take, config: SessionConfig) -> AsyncGenerator[bytes, None]:
        if not config.stream_audio:
            yield await whole_file(take, config)
            return
        made = encoded(take, open_stream(config), self._studio.service.meters)
        async with aclosing(made):
            async for piece in made:
                yield piece

    # ---- sending ---------------------------------------------------------------------------------

    async def _tell(self, error: ApiError) -> None:
        wire = error.error
        await self._send(SocketError(wire.message, wire.param, wire.code))

    async def _send(self, event: SocketEvent | bytes) -> None:
        """Raises ClientGone, also when the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._settings.stall_s):
                if isinstance(event, bytes):
                    await self._socket.send_bytes(event)
                else:
                    await self._socket.send_text(msgspec.json.encode(event).decode())
        except (WebSocketDisconnect, RuntimeError, TimeoutError) as error:
            raise ClientGone from error
        if self._config is not None:
            self._active_s = time.monotonic()


async def _chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for piece in rest:
        yield piece
