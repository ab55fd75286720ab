"""A real server in processes of its own, driven by the clients that people use."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import (
    NUM_FRAMES,
    NUM_SAMPLES,
    NUM_TOKENS,
    RATE,
    SHORT,
    WAIT_S,
    audio_parts,
    chat_body,
    content_of,
    decoded,
    sse_events,
    wav_samples,
)
from tests.server.test_chat import series

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path
from stretto.server.run import serve
from stretto.server.settings import ServerSettings
model, cache_dir = sys.argv[1:]
sys.exit(serve(ServerSettings(model=model, port=0, cache_dir=Path(cache_dir), drain_s=20.0)))
"""
LONG = [{}, {"max_tokens": 1000, "ignore_eos": True}]
MESSAGES: Any = [{"role": "user", "content": "Hello there"}]


class RealServer:
    def __init__(self, cache_dir: Path, log: Path, *, model: str = "tiny") -> None:
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, model, str(cache_dir)],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and self.process.poll() is None:
            ready = re.search(r"^ready after .*: (http\S+)/v1 ", self.output, re.MULTILINE)
            if ready is not None:
                return ready.group(1)
            time.sleep(0.05)
        raise AssertionError(f"the server did not come up:\n{self.output}")

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def stage_pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"pid (\d+)", self.output)]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, **more)

    def metric(self, name: str, label: str = "") -> float:
        return series(httpx.get(f"{self.url}/metrics").text, name, label)

    def resident_kb(self) -> int:
        """Memory of all its processes."""
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids]
        return sum(int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) for status in statuses)  # type: ignore[union-attr]

    def open_files(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids)

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *self.stage_pids]

    def wait_idle(self) -> None:
        """Returns when neither the front nor a stage holds a request, and no stage works ahead."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            stages = httpx.get(f"{self.url}/health").json()["stages"].values()
            held = [s["running"] + s["waiting"] + s["waiting_for_chunk"] for s in stages]
            # Work ahead takes memory, for good.
            held += [not stage["prepared"] for stage in stages]
            if not sum(held) and not httpx.get(f"{self.url}/load").json()["server_load"]:
                return
            time.sleep(0.1)
        raise AssertionError(f"the stages come to no rest: {list(stages)}")

    def wait_draining(self) -> None:
        """Returns when a signal has been heard."""
        deadline_s = time.monotonic() + WAIT_S
        while "draining: " not in self.output:
            assert time.monotonic() < deadline_s, "nobody hears the signal"
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)


@pytest.fixture(scope="module")
def real(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(cache_dir, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.end()


# ---- what is printed -----------------------------------------------------------------------------


def test_it_says_what_runs_and_what_to_try(real: RealServer) -> None:
    for stage in ("thinker", "talker", "code2wav"):
        assert re.search(rf"^  {stage} .* pid \d+, loaded in", real.output, re.MULTILINE)
    command = next(line for line in real.output.splitlines() if line.startswith("  curl "))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("data: [DONE]\n\n")


# ---- the official SDK ----------------------------------------------------------------------------


def test_sdk_streams_text_and_sound(real: RealServer) -> None:
    pcm, text, usage = b"", "", None
    for chunk in real.client.chat.completions.create(
        model="tiny", messages=MESSAGES, modalities=["text", "audio"], stream=True, seed=7,
        audio={"voice": "alloy", "format": "pcm16"}, stream_options={"include_usage": True},
        max_tokens=NUM_TOKENS, extra_body={"sampling_params_list": SHORT},
    ):  # fmt: skip
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.audio is not None:
                text += choice.delta.audio.transcript or ""
                pcm += base64.b64decode(choice.delta.audio.data or "")
    assert text and len(pcm) == 2 * NUM_SAMPLES
    assert usage is not None and usage.completion_tokens == NUM_TOKENS + NUM_FRAMES


def test_sdk_accumulates_a_stream(real: RealServer) -> None:
    with real.client.chat.completions.stream(
        model="tiny", messages=MESSAGES, modalities=["text", "audio"], seed=7,
        audio={"voice": "alloy", "format": "pcm16"}, max_tokens=NUM_TOKENS,
        extra_body={"sampling_params_list": SHORT},
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        # `get_final_completion` takes the reason "length" for an error.
        snapshot = stream.current_completion_snapshot
    audio = snapshot.choices[0].message.audio
    assert audio is not None
    whole = real.client.chat.completions.create(
        model="tiny", messages=MESSAGES, modalities=["text", "audio"], seed=7,
        audio={"voice": "alloy", "format": "pcm16"}, max_tokens=NUM_TOKENS,
        extra_body={"sampling_params_list": SHORT},
    )  # fmt: skip
    message = whole.choices[0].message
    assert message.audio is not None and message.content is None
    assert base64.b64decode(audio.data) == base64.b64decode(message.audio.data)
    assert audio.transcript == message.audio.transcript
    assert len(base64.b64decode(audio.data)) == 2 * NUM_SAMPLES
    assert audio.expires_at > time.time() + 3500
    assert snapshot.choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_sdk_raises_its_own_errors(real: RealServer) -> None:
    create = real.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        real.client.audio.speech.create(model="tiny", voice="alloy", input="Hi")
    (model,) = real.client.models.list()
    assert real.client.models.retrieve(model.id) == model


# ---- curl ----------------------------------------------------------------------------------------


def curl(real: RealServer, body: str) -> httpx.Response:
    done = subprocess.run(
        ["curl", "-sSN", f"{real.url}/v1/chat/completions", "-H", "Content-Type: application/json",
         "-d", body],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    return httpx.Response(200, content=done.stdout, headers={"content-type": "text/event-stream"})


def test_the_golden_requests_with_curl(real: RealServer) -> None:
    limits = f'"max_tokens":3,"sampling_params_list":{json.dumps(SHORT)}'
    head = '{"model":"tiny","stream":true,"modalities":["text","audio"],'
    tail = limits + ',"messages":[{"role":"user","content":"Hi"}]}'
    flavour_a = sse_events(curl(real, head + tail))
    wavs = [wav_samples(decoded(data)) for data in content_of(flavour_a, "audio")]
    assert sum(map(len, wavs)) == NUM_SAMPLES
    audio = '"audio":{"voice":"alloy","format":"pcm16"},'
    flavour_c = sse_events(curl(real, head + audio + tail))
    assert len(decoded("".join(audio_parts(flavour_c, "data")))) == 2 * NUM_SAMPLES
    # A body in the form that people type, and one that is no JSON at all.
    nested = '{"messages":[{"role":"user","content":"Hi"}],"extra_body":{"max_tokens":2}}'
    assert json.loads(curl(real, nested).content)["usage"]["completion_tokens"] == 2
    assert json.loads(curl(real, "nonsense").content)["error"]["type"] == "invalid_request_error"


# ---- vllm bench serve ----------------------------------------------------------------------------


def bench_request(real: RealServer) -> dict[str, Any]:
    """One request the way `vllm bench serve --omni` sends and reads it (api.md 4.9)."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}],
        "temperature": 0.0, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_stage_metrics": True, "modalities": ["text", "audio"],
        "sampling_params_list": SHORT,
    }  # fmt: skip
    headers = {"Authorization": "Bearer None", "x-request-id": "bench-0"}
    text, itl, frames, rates = "", [], 0, set()
    ttft = ttfp = usage = metrics = None
    num_tokens, buffer, sent_s = 0, "", time.perf_counter()
    last_s = sent_s
    url = f"{real.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        for piece in response.iter_text():
            buffer += piece
            *blocks, buffer = buffer.split("\n\n")
            for block in blocks:
                now_s = time.perf_counter()
                data = block.removeprefix("data: ")
                if block.startswith(":") or data == "[DONE]":
                    continue
                event = json.loads(data)
                assert "error" not in event
                content = event["choices"] and event["choices"][0]["delta"].get("content")
                if event.get("modality") == "text" and event.get("usage"):
                    new = event["usage"]["completion_tokens"] - num_tokens
                    num_tokens += new
                    if ttft is None:
                        ttft, itl = now_s - sent_s, [0.0] * (new - 1)
                    else:
                        itl += [(now_s - last_s) / new] * new
                    last_s, text = now_s, text + content
                elif event.get("modality") == "audio":
                    ttfp = ttfp or now_s - sent_s
                    with wave.open(io.BytesIO(base64.b64decode(content))) as wav:
                        frames += wav.getnframes()
                        rates.add((wav.getframerate(), wav.getnchannels(), wav.getsampwidth()))
                if not event["choices"]:
                    usage, metrics = event["usage"], event["metrics"]
    return {"text": text, "ttft": ttft, "itl": itl, "ttfp": ttfp, "frames": frames, "rates": rates,
            "num_tokens": num_tokens, "usage": usage, "metrics": metrics}  # fmt: skip


