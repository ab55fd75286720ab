"""`stretto bench serve` against a server that fails as servers do: inside of a 200."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from stretto.audio import wav_bytes
from stretto.cli import main

RATE = 24000
WAV = base64.b64encode(wav_bytes(np.zeros(RATE // 2, np.float32), RATE)).decode()
PCM = base64.b64encode(bytes(RATE)).decode()


class FakeServer:
    """Answers each chat by the first word of its prompt; keeps the bodies that it got."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        kind = body["messages"][-1]["content"][0]["text"].split()[0]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(kind):
            await response.write(b"data: " + event.encode() + b"\n\n")
            await asyncio.sleep(0.02)
        return response

    def _events(self, kind: str) -> Iterator[str]:
        def text(words: str, so_far: int, **delta: Any) -> str:
            return json.dumps(
                {
                    "modality": "text",
                    "choices": [{"delta": {"content": words, **delta}, "finish_reason": None}],
                    "usage": {"prompt_tokens": 4, "completion_tokens": so_far},
                }
            )

        if kind == "openai":
            for piece in ({"transcript": "Good"}, {"transcript": " day."}, {"data": PCM}):
                yield json.dumps({"choices": [{"delta": {"content": None, "audio": piece}}]})
            yield "[DONE]"
            return
        yield text("", 0, role="assistant")
        yield text("Good", 1)
        yield text(" day, friend", 4)
        if kind != "silent":
            for _ in range(2):
                yield json.dumps({"modality": "audio", "choices": [{"delta": {"content": WAV}}]})
        if kind == "failing":
            yield json.dumps({"error": {"message": "stage talker died", "code": 500}})
        if kind != "endless":
            yield "[DONE]"

    async def speech(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body.get("stream_format") == "sse":
            return await self._speech_events(request, body["input"])
        response = web.StreamResponse(headers={"content-type": "audio/pcm"})
        await response.prepare(request)
        # Also in the middle of a sample.
        for size in (4001, 7999):
            await response.write(bytes(size))
            await asyncio.sleep(0.02)
        if body["input"].startswith("torn"):
            assert request.transport is not None
            request.transport.close()
        return response

    async def _speech_events(self, request: web.Request, text: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        delta = json.dumps({"type": "speech.audio.delta", "audio": PCM})
        end = json.dumps({"type": "speech.audio.done"})
        for event in (delta, end) if not text.startswith("endless") else (delta,):
            await response.write(b"event: x\r\ndata: " + event.encode() + b"\r\n\r\n")
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _run(self, ready: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/audio/speech", self.speech)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()


@contextmanager
def running() -> Iterator[FakeServer]:
    fake, ready, stop = FakeServer(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(fake._run(ready, stop),))
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


def bench(server: FakeServer, tmp_path: Path, prompts: list[str], *options: str) -> dict[str, Any]:
    """Runs the command on prompts from a file; its JSON result."""
    lines = tmp_path / "prompts.txt"
    lines.write_text("\n".join(prompts))
    main(
        [
            *("bench", "serve", "--base-url", server.url, "--dataset-name", "text"),
            *("--dataset-path", str(lines), "--num-prompts", str(len(prompts))),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
            *options,
        ]
    )
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return result


def test_a_stream_counts_only_with_its_end_its_sound_and_no_error(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["good 1", "failing", "good 2", "silent", "endless", "good 3"]
    own = ("--max-concurrency", "2", "--num-warmups", "1", "--server-pid", str(os.getpid()))
    result = bench(server, tmp_path, prompts, *own)
    assert result["server_cpu_s_per_request"] > 0 and result["server_pss_mb"] > 10
    assert (result["completed"], result["failed"]) == (3, 3)
    assert [error.split(":")[0] for error in result["errors"]] == [
        "error event",
        "no sound, though it was asked for",
        "the stream ended without [DONE]",
    ]
    assert result["model"] == "fake" and result["peak_concurrent_requests"] <= 2
    assert result["total_output_tokens"] == 12 and result["total_input_tokens"] == 12
    assert result["total_audio_duration_s"] == pytest.approx(3.0)
    assert result["mean_first_packet_s"] == pytest.approx(0.5)
    assert 20 <= result["mean_ttft_ms"] < result["mean_audio_ttfp_ms"] < result["mean_e2el_ms"]
    assert result["p99_audio_rtf"] >= result["median_audio_rtf"] > 0
    printed = capsys.readouterr().out
    assert "Successful requests:                     3" in printed
    assert "Failed requests:                         3" in printed


def test_the_body_is_what_the_fields_client_sends(server: FakeServer, tmp_path: Path) -> None:
    server.bodies.clear()
    bench(
        server, tmp_path, ["good"], "--ignore-eos", "--random-output-len", "17",
        "--extra-body", '{"voice": "ethan", "temperature": 0.5, "stream_options": null}',
    )  # fmt: skip
    assert server.bodies == [
        {
            "model": "fake",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "good"}]}],
            "modalities": ["text", "audio"],
            "temperature": 0.5,
            "max_tokens": 17,
            "stream": True,
            "ignore_eos": True,
            "return_stage_metrics": True,
            "voice": "ethan",
        }
    ]


def test_openais_own_dialect_is_read_too(server: FakeServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, ["openai"])
    assert result["completed"] == 1
    assert result["total_output_tokens"] == 2
    assert result["total_audio_duration_s"] == pytest.approx(0.5)


def test_text_alone_may_be_asked_for(server: FakeServer, tmp_path: Path) -> None:
    only_text = ("--extra-body", '{"modalities": ["text"]}')
    assert bench(server, tmp_path, ["silent"], *only_text)["completed"] == 1


def test_speech_is_measured_as_a_body_and_as_events(server: FakeServer, tmp_path: Path) -> None:
    speech = ("--backend", "openai-audio-speech")
    result = bench(server, tmp_path, ["a", "torn"], *speech)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["total_audio_frames"] == 6000
    assert result["mean_audio_rtf"] == pytest.approx(result["mean_e2el_ms"] / 1e3 / 0.25)
    events = ("--extra-body", '{"stream_format": "sse"}')
    result = bench(server, tmp_path, ["a", "endless"], *speech, *events)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["total_audio_duration_s"] == pytest.approx(0.5)


def test_a_server_that_is_not_there_is_a_failure_of_each_request(tmp_path: Path) -> None:
    gone = FakeServer()
    gone.url = "http://127.0.0.1:9"
    result = bench(gone, tmp_path, ["a", "b"], "--model", "m")
    assert (result["completed"], result["failed"]) == (0, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--goodput", "ttfp:100"),
        ("--goodput", "ttft:soon"),
        ("--percentile-metrics", "ttfp"),
        ("--extra-body", "{"),
        ("--extra-body", '{"audio": {"format": "mp3"}}'),
        ("--endpoint", "/v1/completions"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_sent(
    server: FakeServer, tmp_path: Path, wrong: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server.bodies.clear()
    with pytest.raises(FileNotFoundError):
        bench(server, tmp_path, ["good"], *wrong)
    assert server.bodies == []
    assert capsys.readouterr().err.startswith("stretto: ")


def test_goodput_is_printed_when_it_is_asked_for(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(server, tmp_path, ["good", "good"], "--goodput", "ttft:60000", "audio_ttfp:1")
    assert result["request_goodput"] == 0.0
    assert "Request goodput (req/s):                 0.00" in capsys.readouterr().out
