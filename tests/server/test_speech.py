"""The speech route: every format, whole and streamed, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn

from stretto.server.app import create_app
from stretto.server.encoders import FORMATS, MEDIA_TYPES, AudioFormat
from stretto.server.settings import ServerSettings
from tests.server.conftest import NUM_FRAMES, NUM_SAMPLES, RATE, LocalServer
from tests.server.test_chat import series
from tests.server.test_encoders import LOSSLESS, heard
from tests.server.test_refusals import assert_refused


def speak(server: LocalServer, **fields: Any) -> httpx.Response:
    body = {"model": "tts-1", "input": "Hello there", "voice": "alloy", "seed": 5,
            "max_new_tokens": NUM_FRAMES, "initial_codec_chunk_frames": 1, **fields}  # fmt: skip
    return server.post("/v1/audio/speech", body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("audio_format", FORMATS)
def test_bytes_events_and_the_whole_file_hold_the_same_sound(
    server: LocalServer, audio_format: AudioFormat
) -> None:
    whole = speak(server, response_format=audio_format, stream=False)
    assert whole.headers["content-type"] == MEDIA_TYPES[audio_format]
    assert int(whole.headers["content-length"]) == len(whole.content)
    expected = heard(audio_format, whole.content, NUM_SAMPLES)
    if audio_format in LOSSLESS:
        assert len(expected) == NUM_SAMPLES
    streamed = speak(server, response_format=audio_format)
    assert "content-length" not in streamed.headers
    for name, value in {
        "content-type": MEDIA_TYPES[audio_format], "x-accel-buffering": "no",
        "cache-control": "no-cache", "x-sample-rate": str(RATE), "x-channels": "1",
    }.items():  # fmt: skip
        assert streamed.headers[name] == value
    assert np.array_equal(heard(audio_format, streamed.content, NUM_SAMPLES), expected)
    for form in ({"stream": True}, {"stream_format": "sse"}):
        events = events_of(speak(server, response_format=audio_format, **form))
        pieces = [base64.b64decode(e["audio"]) for e in events[:-1]]
        assert all(pieces)
        assert np.array_equal(heard(audio_format, b"".join(pieces), NUM_SAMPLES), expected)
        usage = events[-1]["usage"]
        assert usage["output_tokens"] == NUM_FRAMES
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_mp3_is_what_comes_when_no_format_is_named(server: LocalServer) -> None:
    assert speak(server).headers["content-type"] == "audio/mpeg"


@pytest.mark.parametrize("stream", [None, False])
def test_speed_and_rate_are_made_as_asked(server: LocalServer, stream: bool | None) -> None:
    response = speak(server, response_format="pcm", speed=2.0, sample_rate=16000, stream=stream)
    assert response.headers["x-sample-rate"] == "16000"
    expected = NUM_SAMPLES / 2 * 16000 / RATE
    assert abs(len(response.content) / 2 - expected) < 20


def test_the_voice_is_heard(server: LocalServer) -> None:
    sounds = {
        name: speak(server, voice=voice, response_format="pcm").content
        for name, voice in {
            "a": "alloy",
            "b": "ethan",
            "c": {"id": "Chelsie"},
            "d": "chelsie",
        }.items()
    }
    assert sounds["a"] == sounds["b"] != sounds["c"] == sounds["d"]


BAD_SPEECH: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": ""}, "input", "empty"),
    ({"input": " \n"}, "input", "empty"),
    ({"input": "x" * 5000}, "input", "4096"),
    ({"input": 5}, "input", "string"),
    ({"voice": ""}, "voice", "ethan"),
    ({"voice": "nobody"}, "voice", "ethan"),
    ({"speed": -1}, "speed", "0.25"),
    ({"speed": 0}, "speed", "0.25"),
    ({"speed": 9}, "speed", "4"),
    ({"response_format": "mpeg"}, "response_format", "'mp3'"),
    ({"response_format": "aac"}, "response_format", "'mp3'"),
    ({"stream": "yes please"}, "stream", ""),
    ({"stream_format": "chunks"}, "stream_format", "'sse'"),
    ({"sample_rate": 44100}, "sample_rate", "24000"),
    ({"instructions": 5}, "instructions", "string"),
    ({"ref_audio": "data:"}, "ref_audio", "CustomVoice"),
    ({"max_new_tokens": -1}, "max_new_tokens", "1"),
    ({"initial_codec_chunk_frames": 99}, "initial_codec_chunk_frames", "25"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "said"), BAD_SPEECH, ids=lambda v: str(v)[:40])
def test_bad_speech_requests_are_refused(
    server: LocalServer, fields: dict[str, Any], param: str, said: str
) -> None:
    assert_refused(speak(server, **fields), 400, param, said)


def test_a_model_that_only_answers_says_so(server: LocalServer) -> None:
    own = LocalServer(server.runner, server.omni)
    own.app = create_app(server.omni, ServerSettings(model="tiny"))
    response = own.post("/v1/audio/speech", {"input": "Hi", "voice": "alloy"})
    assert_refused(response, 404, None, "/v1/chat/completions")
    assert own.get("/v1/audio/voices").json() == {
        "voices": ["aiden", "chelsie", "ethan"], "uploaded_voices": [],
    }  # fmt: skip


def test_a_failure_in_an_event_stream_is_told(breaking_server: LocalServer) -> None:
    response = speak(breaking_server, stream_format="sse", max_new_tokens=8)
    events = events_of(response)
    assert [event["type"] for event in events[-2:]] == ["speech.audio.delta", "speech.audio.error"]
    assert events[-1]["error"]["partial_audio"] is True
    late = speak(breaking_server, max_new_tokens=8, initial_codec_chunk_frames=25)
    assert_refused(late, 500, None, "breaks")


def test_streams_are_counted_by_how_they_end(breaking_server: LocalServer) -> None:
    own = LocalServer(breaking_server.runner, breaking_server.omni)
    speak(own)
    text = own.get("/metrics").text
    assert series(text, "vllm_omni:speech_stream_completed_total") == 1


def test_the_official_sdk_streams_speech_to_files(server: LocalServer, tmp_path: Path) -> None:
    def save(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for audio_format in FORMATS:
            with client.audio.speech.with_streaming_response.create(
                model="tts-1", voice="alloy", input="Hello there", response_format=audio_format,
                extra_body={"max_new_tokens": NUM_FRAMES, "seed": 5},
            ) as response:  # fmt: skip
                response.stream_to_file(tmp_path / audio_format)
        with pytest.raises(openai.BadRequestError, match="4096"):
            client.audio.speech.create(model="tts-1", voice="alloy", input="x" * 5000)

    async def serve() -> None:
        config = uvicorn.Config(server.app, port=0, lifespan="off", log_config=None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = uvicorn.Server(config)
            serving = asyncio.create_task(running.serve(sockets=[listener]))
            await asyncio.to_thread(save, f"http://127.0.0.1:{listener.getsockname()[1]}")
            running.should_exit = True
            await serving

    server.runner.run(serve())
    expected = heard("pcm", (tmp_path / "pcm").read_bytes(), NUM_SAMPLES)
    assert len(expected) == NUM_SAMPLES
    for audio_format in FORMATS:
        got = heard(audio_format, (tmp_path / audio_format).read_bytes(), NUM_SAMPLES)
        assert abs(len(got) - NUM_SAMPLES) < 0.1 * RATE
        if audio_format in LOSSLESS:
            assert np.array_equal(got, expected)
