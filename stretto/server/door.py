"""What every HTTP request passes on its way in and out, whatever its route.

    in    request id, draining, API key, size of the body
    out   request id, last resort for errors, the HTTP figures

Plain ASGI, so that streams and the client's going reach the routes untouched.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.server.errors import ApiError, internal, shutting_down
from stretto.server.meters import Meters

log = logging.getLogger(__name__)

GUARDED = "/v1"
# What operators ask all the time is no traffic.
UNMEASURED = {"/metrics", "/health", "/load", "/ping", "/version"}
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
# What a client's own id may look like; it goes into headers and logs.
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Who is inside, and whether anybody else may come in."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_inside = 0


class Door:
    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate,
        meters: Meters,
        api_keys: Sequence[str],
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._gate = gate
        self._meters = meters
        self._api_keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope, receive, send, self._max_body_bytes)
        if scope["type"] == "websocket":
            await self._socket(scope, visit)
            return
        is_guarded = scope["path"].startswith(GUARDED) and scope["method"] != "OPTIONS"
        self._gate.num_inside += is_guarded
        try:
            refusal = self._refusal(visit) if is_guarded else None
            if refusal is not None:
                await refusal.response()(scope, visit.receive, visit.send)
                return
            await self._app(scope, visit.receive, visit.send)
        except Exception:
            log.exception("%s %s %s", visit.request_id, scope["method"], scope["path"])
            if visit.status is not None:
                # The response has begun: only a broken transfer can still tell the client.
                return
            await internal().response()(scope, visit.receive, visit.send)
        finally:
            self._gate.num_inside -= is_guarded
            self._note(visit)

    async def _socket(self, scope: Scope, visit: _Visit) -> None:
        """A WebSocket. Idle ones are not waited for at the end, so the gate does not count them."""
        meters = self._meters
        refusal = self._refusal(visit) if scope["path"].startswith(GUARDED) else None
        if refusal is not None:
            await refusal.response()(scope, visit.receive, visit.send)
            return
        visit.on_accept = lambda: meters.socket_opened(visit.handler)
        try:
            await self._app(scope, visit.receive, visit.send)
        except Exception:
            log.exception("%s %s", visit.request_id, scope["path"])
            with contextlib.suppress(Exception):
                await visit.send({"type": "websocket.close", "code": 1011})
        finally:
            seconds = time.monotonic() - visit.began_s
            log.debug("%s %s: closed after %.3f s", visit.request_id, scope["path"], seconds)
            if visit.is_accepted:
                meters.socket_closed(visit.handler, seconds)

    def _refusal(self, visit: _Visit) -> ApiError | None:
        if self._gate.is_draining:
            return shutting_down()
        if self._api_keys and not self._knows(visit.headers.get("authorization", "")):
            return ApiError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        if visit.announced_bytes > self._max_body_bytes:
            return ApiError(413, visit.too_large)
        return None

    def _knows(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        key = given.strip().encode()
        # All keys are compared, and each in constant time.
        matches = [hmac.compare_digest(key, own) for own in self._api_keys]
        return scheme.lower() == "bearer" and any(matches)

    def _note(self, visit: _Visit) -> None:
        seconds = time.monotonic() - visit.began_s
        # What went well is logged by the pipeline, with its figures.
        level = logging.DEBUG if visit.status is not None and visit.status < 400 else logging.INFO
        words = (visit.request_id, visit.method, visit.path, visit.status, seconds)
        log.log(level, "%s %s %s: %s after %.3f s", *words)
        if visit.path not in UNMEASURED and visit.status is not None:
            method = visit.method if visit.method in METHODS else "other"
            self._meters.http(
                handler=visit.handler, method=method, status=visit.status, seconds=seconds
            )


class _Visit:
    """One request or WebSocket while it is inside; its `receive` and `send` are the app's."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.headers = Headers(scope=scope)
        self.method: str = scope.get("method", "WEBSOCKET")
        self.path: str = scope["path"]
        own = self.headers.get("x-request-id", "")
        self.request_id = own if REQUEST_ID.fullmatch(own) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = self.request_id
        self.began_s = time.monotonic()
        self.status: int | None = None
        self.is_accepted = False
        self.on_accept: Callable[[], None] = lambda: None
        self.too_large = f"the body is larger than {max_body_bytes} bytes"
        length = self.headers.get("content-length", "")
        self.announced_bytes = int(length) if length.isdecimal() else 0
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._num_bytes = 0

    @property
    def handler(self) -> str:
        """The route's path as it is declared, so that no client can make up series."""
        route = self._scope.get("route")
        return "none" if route is None else str(route.path)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._max_body_bytes:
                raise HTTPException(413, self.too_large)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        elif message["type"] == "websocket.http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        elif message["type"] == "websocket.accept":
            self.is_accepted = True
            self.on_accept()
        await self._send(message)
