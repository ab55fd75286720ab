"""Clients that go, wait or read slowly: nothing is left of the first, the others harm nobody."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from stretto.server.streaming import sse
from tests.server.conftest import (
    WAIT_S,
    LocalServer,
    assert_sounds_like,
    chat_body,
    content_of,
    decoded,
    sse_events,
    wav_samples,
)
from tests.server.test_chat import series, sound_of

# Takes longer than WAIT_S: what is empty by then was left undone.
LONG = [{}, {"max_tokens": 4000, "ignore_eos": True}]


class Visitor:
    """A client as the application sees it, that reads and leaves as a test wants."""

    def __init__(self, server: LocalServer, **fields: Any) -> None:
        self.server = server
        self.body = json.dumps(chat_body(**fields)).encode()
        self.pieces: list[bytes] = []
        self.status: int | None = None
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.got_piece = asyncio.Event()
        self._asked = False

    async def visit(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
            "http_version": "1.1", "path": "/v1/chat/completions", "query_string": b"",
            "root_path": "", "scheme": "http", "server": ("server", 80), "client": ("client", 1),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await self.server.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.pieces.append(message["body"])
            self.got_piece.set()


def failed(server: LocalServer, reason: str) -> float:
    return series(server.get("/metrics").text, "vllm_omni:requests_failed_total", f'"{reason}"')


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["at once", "soon", "admitted", "under way"])
def test_a_client_that_goes_leaves_nothing_behind(
    server: LocalServer, stream: bool, moment: str
) -> None:
    own = LocalServer(server.runner, server.omni)

    async def go() -> None:
        visitor = Visitor(own, stream=stream, sampling_params_list=LONG)
        visiting = asyncio.create_task(visitor.visit())
        if moment == "soon":
            await asyncio.sleep(0.02)
        if moment in ("admitted", "under way"):
            await until(lambda: own.omni.pipeline.num_in_flight)
        if moment == "under way":
            await asyncio.sleep(0.1)
        visitor.left.set()
        await until(visiting.done)
        await until(lambda: own.omni.pipeline.is_empty)
        assert own.service.gate.num_inside == 0

    server.runner.run(go())
    asked_for_nothing_yet = moment in ("at once", "soon")
    assert failed(own, "client_disconnect") in ((0, 1) if asked_for_nothing_yet else (1,))
    assert failed(own, "unknown") == failed(own, "stage_error") == 0


def test_half_of_the_clients_go_and_the_others_hear_everything(server: LocalServer) -> None:
    alone = sound_of(server.chat())

    async def together() -> list[np.ndarray]:
        leavers = [Visitor(server, stream=i % 2 == 0, sampling_params_list=LONG) for i in range(6)]
        tasks = [asyncio.create_task(leaver.visit()) for leaver in leavers]
        async with server.client() as client:
            staying = [
                asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
                for _ in range(3)
            ]
            for leaver in leavers:
                await asyncio.sleep(0.03)
                leaver.left.set()
            await asyncio.gather(*tasks)
            return [sound_of(await task) for task in staying]

    for sound in server.runner.run(together()):
        assert_sounds_like(sound, alone)
    server.settle()


def test_a_slow_reader_holds_up_nobody_and_gets_everything(server: LocalServer) -> None:
    expected = sse_events(server.chat(stream=True))

    async def slowly() -> bytes:
        visitor = Visitor(server, stream=True)
        visitor.reads.clear()
        visiting = asyncio.create_task(visitor.visit())
        async with server.client() as client:
            response = await client.post("/v1/chat/completions", json=chat_body())
        assert response.status_code == 200
        # The stages are done with it long before it has read anything.
        await until(lambda: server.omni.pipeline.is_empty)
        assert not visiting.done() and not visitor.pieces
        visitor.reads.set()
        await visiting
        return b"".join(visitor.pieces)

    data = server.runner.run(slowly())
    blocks = data.decode().split("\n\n")[:-2]
    got = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert content_of(got, "text") == content_of(expected, "text")
    for ours, theirs in zip(content_of(got, "audio"), content_of(expected, "audio"), strict=True):
        assert_sounds_like(wav_samples(decoded(ours)), wav_samples(decoded(theirs)))


def test_a_client_that_takes_nothing_is_cut_off(server: LocalServer) -> None:
    own = LocalServer(server.runner, server.omni, stall_s=0.2)

    async def stall() -> None:
        visitor = Visitor(own, stream=True, sampling_params_list=LONG)
        visiting = asyncio.create_task(visitor.visit())
        await visitor.got_piece.wait()
        visitor.reads.clear()
        await until(visiting.done)
        await until(lambda: own.omni.pipeline.is_empty)

    server.runner.run(stall())
    assert failed(own, "client_disconnect") == 1


def test_silence_is_filled_with_comments(server: LocalServer) -> None:
    # Shorter than any frame takes to be made.
    own = LocalServer(server.runner, server.omni, ping_s=0.001)
    slow = [{}, {"max_tokens": 25, "ignore_eos": True}]
    response = own.chat(stream=True, sampling_params_list=slow, initial_codec_chunk_frames=1)
    assert ": ping\n\n" in response.text
    assert not response.text.startswith(":"), "no 200 before there is something to say"
    sse_events(response)


def test_an_event_is_one_line_for_clients_that_read_lines() -> None:
    text = "one\u2028two\u2029three\u0085four\nfive\r\u00e9"
    event = sse({"text": text}).decode()
    assert event.endswith("\n\n") and len(event.rstrip().splitlines()) == 1
    assert json.loads(event.removeprefix("data: ")) == {"text": text}