def test_the_bench_gets_all_of_its_figures(real: RealServer) -> None:
    got = bench_request(real)
    assert got["text"] and got["ttft"] > 0 and got["ttfp"] > got["ttft"]
    assert got["num_tokens"] == NUM_TOKENS and len(got["itl"]) == NUM_TOKENS - 1
    assert got["rates"] == {(RATE, 1, 2)} and got["frames"] == NUM_SAMPLES
    assert got["usage"]["completion_tokens"] == NUM_TOKENS + NUM_FRAMES
    assert got["metrics"]["stage_metrics"]["0"]["num_tokens_out"] == NUM_TOKENS


# ---- clients that go -----------------------------------------------------------------------------


def vanish(real: RealServer, after_events: int) -> None:
    """Begins a long stream and drops the connection in the middle of it."""
    body = chat_body(model="tiny", stream=True, sampling_params_list=LONG, max_tokens=50)
    with httpx.stream("POST", f"{real.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(after_events):
            next(lines)


def test_fifty_clients_that_vanish_leave_nothing(real: RealServer) -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda n: vanish(real, n % 12), range(10)))
        real.wait_idle()
        before, files = real.resident_kb(), real.open_files()
        counted = real.metric("vllm_omni:requests_failed_total", '"client_disconnect"')
        list(pool.map(lambda n: vanish(real, n % 12), range(50)))
    real.wait_idle()
    gone = real.metric("vllm_omni:requests_failed_total", '"client_disconnect"') - counted
    assert gone == 50
    grown = real.resident_kb() - before
    assert grown < 30_000, f"{grown} kB more than before"
    assert real.open_files() <= files + 2
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    assert real.post(chat_body(model="tiny")).status_code == 200


