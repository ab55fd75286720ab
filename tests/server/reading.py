"""A pipeline that can be read: each character of a text is a frame, and its sound is its number.

So a test reads what was said back out of the samples, to the letter. `\\a` in a text fails the
request there; a text with `\\x01` is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from stretto.errors import InvalidRequest, Overloaded, RequestAborted, StageFailed
from stretto.events import AudioDelta, Event, Failed, Finished, Timings, Usage
from stretto.server.app import create_app
from stretto.server.settings import ServerSettings
from stretto.server.speech_model import SpeechInput, TaskType
from tests.server.conftest import WAIT_S, LocalServer

RATE = 24000
FRAME = 48
FRAMES_PER_DELTA = 4


def sound_of(text: str) -> np.ndarray:
    return np.repeat(np.array([ord(c) for c in text], np.float32) / 32767, FRAME)


def text_of(pcm: bytes) -> str:
    samples = np.frombuffer(pcm, "<i2").reshape(-1, FRAME)
    assert (samples == samples[:, :1]).all(), "a frame is cut"
    return "".join(chr(value) for value in samples[:, 0])


class ReadRequest:
    """What the pipeline gets; `sampling` and `label` are what the server looks at."""

    def __init__(self, speech: SpeechInput) -> None:
        self.speech = speech
        self.sampling = SimpleNamespace(max_tokens=speech.sampling.get("max_tokens", 10_000))
        self.label = speech.label


class ReadHandle:
    def __init__(self, pipeline: ReadingPipeline, request: ReadRequest, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self._pipeline = pipeline
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._text: asyncio.Queue[str | None] = asyncio.Queue()
        if not request.speech.pieces:
            self.feed(request.speech.text)
            self.end_text()
        self.working = asyncio.create_task(self._work())

    def feed(self, text: str) -> None:
        self._text.put_nowait(text)

    def end_text(self) -> None:
        self._text.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return

    def end(self, event: Finished | Failed) -> None:
        if self._pipeline.live.pop(self.request_id, None) is not None:
            self._events.put_nowait(event)

    async def _work(self) -> None:
        limit, said, num_read = self.request.sampling.max_tokens, 0, 0
        while (text := await self._text.get()) is not None and said < limit:
            num_read += len(text)
            for at in range(0, len(text), FRAMES_PER_DELTA):
                await asyncio.sleep(self._pipeline.delta_s)
                part = text[at : at + FRAMES_PER_DELTA][: limit - said]
                if "\a" in part:
                    self.end(Failed(StageFailed("talker", "it cannot say that")))
                    return
                if not part:
                    break
                said += len(part)
                self._events.put_nowait(AudioDelta(sound_of(part), RATE, len(part), None))
        reason = "length" if said >= limit else "stop"
        self.end(
            Finished(
                text_reason=None,  # type: ignore[arg-type]
                audio_reason=reason,
                usage=Usage(prompt_tokens=num_read, text_tokens=0, audio_tokens=said),
                timings=Timings(ttft_s=None, ttfp_s=0.1, e2e_s=0.2, rtf=0.5),
            )
        )


class ReadingPipeline:
    def __init__(self, max_requests: int) -> None:
        self.live: dict[str, ReadHandle] = {}
        self.requests: list[ReadRequest] = []
        self.most_at_once = 0
        # How long a delta takes.
        self.delta_s = 0.0
        self.max_requests = max_requests
        self._ids = itertools.count()
        self.stage_loads: dict[str, Any] = {}
        self.dead_stages: dict[str, str] = {}

    def submit(self, request: ReadRequest) -> ReadHandle:
        if len(self.live) >= self.max_requests:
            raise Overloaded("full")
        self.requests.append(request)
        handle = ReadHandle(self, request, f"r{next(self._ids)}")
        self.live[handle.request_id] = handle
        self.most_at_once = max(self.most_at_once, len(self.live))
        return handle

    def abandon(self, request_id: str) -> None:
        handle = self.live.get(request_id)
        if handle is not None:
            handle.working.cancel()
            handle.end(Failed(RequestAborted("taken back")))

    @property
    def num_in_flight(self) -> int:
        return len(self.live)

    @property
    def is_empty(self) -> bool:
        return not self.live


class ReadingModel:
    """Remembers what it was asked for."""

    def __init__(self, kinds: Sequence[TaskType], speakers: Sequence[str]) -> None:
        self.kinds = kinds
        self.speakers = speakers
        self.languages = ("auto", "Chinese", "English")
        self.asked: list[SpeechInput] = []

    def prepare(self, speech: SpeechInput) -> Any:
        self.asked.append(speech)
        if speech.sampling.get("max_tokens", 0) > 9999:
            raise InvalidRequest("max_tokens", "at most 9999")
        if "\x01" in speech.text:
            raise InvalidRequest("input", "no control characters")
        return ReadRequest(speech)


class ReadingServer(LocalServer):
    """A whole application over such a pipeline."""

    def __init__(
        self,
        runner: asyncio.Runner,
        directory: Path,
        *,
        kinds: Sequence[TaskType] = ("CustomVoice", "VoiceDesign", "Base"),
        speakers: Sequence[str] = ("ryan", "vivian"),
        max_requests: int = 64,
        **settings: Any,
    ) -> None:
        self.runner = runner
        self.pipeline = ReadingPipeline(max_requests)
        self.model = ReadingModel(kinds, speakers)
        stage = SimpleNamespace(name="talker", output="audio")
        self.omni: Any = SimpleNamespace(
            pipeline=self.pipeline,
            model=SimpleNamespace(
                name="tiny", directory=directory, config=SimpleNamespace(stages=(stage,))
            ),
            frontend=SimpleNamespace(speakers=speakers, context_lengths={"talker": 1000}),
        )
        self.app = create_app(
            self.omni,
            ServerSettings(
                model="tiny", served_model_names=("m",), voices_dir=directory / "voices", **settings
            ),
            speech=self.model,
        )

    def say(self, text: str, **fields: Any) -> Any:
        body = {"input": text, "response_format": "pcm", **fields}
        return self.post("/v1/audio/speech", body)

    @asynccontextmanager
    async def at_a_port(self) -> AsyncIterator[str]:
        """The same with a network; HOST:PORT."""
        config = uvicorn.Config(
            self.app, port=0, lifespan="off", log_config=None, ws="websockets-sansio"
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = uvicorn.Server(config)
            serving = asyncio.create_task(running.serve(sockets=[listener]))
            try:
                yield f"127.0.0.1:{listener.getsockname()[1]}"
            finally:
                running.should_exit = True
                await serving

    @asynccontextmanager
    async def session(self, **config: Any) -> AsyncIterator[Talk]:
        """A speech socket; with `config` already sent."""
        async with self.at_a_port() as address:
            url = f"ws://{address}/v1/audio/speech/stream"
            async with connect(url, max_size=None) as connection:
                talk = Talk(connection)
                if config:
                    await talk.send(type="session.config", **config)
                yield talk

    async def until_empty(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.pipeline.live:
                await asyncio.sleep(0.002)


class Talk:
    """The client's end of a speech socket."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **message: Any) -> None:
        await self.connection.send(json.dumps(message))

    async def write(self, *pieces: str, done: bool = True) -> None:
        for piece in pieces:
            await self.send(type="input.text", text=piece)
        if done:
            await self.send(type="input.done")

    async def next(self) -> Any:
        """A message, or the bytes of a frame."""
        async with asyncio.timeout(WAIT_S):
            message = await self.connection.recv()
        return message if isinstance(message, bytes) else json.loads(message)

    async def until(self, kind: str) -> list[Any]:
        """Everything up to the first message of that type."""
        seen: list[Any] = []
        while not seen or isinstance(seen[-1], bytes) or seen[-1]["type"] != kind:
            seen.append(await self.next())
        return seen

    async def closed(self) -> int | None:
        async with asyncio.timeout(WAIT_S):
            await self.connection.wait_closed()
        return self.connection.close_code


def sentences_of(messages: list[Any]) -> list[tuple[str, bytes, bool]]:
    """Of each sentence its text, its bytes and whether it failed; the protocol is checked."""
    found: list[tuple[str, bytes, bool]] = []
    started: dict[str, Any] | None = None
    sound = b""
    for message in messages:
        if isinstance(message, bytes):
            assert started is not None and message
            sound += message
        elif message["type"] == "audio.start":
            assert started is None
            started, sound = message, b""
        elif message["type"] == "audio.done":
            assert started is not None
            for name in ("utterance_index", "sentence_index"):
                assert message[name] == started[name]
            assert message["total_bytes"] == len(sound)
            found.append((started["sentence_text"], sound, message["error"]))
            started = None
    assert started is None
    return found
