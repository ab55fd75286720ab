"""Servers in this process, over inline pipelines, and what reads their answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from stretto.api import AsyncOmni
from stretto.pipeline.omni_frontend import Options
from stretto.pipeline.pipeline import PipelineRequest
from stretto.server.app import create_app
from stretto.server.settings import ServerSettings
from stretto.server.speech_model import SpeechInput, TaskType

RATE = 24000
# Where the answers of these tests are cut: their text and their sound.
NUM_TOKENS = 6
NUM_FRAMES = 3
NUM_SAMPLES = NUM_FRAMES * 1920 - 555
SHORT = [{}, {"max_tokens": NUM_FRAMES, "ignore_eos": True}]
# Longer than anything takes on a busy machine: what is not there by then does not come.
WAIT_S = 30.0


class AnsweringSpeechModel:
    """Reads an answer out instead of the text: enough to try the route without a TTS model."""

    kinds: Sequence[TaskType] = ("CustomVoice",)
    languages: Sequence[str] = ()

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni

    @property
    def speakers(self) -> Sequence[str]:
        return self._omni.frontend.speakers

    def prepare(self, speech: SpeechInput) -> PipelineRequest:
        return self._omni.frontend.prepare(
            speech.text,
            Options(
                speaker=speech.speaker,
                sampling={"max_tokens": 4, "seed": 1},
                talker_sampling={"max_tokens": 20, "ignore_eos": True, **speech.sampling},
                initial_codec_chunk_frames=speech.initial_codec_chunk_frames,
                label=speech.label,
            ),
        )


class LocalServer:
    """An application without a network; `request` gives whole responses."""

    def __init__(self, runner: asyncio.Runner, omni: AsyncOmni, **settings: Any) -> None:
        self.runner = runner
        self.omni = omni
        self.app = create_app(
            omni,
            ServerSettings(
                model="tiny", served_model_names=("m",), voices_dir=Path("nowhere"), **settings
            ),
            speech=AnsweringSpeechModel(omni),
        )

    @property
    def service(self) -> Any:
        return self.app.state.service

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **more)

        return self.runner.run(send())

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **more)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(**fields))

    def settle(self) -> None:
        """Returns when no trace of a request is left in the pipeline."""

        async def empty() -> None:
            async with asyncio.timeout(WAIT_S):
                while not self.omni.pipeline.is_empty:
                    await asyncio.sleep(0.005)

        self.runner.run(empty())


def chat_body(**fields: Any) -> dict[str, Any]:
    """A short request for text and sound that ends in both by its limits."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello there"}],
        "modalities": ["text", "audio"],
        "max_tokens": NUM_TOKENS,
        "seed": 7,
        "sampling_params_list": SHORT,
        **fields,
    }
    return {name: value for name, value in body.items() if value is not ...}


def sse_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a chat stream; its bytes are as strict clients need them."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    text = response.text
    assert "\r" not in text
    assert text.endswith("data: [DONE]\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block[len("data: ") :]) for block in blocks[:-1]]


def content_of(events: list[dict[str, Any]], modality: str) -> list[str]:
    """Contents of the chunks of one modality in vllm-omni's dialect."""
    return [
        event["choices"][0]["delta"]["content"]
        for event in events
        if event.get("modality") == modality and event["choices"][0]["delta"]["content"]
    ]


def audio_parts(events: list[dict[str, Any]], key: str) -> list[str]:
    """What the chunks of OpenAI's dialect carry in `delta.audio`."""
    parts = [c["delta"].get("audio", {}) for event in events for c in event["choices"]]
    return [part[key] for part in parts if key in part]


def pcm_samples(pcm: bytes) -> np.ndarray:
    return np.frombuffer(pcm, "<i2")


def wav_samples(wav: bytes) -> np.ndarray:
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="int16")
    assert rate == RATE
    return np.asarray(samples)


def assert_sounds_like(samples: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for rounding: a vocoder batch of another size adds up in another order."""
    assert samples.shape == expected.shape
    assert np.abs(samples.astype(int) - expected.astype(int)).max() <= 1


def decoded(data: str) -> bytes:
    return base64.b64decode(data, validate=True)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def started(runner: asyncio.Runner, cache_dir: Path, **flags: Any) -> Iterator[AsyncOmni]:
    omni = AsyncOmni("tiny", inline=True, cache_dir=cache_dir, flags=flags)
    runner.run(omni.start())
    yield omni
    runner.run(omni.close())


@pytest.fixture(scope="session")
def omni(runner: asyncio.Runner, cache_dir: Path) -> Iterator[AsyncOmni]:
    yield from started(runner, cache_dir)


@pytest.fixture(scope="session")
def server(runner: asyncio.Runner, omni: AsyncOmni) -> LocalServer:
    return LocalServer(runner, omni)


@pytest.fixture(scope="module")
def breaking_server(runner: asyncio.Runner, cache_dir: Path) -> Iterator[LocalServer]:
    """One whose requests fail at their sixth frame."""
    edge = {"custom_process_next_stage_input_func": "tests.server.breaking.BreakingBridge"}
    for omni in started(runner, cache_dir, connectors={"talker->code2wav": edge}):
        yield LocalServer(runner, omni)