# ---- the OpenAPI document ------------------------------------------------------------------------


def test_requests_made_from_the_openapi_document_are_answered(real: RealServer) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    document = schemathesis.openapi.from_url(f"{real.url}/openapi.json")
    limits = {"max_tokens": 2, "max_completion_tokens": 2,
              "sampling_params_list": [{"max_tokens": 2}, {"max_tokens": 2}]}  # fmt: skip
    num_tried = 0
    for operation in document.get_all_operations():
        api = operation.ok()

        @given(case=api.as_strategy())
        @settings(
            max_examples=15, phases=[Phase.generate], deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def answered(case: Any) -> None:
            if isinstance(case.body, dict) and "messages" in case.body:
                case.body.update(limits)
            response = case.call(timeout=20)
            assert response.status_code < 500, (case.as_curl_command(), response.text)

        answered()
        num_tried += 1
    assert num_tried >= 8
    assert real.post(chat_body(model="tiny")).status_code == 200


# ---- examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [[sys.executable, "chat_with_openai_sdk.py"], ["sh", "curl.sh"]], ids=lambda c: c[-1]
)
def test_examples_run_as_written(real: RealServer, command: list[str], tmp_path: Path) -> None:
    command = [*command[:-1], str(ROOT / "examples" / command[-1])]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "STRETTO_URL": real.url},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for path in tmp_path.iterdir():
        assert path.stat().st_size > 5000, f"{path} is too small"
    assert len(list(tmp_path.iterdir())) == (2 if "openai" in command[-1] else 1)


# ---- the end -------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_dead_stage_is_told_and_the_server_stays(real: RealServer) -> None:
    """The server of all tests above has no vocoder from here on."""
    stream: dict[str, Any] = {}

    def listen() -> None:
        body = chat_body(model="tiny", stream=True, sampling_params_list=LONG, max_tokens=50)
        stream["response"] = real.post(body)

    listener = threading.Thread(target=listen)
    listener.start()
    while not httpx.get(f"{real.url}/load").json()["server_load"]:
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(real.stage_pids[2], signal.SIGKILL)
    listener.join(WAIT_S)
    events = sse_events(stream["response"])
    assert "code2wav" in events[-1]["error"]["message"]
    health = httpx.get(f"{real.url}/health")
    assert health.status_code == httpx.get(f"{real.url}/ping").status_code == 503
    states = {name: stage["status"] for name, stage in health.json()["stages"].items()}
    assert states == {"thinker": "healthy", "talker": "healthy", "code2wav": "dead"}
    refused = real.post(chat_body(model="tiny"))
    assert refused.status_code == 503 and "code2wav" in refused.json()["error"]["message"]
    alone = real.post(chat_body(model="tiny", modalities=["text"]))
    assert alone.status_code == 200, "what needs no dead stage still works"


def test_sigterm_lets_running_requests_finish(cache_dir: Path, tmp_path: Path) -> None:
    server = RealServer(cache_dir, tmp_path / "log")
    pids = server.pids
    some_s = [{}, {"max_tokens": 400, "ignore_eos": True}]
    long = chat_body(model="tiny", stream=True, sampling_params_list=some_s)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, long)
        while not httpx.get(f"{server.url}/load").json()["server_load"]:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        server.wait_draining()
        refused = server.post(chat_body(model="tiny"))
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
        events = sse_events(running.result())
    assert "error" not in events[-1]
    assert server.process.wait(WAIT_S) == 0
    assert not any(map(is_running, pids))


def test_a_second_sigterm_ends_at_once(real: RealServer) -> None:
    pids = real.pids
    with ThreadPoolExecutor(1) as pool:
        # Text alone: one of the stages is dead by now.
        endless = chat_body(
            model="tiny", stream=True, modalities=["text"], max_tokens=15_000, ignore_eos=True,
            sampling_params_list=...,
        )  # fmt: skip
        running = pool.submit(real.post, endless)
        while not httpx.get(f"{real.url}/load").json()["server_load"]:
            time.sleep(0.02)
        began_s = time.monotonic()
        real.process.send_signal(signal.SIGTERM)
        real.wait_draining()
        real.process.send_signal(signal.SIGTERM)
        events = sse_events(running.result())
    assert events[-1]["error"]["code"] == 503, "a stream that is cut off is told so"
    assert real.process.wait(10) == 0
    # Without the second it goes on for as long as requests may take to end.
    assert time.monotonic() - began_s < 8.0
    assert not any(map(is_running, pids))
