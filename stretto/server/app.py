"""The application: routes, the door before them, and how errors leave."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from stretto._version import __version__
from stretto.api import DEFAULT_CACHE, AsyncOmni
from stretto.errors import StrettoError
from stretto.server.chat import chat_routes
from stretto.server.door import Door
from stretto.server.errors import ApiError, from_http, from_stretto, from_validation
from stretto.server.health import health_routes
from stretto.server.protocol import flatten
from stretto.server.service import Service
from stretto.server.settings import ServerSettings
from stretto.server.speech import speech_routes
from stretto.server.speech_model import SpeechModel
from stretto.server.speech_socket import socket_routes
from stretto.server.streaming import ClientGone
from stretto.server.takes import Studio
from stretto.server.voice_routes import voice_routes
from stretto.server.voice_store import VoiceStore

# nginx's word for it; nobody is there to read it, but it is counted.
CLIENT_CLOSED_REQUEST = 499


def create_app(
    omni: AsyncOmni, settings: ServerSettings, *, speech: SpeechModel | None = None
) -> FastAPI:
    """The application over a started pipeline; its `state.service` is for whoever runs it.

    `speech` is what reads texts out, for models that can.
    """
    service = Service(omni, settings)
    app = FastAPI(title="stretto", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(chat_routes(service))
    voices_dir = settings.voices_dir or (settings.cache_dir or DEFAULT_CACHE) / "voices"
    studio = Studio(service, speech, VoiceStore(voices_dir))
    for routes in (speech_routes, voice_routes, socket_routes):
        app.include_router(routes(studio))
    app.include_router(health_routes(service))
    _register_errors(app)
    app.add_middleware(
        Door,
        gate=service.gate,
        meters=service.meters,
        api_keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
    )
    # Outside of the door, so that a browser's own questions need no key.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
    return app


def _register_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(StrettoError)
    async def ours(request: Request, error: StrettoError) -> Response:
        return from_stretto(error).response()

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error, _flat(error.body)).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return from_http(error, method=request.method, path=request.url.path).response()

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _flat(body: object) -> object:
    """The body as its model saw it; one that contradicts itself as it came."""
    try:
        return flatten(body)
    except ValueError:
        return body
