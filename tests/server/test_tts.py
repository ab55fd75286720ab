"""The speech routes over a real model that reads texts out: Qwen3-TTS with random weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.api import AsyncOmni
from stretto.server.app import create_app
from stretto.server.encoders import FORMATS
from stretto.server.protocol import SpeechRequest
from stretto.server.settings import ServerSettings
from stretto.server.tts_model import TtsModel
from tests.server.conftest import RATE, WAIT_S, assert_sounds_like, pcm_samples
from tests.server.reading import ReadingServer, sentences_of
from tests.server.test_encoders import heard
from tests.server.test_refusals import VALUES, assert_refused
from tests.server.test_takes import CLONE, tone
from tests.server.test_voices import upload

TEXT = "Computers can learn to speak with very small models."
NUM_FRAMES = 5


class TtsServer(ReadingServer):
    def __init__(self, runner: asyncio.Runner, omni: AsyncOmni, voices_dir: Path) -> None:
        self.runner = runner
        self.omni = omni
        self.app = create_app(
            omni,
            ServerSettings(model="tiny-tts", voices_dir=voices_dir, segment_chars=60),
            speech=TtsModel(omni.frontend),  # type: ignore[arg-type]
        )

    def say(self, text: str, **fields: Any) -> Any:
        return super().say(text, **{"seed": 5, **fields})

    async def until_empty(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.omni.pipeline.is_empty:
                await asyncio.sleep(0.005)


def started(runner: asyncio.Runner, name: str, cache_dir: Path, voices: Path) -> Iterator[Any]:
    # Random weights find no end by themselves.
    short = {"talker": {"default_sampling": {"max_tokens": NUM_FRAMES}}}
    omni = AsyncOmni(name, inline=True, cache_dir=cache_dir, flags={"stages": short})
    runner.run(omni.start())
    yield TtsServer(runner, omni, voices)
    runner.run(omni.close())


@pytest.fixture(scope="module")
def custom(runner: asyncio.Runner, cache_dir: Path, tmp_path_factory: Any) -> Iterator[TtsServer]:
    yield from started(runner, "tiny-tts", cache_dir, tmp_path_factory.mktemp("voices"))


@pytest.fixture(scope="module")
def base(runner: asyncio.Runner, cache_dir: Path, tmp_path_factory: Any) -> Iterator[TtsServer]:
    yield from started(runner, "tiny-tts-base", cache_dir, tmp_path_factory.mktemp("voices"))


@pytest.mark.parametrize("audio_format", FORMATS)
def test_every_format_holds_the_speech_streamed_and_whole(
    custom: TtsServer, audio_format: Any
) -> None:
    # The same cuts, so that the vocoder adds up alike.
    fields = {"response_format": audio_format, "initial_codec_chunk_frames": 1}
    whole, streamed = custom.say(TEXT, stream=False, **fields), custom.say(TEXT, **fields)
    assert whole.headers["x-vllm-omni-output-tokens"] == str(NUM_FRAMES)
    assert whole.headers["x-finish-reason"] == "length"
    num_samples = len(pcm_samples(custom.say(TEXT, stream=False).content))
    assert 0.3 * RATE < num_samples < 0.5 * RATE
    expected = heard(audio_format, whole.content, num_samples)
    assert np.array_equal(heard(audio_format, streamed.content, num_samples), expected)


@pytest.mark.parametrize("pieces", [[TEXT], list(TEXT), [TEXT[:13], TEXT[13:30], TEXT[30:]]])
def test_a_text_in_pieces_sounds_like_the_whole(custom: TtsServer, pieces: list[str]) -> None:
    # With the text beside its frames, as it must be while it is still being written.
    whole = custom.say(TEXT, non_streaming_mode=False, initial_codec_chunk_frames=1)

    async def talk() -> bytes:
        async with custom.session(
            text_streaming=True, seed=5, initial_codec_chunk_frames=1
        ) as talk:
            await talk.write(*pieces)
            ((_, sound, failed),) = sentences_of(await talk.until("session.done"))
            assert not failed
            return sound

    sound = custom.runner.run(talk())
    assert_sounds_like(pcm_samples(sound), pcm_samples(whole.content))


def test_a_socket_that_is_left_leaves_nothing_behind(custom: TtsServer) -> None:
    async def talk() -> None:
        async with custom.session(text_streaming=True) as talk:
            await talk.write("Computers can", done=False)
            await talk.next()
            async with asyncio.timeout(WAIT_S):
                while custom.omni.pipeline.is_empty:
                    await asyncio.sleep(0.005)
            talk.connection.transport.abort()
            await custom.until_empty()

    custom.runner.run(talk())


def test_a_long_text_is_spoken_sentence_by_sentence_in_one_stream(custom: TtsServer) -> None:
    once, twice = custom.say(TEXT).content, custom.say(f"{TEXT} {TEXT}").content
    assert twice[: len(once)] == once and len(twice) == 2 * len(once)
    assert_sounds_like(pcm_samples(twice[len(once) :]), pcm_samples(once))


def test_a_voice_that_was_brought_is_heard(base: TtsServer) -> None:
    assert_refused(base.say(TEXT), 400, "ref_audio", "uploaded voice")
    sound = tone(2)
    assert upload(base, sound, ref_text="Ah").status_code == 200
    sounds = {
        name: base.say(TEXT, **fields).content
        for name, fields in {
            "kept": {"voice": "anna"},
            "kept speaker": {"voice": "anna", "x_vector_only_mode": True},
            "given": {**CLONE},
            "given speaker": {"ref_audio": CLONE["ref_audio"], "x_vector_only_mode": True},
            "again": {"voice": "anna"},
        }.items()
    }
    assert all(len(sound) > 0.6 * RATE for sound in sounds.values())
    assert sounds["kept"] == sounds["again"] != sounds["kept speaker"]
    assert_refused(base.say(TEXT, speaker_embedding=[1.0]), 400, "speaker_embedding", "numbers")


SPEECH_FIELDS = sorted({*SpeechRequest.model_fields, "extra_body", "type"})


@settings(max_examples=60)
@given(fields=st.dictionaries(st.sampled_from(SPEECH_FIELDS), VALUES, min_size=1, max_size=3))
def test_no_body_makes_the_server_fail_or_hang(custom: TtsServer, fields: dict[str, Any]) -> None:
    for path, body in (
        ("/v1/audio/speech", {"input": "Hi", **fields}),
        ("/v1/audio/speech/batch", {"items": [{"input": "Hi", **fields}]}),
    ):
        response = custom.request(
            "POST", path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert response.status_code in (200, 400, 404), response.text


@settings(max_examples=25)
@given(
    messages=st.lists(
        st.dictionaries(
            st.sampled_from([*SPEECH_FIELDS, "text", "split_granularity", "text_streaming"]),
            VALUES | st.sampled_from(["input.text", "input.done", "session.config"]),
            max_size=3,
        ),
        max_size=6,
    )
)
def test_no_message_makes_a_session_fail_or_hang(
    custom: TtsServer, messages: list[dict[str, Any]]
) -> None:
    async def talk() -> None:
        async with custom.session(seed=5) as talk:
            for message in messages:
                await talk.send(**message)
            # Whatever they did, a session can be set right and spoken with.
            await talk.write(done=True)
            await talk.send(type="session.config", seed=5)
            await talk.write("Hi")
            await talk.send(type="session.close")
            assert await talk.closed() == 1000

    custom.runner.run(talk())
