"""A server process from its first line to its last: load, say so, serve, drain, end.

    SIGTERM, SIGINT   while loading    stop at once
                      first            refuse new requests (503), let the running ones finish for
                                       `drain_s`, end those that did not, close the pipeline
                      second           do not wait for them

The port is taken before the model is loaded, so that a port in use is known at once, and opened
after the warm-up, so that whoever gets through gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from rich.console import Console
from rich.markup import escape

from stretto._version import __version__
from stretto.api import DEFAULT_CACHE, AsyncOmni
from stretto.errors import ConfigError
from stretto.pipeline.tts_frontend import TtsFrontend
from stretto.server.app import create_app
from stretto.server.service import Service
from stretto.server.settings import ServerSettings
from stretto.server.speech_model import SpeechModel
from stretto.server.speech_socket import MAX_MESSAGE_BYTES
from stretto.server.tts_model import TtsModel

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# From the pipeline's end until the last stream has sent its error and is closed.
CLOSE_S = 5


def serve(settings: ServerSettings) -> int:
    """Serves until told to stop; the process's exit status.

    Raises:
        ConfigError, CheckpointError, StageFailed: it did not come up, and nothing is left running.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("stretto").setLevel(settings.log_level.upper())
    with _bound(settings.host, settings.port) as listener:
        return asyncio.run(_serve(settings, listener))


async def _serve(settings: ServerSettings, listener: socket.socket) -> int:
    console = Console(soft_wrap=True, highlight=False)
    stop = _StopSignals()
    omni = AsyncOmni(
        settings.model,
        deploy_config=settings.deploy_config,
        async_chunk=settings.async_chunk,
        trace=settings.trace,
        cache_dir=settings.cache_dir or DEFAULT_CACHE,
    )
    console.print(f"stretto {__version__}: loading {escape(settings.model)} ...")
    began_s = time.monotonic()
    starting = asyncio.create_task(omni.start())
    stopped = asyncio.create_task(stop.first.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return 0
    starting.result()
    try:
        app = create_app(omni, settings, speech=_speech_model(omni))
        server = _Server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await serving
        _print_banner(console, omni)
        _print_ready(console, listener, app.state.service, time.monotonic() - began_s)
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _drain(app.state.service, stop, console)
            # What still runs ends with an error now, and its streams with it.
            await omni.close()
            server.should_exit = True
        await serving
    finally:
        await omni.close()
    console.print("stopped")
    return 0


def _speech_model(omni: AsyncOmni) -> SpeechModel | None:
    return TtsModel(omni.frontend) if isinstance(omni.frontend, TtsFrontend) else None


async def _drain(service: Service, stop: _StopSignals, console: Console) -> None:
    """Waits for the requests inside: until they are done, too late, or nobody wants to wait."""
    gate, settings = service.gate, service.settings
    gate.is_draining = True
    if gate.num_inside:
        console.print(
            f"draining: {gate.num_inside} requests have {settings.drain_s:.0f} s to finish; "
            "a second signal ends them now"
        )
    deadline_s = time.monotonic() + settings.drain_s
    while gate.num_inside and time.monotonic() < deadline_s and not stop.second.is_set():
        await asyncio.sleep(0.05)


class _StopSignals:
    """Counts SIGTERM and SIGINT. For the event loop's thread, in the process's main thread."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class _Server(uvicorn.Server):
    """uvicorn, with its signal handlers left to us."""

    def __init__(self, app: Callable[..., Any]) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="websockets-sansio",
            ws_max_size=MAX_MESSAGE_BYTES + 2**16,
            # Sound does not get smaller.
            ws_per_message_deflate=False,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=CLOSE_S,
        )
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            # Somebody else bound the port in the same moment and listened first.
            raise ConfigError(f"the port cannot be listened on: {error.strerror}") from error
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the address and does not listen yet. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host}: {error.strerror}") from error
    with socket.socket(family, kind, proto) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"{host} port {port}: {error.strerror}; choose another with --port"
            ) from error
        yield listener


def _print_banner(console: Console, omni: AsyncOmni) -> None:
    """One line per stage: what it is, where it runs, and what it took."""
    pipeline = omni.pipeline
    for stage in omni.model.config.stages:
        ready = pipeline.ready_stages[stage.name]
        console.print(
            f"  {stage.name:<10} {stage.model:<22} device {stage.devices}, dtype {stage.dtype}, "
            f"{ready.num_threads} thread{'s' if ready.num_threads > 1 else ''}, "
            f"up to {stage.max_num_seqs} at once, pid {pipeline.stage_pids[stage.name]}, "
            f"loaded in {ready.load_s:.1f} s"
        )
    chunking = "on" if omni.model.config.async_chunk else "off"
    speakers = ", ".join(omni.frontend.speakers) or "none of its own"
    console.print(f"  async_chunk is {chunking}; speakers: {speakers}")


def _print_ready(
    console: Console, listener: socket.socket, service: Service, seconds: float
) -> None:
    host, port = listener.getsockname()[:2]
    # An address to listen on is not always one to call.
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if service.settings.api_keys else ""
    console.print(f"ready after {seconds:.1f} s: {url}/v1 (model {escape(service.names[0])})")
    console.print("try:", style="dim")
    path, body = (
        "chat/completions",
        (
            '{"stream": true, "max_tokens": 50, "messages": [{"role": "user", "content": '
            '"Computers can learn to speak."}]}'
        ),
    )
    if isinstance(service.omni.frontend, TtsFrontend):
        path, body = "audio/speech", '{"input": "Computers can learn to speak."}'
    to = " -o speech.mp3" if path == "audio/speech" else ""
    console.out(
        f"  curl -sN {url}/v1/{path} -H 'Content-Type: application/json'{key}{to} -d '{body}'"
    )
