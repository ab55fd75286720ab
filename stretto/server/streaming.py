"""A client at one end, a pipeline request at the other: who ends whom, and what is counted.

    route ── attended(...) ──> first piece, or an error that still has a status
          ── Streamed ───────> the rest; every piece is one send

    client gone ──> writer cancelled ──> pieces closed ──> job closed ──> aborted in every stage

A stream is written by one task while another listens for the client's going; the events that wait
for a slow reader are bounded by the request's own limits on text and sound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stretto.api import Delta
from stretto.errors import RequestFailed, StageFailed, StrettoError, TransferFailed
from stretto.events import AudioDelta, Failed, Finished, TextDelta
from stretto.metrics import SoundClock, TextClock
from stretto.pipeline.pipeline import Pipeline, PipelineRequest, RequestHandle
from stretto.server.errors import from_stretto, from_submission
from stretto.server.meters import FailureReason, Meters

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
# JSON lets these stand in a string; a client that reads lines takes them for ends of lines.
LINE_ENDS = {"\u0085": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}
# Proxies hold a stream back unless told not to.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection; nobody hears the answer."""


class Job:
    """One pipeline request on behalf of a client, counted once however it ends."""

    def __init__(self, pipeline: Pipeline, request: PipelineRequest, meters: Meters) -> None:
        self._pipeline = pipeline
        self._request = request
        self._meters = meters
        self._handle: RequestHandle | None = None
        self._began_s = 0.0
        self._ended = False
        # Why it counts as failed if it is left before its end.
        self.blame: FailureReason = "client_disconnect"

    def start(self) -> RequestHandle:
        """Submits the request, if that is not done yet; then it must be read or left.

        Raises:
            ApiError: it could not be submitted.
        """
        if self._handle is None:
            try:
                self._handle = self._pipeline.submit(self._request)
            except StrettoError as error:
                raise from_submission(error) from error
            self._began_s = time.monotonic()
        return self._handle

    def feed(self, text: str) -> None:
        """The next piece of a text that is still being written."""
        self.start().feed(text)

    def end_text(self) -> None:
        self.start().end_text()

    def leave(self) -> None:
        """Takes the request back unless it has ended, or was never started."""
        if self._handle is None or self._ended:
            return
        self._ended = True
        self._pipeline.abandon(self._handle.request_id)
        self._meters.failed(self.blame)
        log.info("%s was left before its end: %s", self._request.label, self.blame)

    async def events(self) -> AsyncGenerator[Delta, None]:
        """Starts the request; its deltas and `Finished`. Leaving earlier aborts it.

        Raises:
            ApiError: it could not be submitted, or it failed.
        """
        handle = self.start()
        text, sound = TextClock(), SoundClock()
        try:
            async for event in handle:
                now_s = time.monotonic() - self._began_s
                match event:
                    case TextDelta():
                        gaps = text.arrived(now_s, len(event.token_ids))
                        self._meters.text_arrived(gaps)
                    case AudioDelta():
                        sound.arrived(now_s, len(event.samples) / event.sample_rate)
                    case Finished():
                        self._ended = True
                        self._meters.finished(self._request, event, text, sound)
                    case Failed(error=failure):
                        self._ended = True
                        self._meters.failed(_reason(failure))
                        raise from_stretto(failure) from failure
                yield event
        finally:
            self.leave()


def _reason(error: RequestFailed) -> FailureReason:
    return "stage_error" if isinstance(error, StageFailed | TransferFailed) else "unknown"


def sse(body: Any, *, event: str | None = None) -> bytes:
    """One server-sent event. The bench reads no CRLF, and wants no `event:` line in a chat."""
    data = msgspec.json.encode(body)
    if not data.isascii():
        for line_end, escaped in LINE_ENDS.items():
            data = data.replace(line_end.encode(), escaped)
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


async def attended(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, as long as the client is there; its going cancels `work`.

    Raises:
        ClientGone: it went. Besides, whatever `work` raises.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await ended(working, gone)


class Streamed(Response):
    """A response whose first piece exists already and whose others are being made."""

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        stall_s: float,
        ping_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`ping_s` is the silence after which a comment is sent, in formats that have comments."""
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({**STREAM_HEADERS, **(headers or {})})
        self._first = first
        self._rest = rest
        self._stall_s = stall_s
        self._ping_s = ping_s
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_s = time.monotonic()
        writing = asyncio.create_task(self._write(send))
        others = [asyncio.create_task(_disconnected(receive))]
        if self._ping_s is not None:
            others.append(asyncio.create_task(self._keep_alive(send, self._ping_s)))
        try:
            await asyncio.wait({writing, others[0]}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await ended(writing, *others)
            await self._rest.aclose()

    async def _write(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        try:
            await self._put(self._first, send)
            async for piece in self._rest:
                await self._put(piece, send)
        except TimeoutError:
            log.warning("a client took nothing for %.0f s; its stream is cut", self._stall_s)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, piece: bytes, send: Send) -> None:
        async with asyncio.timeout(self._stall_s):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sent_s = time.monotonic()

    async def _keep_alive(self, send: Send, ping_s: float) -> None:
        while True:
            await asyncio.sleep(max(self._sent_s + ping_s - time.monotonic(), ping_s / 10))
            if time.monotonic() - self._sent_s >= ping_s:
                await self._put(PING, send)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancels what still runs and waits for its clean-up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
