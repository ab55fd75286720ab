"""One request over HTTP, as its client sees it: the two kinds of endpoint, all their dialects.

    openai-chat-omni      SSE; text in `content` or a transcript, sound as base64 WAV or PCM
    openai-audio-speech   a body of PCM, or SSE with base64 PCM

A request is a success only with its end event (`[DONE]`, `speech.audio.done`, the body's proper
end), with sound if it asked for sound, and without an error event: servers fail inside of a 200.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
import wave
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from stretto.bench.datasets import Prompt
from stretto.bench.load import Outcome, StageMetrics
from stretto.errors import ConfigError, RequestFailed
from stretto.metrics import Timeline

CHAT, SPEECH = "openai-chat-omni", "openai-audio-speech"
ENDPOINTS = {CHAT: "/v1/chat/completions", SPEECH: "/v1/audio/speech"}
DONE = b"[DONE]"
BYTES_PER_SAMPLE = 2


# ---- what comes, as far as it is read ------------------------------------------------------------


class _Audio(msgspec.Struct, frozen=True):
    data: str | None = None
    transcript: str | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    audio: _Audio | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    token_ids: list[int] | None = None


class _Details(msgspec.Struct, frozen=True):
    text_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    completion_tokens_details: _Details | None = None

    @property
    def text_tokens(self) -> int:
        """Codec frames count as completion too; where a server tells them apart, so do we."""
        details = self.completion_tokens_details
        if details is None or details.text_tokens is None:
            return self.completion_tokens
        return details.text_tokens


class _Metrics(msgspec.Struct, frozen=True):
    stage_metrics: dict[str, StageMetrics] = {}


class _ChatEvent(msgspec.Struct, frozen=True):
    error: Any = None
    modality: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None


class _SpeechEvent(msgspec.Struct, frozen=True):
    type: str
    error: Any = None
    audio: str | None = None
    delta: str | None = None


# ---- requests ------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what all of them say. `sample_rate` is that of sound without header."""

    backend: str
    url: str
    model: str
    sample_rate: int = 24000
    channels: int = 1
    extra_body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    ignore_eos: bool = False
    stage_metrics: bool = False
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if not self.url.endswith(ENDPOINTS[self.backend].rsplit("/v1", 1)[1]):
            raise ConfigError(
                f"{self.url}: requests of {self.backend} go to {ENDPOINTS[self.backend]}"
            )
        # What is compressed tells no duration piece by piece.
        if self.backend == SPEECH and self.extra_body.get("response_format", "pcm") != "pcm":
            raise ConfigError("sound is measured as pcm; leave response_format out of --extra-body")
        sound = self.extra_body.get("audio", {})
        if self.backend == CHAT and sound.get("format", "wav") not in ("wav", "pcm", "pcm16"):
            raise ConfigError("sound is measured as wav or pcm16; see audio.format in --extra-body")

    @property
    def sample_bytes(self) -> int:
        """Of one sample in all channels."""
        return BYTES_PER_SAMPLE * self.channels

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """What is posted. A null in `extra_body` takes a field out that a server would refuse."""
        own = self._speech_body(prompt) if self.backend == SPEECH else self._chat_body(prompt)
        whole = {**own, **prompt.extra, **self.extra_body}
        return {name: value for name, value in whole.items() if value is not None}

    def _speech_body(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": self.model,
            "input": prompt.text,
            "stream": True,
            "stream_format": "audio",
            "response_format": "pcm",
        }

    def _chat_body(self, prompt: Prompt) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if prompt.system is not None:
            messages.append({"role": "system", "content": prompt.system})
        messages.append({"role": "user", "content": [{"type": "text", "text": prompt.text}]})
        return {
            "model": self.model,
            "messages": messages,
            "modalities": ["text", "audio"],
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": prompt.max_tokens,
            "ignore_eos": self.ignore_eos or None,
            "return_stage_metrics": self.stage_metrics or None,
        }

    def wants_sound(self, body: dict[str, Any]) -> bool:
        return self.backend == SPEECH or "audio" in body.get("modalities", [])


