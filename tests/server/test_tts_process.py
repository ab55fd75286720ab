"""A real server that reads texts out, and the examples that talk to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.server.test_process import ROOT, RealServer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def real(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    server = RealServer(cache_dir, log, model="tiny-tts")
    yield server
    server.end()


@pytest.mark.parametrize(
    "command",
    [["sh", "speech.sh"], [sys.executable, "speak_over_websocket.py"]],
    ids=["curl", "websocket"],
)
def test_examples_run_as_written(real: RealServer, command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*command[:-1], str(ROOT / "examples" / command[-1])],
        cwd=tmp_path,
        env={**os.environ, "STRETTO_URL": real.url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if command[0] == "sh":
        assert (tmp_path / "speech.mp3").stat().st_size > 10_000
        assert '"succeeded":1,"failed":1' in done.stdout
        return
    heard, written = (line.split()[-2] for line in done.stdout.splitlines()[:2])
    assert float(heard) < float(written), "speech begins while the text is being written"
    with wave.open(str(tmp_path / "spoken.wav")) as file:
        assert file.getnframes() == 60 * 1920


def test_chat_says_where_to_go(real: RealServer) -> None:
    response = real.post({"messages": [{"role": "user", "content": "Hi"}]})
    assert response.status_code == 404 and "/v1/audio/speech" in response.text


def test_an_idle_socket_does_not_hold_up_the_end(real: RealServer) -> None:
    url = real.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    with connect(url) as connection:
        connection.send('{"type": "session.config"}')
        connection.send('{"type": "input.text", "text": "Hi"}')
        connection.send('{"type": "input.done"}')
        # Random weights find no end: this is still being said when the signal comes.
        connection.recv()
        real.process.send_signal(signal.SIGTERM)
        real.wait_draining()
        refused = httpx.post(f"{real.url}/v1/audio/speech", json={"input": "Hi"})
        assert refused.status_code == 503
        last = connection.recv()
        while '"session.done"' not in str(last):
            last = connection.recv()
        began_s = time.monotonic()
        assert real.process.wait(20) == 0
        assert time.monotonic() - began_s < 10
