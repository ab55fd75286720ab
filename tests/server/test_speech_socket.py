"""The speech socket: text in while it is being written, sound out, and every error by its name."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.server.conftest import WAIT_S
from tests.server.reading import ReadingServer, sentences_of, text_of
from tests.server.test_chat import series

TEXT = "Dr. One is here. Two, too, is here. Three"


@pytest.fixture
def reading(runner: asyncio.Runner, tmp_path: Path) -> ReadingServer:
    return ReadingServer(runner, tmp_path)


def test_an_utterance_is_one_request_unless_it_is_to_be_split(reading: ReadingServer) -> None:
    async def talk() -> None:
        async with reading.session(voice="Ryan", seed=3, language="english") as talk:
            await talk.write("Dr. One is", " here. Two, too,", " is here. Three")
            messages = await talk.until("session.done")
            assert messages[0] == {
                "type": "audio.start", "utterance_index": 0, "sentence_index": 0,
                "sentence_text": TEXT, "format": "pcm", "sample_rate": 24000,
            }  # fmt: skip
            ((_, sound, failed),) = sentences_of(messages)
            assert text_of(sound) == TEXT and not failed
            assert messages[-2]["finish_reason"] == "stop"
            assert messages[-1] == {
                "type": "session.done", "utterance_index": 0, "total_sentences": 1,
            }  # fmt: skip

    reading.runner.run(talk())
    (asked,) = reading.model.asked
    assert (asked.speaker, asked.language, asked.sampling) == ("ryan", "English", {"seed": 3})


@pytest.mark.parametrize(
    ("granularity", "pieces"),
    [
        ("sentence", ["Dr. One is here.", "Two, too, is here.", "Three"]),
        ("clause", ["Dr. One is here.", "Two, too, is here.", "Three"]),
    ],
)
def test_sentences_are_spoken_while_the_text_is_written(
    reading: ReadingServer, granularity: str, pieces: list[str]
) -> None:
    async def talk() -> None:
        async with reading.session(split_granularity=granularity) as talk:
            await talk.write(*TEXT[:20], done=False)
            first = await talk.until("audio.done")
            assert [text for text, _, _ in sentences_of(first)] == pieces[:1]
            await talk.write(*TEXT[20:])
            said = sentences_of(first + await talk.until("session.done"))
            assert [text for text, _, _ in said] == pieces
            assert [text_of(sound) for _, sound, _ in said] == pieces

    reading.runner.run(talk())
    assert len({asked.sampling["seed"] for asked in reading.model.asked}) == 1, "one voice"


def test_a_streamed_text_is_heard_before_it_is_written_to_its_end(reading: ReadingServer) -> None:
    async def talk() -> None:
        async with reading.session(text_streaming=True) as talk:
            await talk.write(" ", "Dr. On", done=False)
            messages = [await talk.next(), await talk.next()]
            assert messages[0]["sentence_text"] == " Dr. On"
            await talk.write("e is", " here. Two, too, is here. Three")
            messages += await talk.until("session.done")
            ((_, sound, _),) = sentences_of(messages)
            assert text_of(sound) == " " + TEXT
            assert messages[-1]["total_sentences"] == 1

    reading.runner.run(talk())
    assert [asked.pieces for asked in reading.model.asked] == [True]


def test_a_streamed_text_that_a_limit_cuts_ends_with_its_own_end(reading: ReadingServer) -> None:
    async def talk() -> None:
        async with reading.session(text_streaming=True, max_new_tokens=5) as talk:
            await talk.write("One two", " three", done=False)
            messages = await talk.until("audio.done")
            assert text_of(sentences_of(messages)[0][1]) == "One t"
            assert messages[-1]["finish_reason"] == "length"
            await talk.write(" four")
            assert (await talk.next())["type"] == "session.done"
            await talk.write("x")
            assert text_of(sentences_of(await talk.until("session.done"))[0][1]) == "x"

    reading.runner.run(talk())


def test_utterances_follow_each_other_each_with_its_own_voice(reading: ReadingServer) -> None:
    async def talk() -> None:
        async with reading.session(voice="ryan") as talk:
            await talk.write("One")
            await talk.send(type="session.config", voice="vivian", response_format="wav",
                            stream_audio=False)  # fmt: skip
            await talk.write("Two")
            await talk.write(" ")
            await talk.write("...")
            await talk.send(type="session.close")
            for index, total in enumerate([1, 1, 0, 0]):
                messages = await talk.until("session.done")
                assert messages[-1] == {
                    "type": "session.done", "utterance_index": index, "total_sentences": total,
                }  # fmt: skip
                said = sentences_of(messages)
                assert len(said) == total
                if index == 0:
                    assert text_of(said[0][1]) == "One"
                if index == 1:
                    assert len(messages) == 4, "one frame"
                    samples, _ = soundfile.read(io.BytesIO(said[0][1]), dtype="int16")
                    assert text_of(samples.tobytes()) == "Two"
            assert await talk.closed() == 1000

    reading.runner.run(talk())
    assert [asked.speaker for asked in reading.model.asked] == ["ryan", "vivian"]


def test_close_says_what_was_written(reading: ReadingServer) -> None:
    async def talk() -> None:
        async with reading.session(voice="ryan") as talk:
            await talk.write("One", done=False)
            await talk.send(type="session.close")
            await talk.send(type="input.text", text="more")
            messages = await talk.until("session.done")
            assert [text_of(sound) for _, sound, _ in sentences_of(messages)] == ["One"]
            assert await talk.closed() == 1000

    reading.runner.run(talk())


BAD_MESSAGES: list[tuple[dict[str, Any] | str | bytes, str | None, str]] = [
    ("{", None, "JSON"),
    ("[]", "type", "session.config"),
    ('{"text": "x"}', "type", "input.text"),
    ({"type": "input.texts"}, "type", "input.text"),
    (b"sound", "type", "binary"),
    ({"type": "input.text"}, "text", "missing"),
    ({"type": "input.text", "text": 5}, "text", "string"),
    ({"type": "input.text", "text": "x" * 5000}, "text", "4096"),
    ({"type": "input.text", "text": "x" * 2**18}, "text", "131072"),
    ({"type": "session.config", "voice": "nobody"}, "voice", "vivian"),
    ({"type": "session.config", "speed": 9}, "speed", "4"),
    ({"type": "session.config", "response_format": "aac"}, "response_format", "mp3"),
    ({"type": "session.config", "split_granularity": "word"}, "split_granularity", "clause"),
    ({"type": "session.config", "input": "x"}, "input", "not a field"),
    ({"type": "session.config", "text_streaming": True, "split_granularity": "clause"},
     "split_granularity", "none"),
    ({"type": "session.config", "model": "other"}, "model", "served here"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "param", "said"), BAD_MESSAGES, ids=lambda v: str(v)[:50])
def test_a_wrong_message_is_answered_and_the_session_goes_on(
    reading: ReadingServer, bad: Any, param: str | None, said: str
) -> None:
    async def talk() -> None:
        async with reading.session(voice="ryan") as talk:
            await talk.connection.send(json.dumps(bad) if isinstance(bad, dict) else bad)
            error = await talk.next()
            assert error["type"] == "error" and error["param"] == param
            assert said.lower() in error["message"].lower()
            await talk.send(type="session.config", voice="ryan")
            await talk.write("One")
            messages = await talk.until("session.done")
            assert text_of(sentences_of(messages)[0][1]) == "One"
            assert not [m for m in messages if not isinstance(m, bytes) and m["type"] == "error"]

    reading.runner.run(talk())


def test_the_order_of_messages_is_told(reading: ReadingServer) -> None:
    async def talk() -> None:
        async with reading.session() as talk:
            await talk.write("x")
            for _ in range(2):
                assert "session.config comes first" in (await talk.next())["message"]
            await talk.send(type="session.config")
            await talk.write("x", done=False)
            await talk.send(type="session.config")
            assert "between utterances" in (await talk.next())["message"]
            # A configuration that is wrong leaves none.
            await talk.send(type="input.done")
            await talk.until("session.done")
            await talk.send(type="session.config", speed=9)
            await talk.next()
            await talk.write("x")
            assert "session.config comes first" in (await talk.next())["message"]

    reading.runner.run(talk())


@pytest.mark.parametrize("text", ["Bad \a one.", "Bad \x01 one."])
def test_a_sentence_that_fails_has_its_error_and_its_end(reading: ReadingServer, text: str) -> None:
    async def talk() -> None:
        async with reading.session(split_granularity="sentence") as talk:
            await talk.write("One is. ", text, " Two is.")
            messages = await talk.until("session.done")
            errors = [m for m in messages if not isinstance(m, bytes) and m["type"] == "error"]
            assert len(errors) == 1 and errors[0]["message"]
            assert [failed for _, _, failed in sentences_of(messages)] == [False, True, False]
            assert messages[-1]["total_sentences"] == 3

    reading.runner.run(talk())


@pytest.mark.parametrize("config", [{}, {"text_streaming": True}, {"split_granularity": "clause"}])
def test_a_client_that_goes_ends_everything_at_once(
    reading: ReadingServer, config: dict[str, Any]
) -> None:
    reading.pipeline.delta_s = 0.02

    async def talk() -> None:
        async with reading.session(voice="ryan", **config) as talk:
            await talk.write("One is here. " * 20)
            await talk.write("x" * 100)
            while not isinstance(await talk.next(), bytes):
                pass
            assert reading.pipeline.live and reading.service.gate.num_inside == 1
            # What would go on takes longer than anybody waits.
            reading.pipeline.delta_s = 2 * WAIT_S
            talk.connection.transport.abort()
            await reading.until_empty()
            assert reading.service.gate.num_inside == 0
            await asyncio.sleep(0.05)

    reading.runner.run(talk())
    text = reading.get("/metrics").text
    handler = 'handler="/v1/audio/speech/stream"'
    assert series(text, "vllm:websocket_connections_total", handler) == 1
    assert series(text, "vllm:websocket_connections_active") == 0
    assert series(text, "vllm:websocket_connection_duration_seconds_count") == 1
    assert series(text, "vllm_omni:requests_failed_total", '"client_disconnect"') == 1
    assert series(text, "vllm_omni:speech_stream_aborted_total", '"closed"') == 1


def test_a_client_that_takes_nothing_is_cut_off(runner: asyncio.Runner, tmp_path: Path) -> None:
    reading = ReadingServer(runner, tmp_path, stall_s=0.2)

    async def talk() -> None:
        # Some megabytes: more than all buffers on the way hold.
        async with reading.session(speed=0.25, sample_rate=48000) as talk:
            for _ in range(12):
                await talk.write("x" * 4000)
            await asyncio.sleep(0.1)
            async with asyncio.timeout(WAIT_S):
                while reading.service.gate.num_inside:
                    await asyncio.sleep(0.02)
            await reading.until_empty()
            talk.connection.transport.abort()

    runner.run(talk())


def test_pages_of_other_origins_are_refused_where_origins_are_limited(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    reading = ReadingServer(runner, tmp_path, allowed_origins=("http://ours",))

    async def knock() -> None:
        async with reading.at_a_port() as address:
            url = f"ws://{address}/v1/audio/speech/stream"
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, origin="http://theirs")
            assert refused.value.response.status_code == 403
            for origin in (None, "http://ours"):
                async with connect(url, origin=origin) as connection:
                    await connection.close()

    runner.run(knock())


def test_a_session_without_configuration_or_text_is_closed(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    reading = ReadingServer(runner, tmp_path, socket_config_s=0.5, socket_idle_s=0.6)

    async def talk() -> None:
        async with reading.session() as talk:
            await talk.send(type="input.text")
            messages = await talk.until("error") + await talk.until("error")
            assert "without session.config for 0.5 s" in messages[-1]["message"]
            assert await talk.closed() == 1008
        async with reading.session(voice="ryan") as talk:
            # What is being said is waited for, however long it takes.
            reading.pipeline.delta_s = 0.2
            await talk.write("x" * 24)
            await talk.until("session.done")
            assert "idle for 0.6 s" in (await talk.next())["message"]
            assert await talk.closed() == 1001

    runner.run(talk())


def test_a_socket_needs_the_key_and_a_model_that_reads(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    reading = ReadingServer(runner, tmp_path, api_keys=("one",))

    async def knock() -> None:
        async with reading.at_a_port() as address:
            url = f"ws://{address}/v1/audio/speech/stream"
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            assert refused.value.response.status_code == 401
            assert b"invalid_api_key" in refused.value.response.body
            headers = {"authorization": "Bearer one"}
            async with connect(url, additional_headers=headers) as connection:
                await connection.send('{"type": "session.close"}')
                await connection.wait_closed()
            reading.service.gate.is_draining = True
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers=headers)
            assert refused.value.response.status_code == 503

    runner.run(knock())