async def ask(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> Outcome:
    """Sends one request and reads its answer to the end. A failure is an outcome too."""
    body = target.body(prompt)
    headers = {**target.headers, "x-request-id": uuid.uuid4().hex}
    reading = _Reading(target)
    error: str | None = None
    try:
        async with session.post(
            target.url,
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        ) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                raise RequestFailed(f"{response.status} {response.reason}: {text}")
            if response.content_type != "text/event-stream":
                await reading.body(response.content)
            elif target.backend == CHAT:
                await reading.chat(response.content)
            else:
                await reading.speech(response.content)
    except RequestFailed as failed:
        error = str(failed)
    except TimeoutError:
        error = f"not done within {target.timeout_s:.0f} s"
    except (aiohttp.ClientError, msgspec.MsgspecError, wave.Error, ValueError) as broken:
        error = f"{type(broken).__name__}: {broken}"
    if error is None and target.wants_sound(body) and reading.timeline.sound.duration_s == 0.0:
        error = "no sound, though it was asked for"
    return Outcome(prompt, reading.timeline, error, reading.text, reading.stages)


class _Reading:
    """What has been read of one answer."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.timeline = Timeline(time.perf_counter())
        self.timeline.is_sound_alone = target.backend == SPEECH
        self.text = ""
        self.stages: dict[str, StageMetrics] = {}

    async def body(self, content: aiohttp.StreamReader) -> None:
        """Sound as bare bytes; a body that is cut off raises, so its end is the end event."""
        if self._target.backend == CHAT:
            raise RequestFailed("the answer is no event stream")
        num_bytes = 0
        async for piece in content.iter_any():
            num_bytes += len(piece)
            # A read may end inside of a sample.
            samples = num_bytes // self._target.sample_bytes - self.timeline.num_samples
            self.timeline.sound_arrived(time.perf_counter(), samples, self._target.sample_rate)
        self.timeline.ended_s = time.perf_counter()

    async def chat(self, content: aiohttp.StreamReader) -> None:
        decoder = msgspec.json.Decoder(_ChatEvent)
        async for at_s, data in sse_events(content):
            if data == DONE:
                return
            event = decoder.decode(data)
            if event.error:
                raise RequestFailed(f"error event: {event.error}")
            self.timeline.ended_s = at_s
            for choice in event.choices:
                self._take(choice, event, at_s)
            self._account(event)
        raise RequestFailed("the stream ended without [DONE]")

    async def speech(self, content: aiohttp.StreamReader) -> None:
        decoder = msgspec.json.Decoder(_SpeechEvent)
        async for at_s, data in sse_events(content):
            if data == DONE:
                continue
            event = decoder.decode(data)
            if event.error:
                raise RequestFailed(f"error event: {event.error}")
            self.timeline.ended_s = at_s
            sound = event.audio or event.delta
            if sound:
                self._heard(at_s, base64.b64decode(sound))
            if event.type == "speech.audio.done":
                return
        raise RequestFailed("the stream ended without speech.audio.done")

    def _take(self, choice: _Choice, event: _ChatEvent, at_s: float) -> None:
        """Books the text and the sound of one chunk."""
        delta = choice.delta
        sound = delta.audio.data if delta.audio is not None else None
        words = delta.audio.transcript if delta.audio is not None else None
        if event.modality == "audio":
            sound = sound or delta.content or ""
        elif delta.content:
            words = delta.content
        if sound is not None:
            # Also when it is empty: that a packet came is what counts (api.md 4.9).
            self._heard(at_s, base64.b64decode(sound))
        if words or event.modality == "text":
            self.text += words or ""
            self.timeline.text_arrived(at_s, self._new_tokens(choice, event, words or ""))

    def _new_tokens(self, choice: _Choice, event: _ChatEvent, words: str) -> int:
        if event.usage is not None:
            return max(0, event.usage.text_tokens - self.timeline.text.num_tokens)
        if choice.token_ids is not None:
            return len(choice.token_ids)
        return 1 if words else 0

    def _account(self, event: _ChatEvent) -> None:
        timeline = self.timeline
        if event.usage is not None:
            timeline.num_prompt_tokens = event.usage.prompt_tokens or timeline.num_prompt_tokens
            timeline.num_text_tokens = max(timeline.num_text_tokens, event.usage.text_tokens)
        if event.metrics is not None:
            self.stages = event.metrics.stage_metrics

    def _heard(self, at_s: float, sound: bytes) -> None:
        samples, rate = len(sound) // self._target.sample_bytes, self._target.sample_rate
        if sound.startswith(b"RIFF"):
            with wave.open(io.BytesIO(sound)) as file:
                samples, rate = file.getnframes(), file.getframerate()
        self.timeline.sound_arrived(at_s, samples, rate)


async def sse_events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    """The data of each event, and when it was read. Comments and other fields are passed over."""
    buffer = b""
    async for piece in content.iter_any():
        at_s = time.perf_counter()
        buffer = (buffer + piece).replace(b"\r\n", b"\n")
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            lines = event.split(b"\n")
            data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
            if data:
                yield at_s, b"\n".join(data)


async def wait_until_ready(session: aiohttp.ClientSession, base_url: str, timeout_s: float) -> None:
    """Asks for the models until the server answers. Raises ConfigError when it never does."""
    deadline_s = time.perf_counter() + timeout_s
    while True:
        try:
            async with session.get(f"{base_url}/v1/models") as response:
                if response.status == 200:
                    return
                said = f"{response.status} {response.reason}"
        except aiohttp.ClientError as error:
            said = str(error)
        if time.perf_counter() > deadline_s:
            raise ConfigError(f"{base_url} was not ready within {timeout_s:.0f} s: {said}")
        await asyncio.sleep(0.5)


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The name of the first model that the server has."""
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            models = msgspec.json.decode(await response.read(), type=_Models)
    except (aiohttp.ClientError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{base_url}/v1/models: {error}; name the model by --model") from error
    if not models.data:
        raise ConfigError(f"{base_url}/v1/models: no model; name it by --model")
    return models.data[0].id
