"""Long texts, whole batches, and everything a request may say about how it is to sound."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from stretto.sentences import segments
from stretto.server.encoders import FORMATS
from tests.server.conftest import WAIT_S, decoded
from tests.server.reading import FRAME, RATE, ReadingServer, text_of
from tests.server.test_chat import series
from tests.server.test_refusals import assert_refused
from tests.server.test_speech import events_of

LONG = " ".join(f"Sentence number {n} is here." for n in range(12))


def tone(seconds: float = 1.5, *, rate: int = 16000, kind: str = "WAV", channels: int = 1) -> bytes:
    file = io.BytesIO()
    samples = 0.3 * np.sin(np.arange(int(seconds * rate)) * 0.05)
    soundfile.write(file, np.stack([samples] * channels, axis=1), rate, format=kind)
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(content).decode()}"


@pytest.fixture
def reading(runner: asyncio.Runner, tmp_path: Path) -> ReadingServer:
    return ReadingServer(runner, tmp_path, segment_chars=60)


# ---- long texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [None, False, True])
def test_a_long_text_is_one_sound_of_all_its_sentences(
    reading: ReadingServer, stream: bool | None
) -> None:
    # Long enough that the next one is prepared meanwhile.
    reading.pipeline.delta_s = 0.01
    response = reading.say(LONG, stream=stream)
    sound = response.content
    if stream:
        *deltas, done = events_of(response)
        sound = b"".join(decoded(delta["audio"]) for delta in deltas)
        assert done["finish_reason"] == "stop"
        assert done["usage"]["output_tokens"] == len(sound) / 2 / FRAME
    expected = segments(LONG, max_chars=60)
    assert len(expected) > 5
    assert text_of(sound) == "".join(expected)
    assert [asked.text for asked in reading.model.asked] == expected
    seeds = {asked.sampling["seed"] for asked in reading.model.asked}
    assert len(seeds) == 1, "one voice throughout"
    assert reading.pipeline.most_at_once == 2, "one ahead, and no more"
    assert "speech_stream_completed" in reading.get("/metrics").text


def test_a_text_that_fits_is_one_request_and_keeps_its_own_chance(reading: ReadingServer) -> None:
    reading.say(LONG[:60])
    (asked,) = reading.model.asked
    assert asked.text == LONG[:60] and asked.sampling == {}


def test_the_frames_of_all_segments_count_together(reading: ReadingServer) -> None:
    first, second, *_ = segments(LONG, max_chars=60)
    for limit, said in ((len(first) + 7, first + second[:7]), (len(first), first)):
        response = reading.say(LONG, max_new_tokens=limit, stream=False)
        assert text_of(response.content) == said
        assert response.headers["x-finish-reason"] == "length"
        assert response.headers["x-vllm-omni-output-tokens"] == str(limit)
    assert series(reading.get("/metrics").text, "stretto:speech_cut_total") == 2


def test_a_segment_that_fails_ends_the_whole_and_nothing_is_left(reading: ReadingServer) -> None:
    events = events_of(reading.say(LONG + " It \a fails. " + LONG, stream=True))
    assert events[-1]["type"] == "speech.audio.error"
    assert events[-1]["error"]["code"] == 500
    assert not reading.pipeline.live
    text = reading.get("/metrics").text
    assert series(text, "vllm_omni:speech_stream_aborted_total", '"error"') == 1


def test_a_text_that_has_begun_waits_for_a_place(runner: asyncio.Runner, tmp_path: Path) -> None:
    reading = ReadingServer(runner, tmp_path, segment_chars=60, max_requests=1)
    assert text_of(reading.say(LONG).content) == "".join(segments(LONG, max_chars=60))
    reading.pipeline.max_requests = 0
    assert_refused(reading.say(LONG), 429, None, "full")


@pytest.mark.parametrize("audio_format", FORMATS)
def test_a_take_without_a_frame_is_an_empty_file(reading: ReadingServer, audio_format: str) -> None:
    # The stand-in says nothing where it may say nothing.
    reading.pipeline.submit = _silent(reading.pipeline.submit)  # type: ignore[method-assign]
    for stream in (None, False, True):
        response = reading.say("x", response_format=audio_format, stream=stream)
        assert response.status_code == 200
    if audio_format == "wav":
        whole = reading.say("x", response_format="wav", stream=False)
        samples, _ = soundfile.read(io.BytesIO(whole.content))
        assert len(samples) == 0


def _silent(submit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def silent(request: Any) -> Any:
        request.sampling.max_tokens = 0
        return submit(request)

    return silent


# ---- what a request may say ----------------------------------------------------------------------


def test_everything_reaches_the_model(reading: ReadingServer) -> None:
    reading.say(
        "Hi", voice={"id": "Ryan"}, instructions="Softly.", language="CHINESE", seed=5,
        max_new_tokens=9, initial_codec_chunk_frames=2, extra_body={"non_streaming_mode": True},
    )  # fmt: skip
    (asked,) = reading.model.asked
    assert (asked.text, asked.speaker, asked.task_type) == ("Hi", "ryan", "CustomVoice")
    assert (asked.instructions, asked.language) == ("Softly.", "Chinese")
    assert asked.sampling == {"seed": 5, "max_tokens": 9}
    assert asked.initial_codec_chunk_frames == 2 and asked.non_streaming_mode is True
    assert asked.voice is None and not asked.pieces


def test_a_sound_is_a_voice_to_speak_like(reading: ReadingServer, tmp_path: Path) -> None:
    content = tone(channels=2)
    opened = ReadingServer(reading.runner, tmp_path, allowed_local_media_path=tmp_path)
    (tmp_path / "a voice.wav").write_bytes(content)
    for server, ref_audio in (
        (reading, data_url(content)),
        (opened, f"file://{tmp_path}/a%20voice.wav"),
    ):
        assert server.say("Hi", ref_audio=ref_audio, ref_text="Ah").status_code == 200
        assert server.say("Hi", ref_audio=ref_audio, x_vector_only_mode=True).status_code == 200
        voices = [asked.voice for asked in server.model.asked]
        assert all(voice is not None for voice in voices)
        assert voices[0].content_key == voices[1].content_key
        assert voices[0].samples.shape == (24000,) and voices[0].sample_rate == 16000
        assert [voice.ref_text for voice in voices] == ["Ah", None]
        assert {asked.task_type for asked in server.model.asked} == {"Base"}
    assert reading.say("Hi", speaker_embedding=[0.5, 1]).status_code == 200
    embedding = reading.model.asked[-1].voice.speaker_embedding
    assert embedding.dtype == np.float32 and embedding.tolist() == [0.5, 1]


EMBEDDING = {"speaker_embedding": [0.5]}
CLONE = {"ref_audio": data_url(tone()), "ref_text": "Ah"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": "x" * 5000}, "input", "4096"),
    ({"input": "\x01"}, "input", "control"),
    ({"instructions": "x" * 501}, "instructions", "500"),
    ({"language": "klingon"}, "language", "english"),
    ({"task_type": "Clone"}, "task_type", "'Base'"),
    ({"task_type": "Base"}, "ref_audio", "speaker_embedding"),
    ({"task_type": "VoiceDesign"}, "instructions", "describe"),
    ({"task_type": "VoiceDesign", "instructions": " "}, "instructions", "describe"),
    ({"task_type": "CustomVoice", **CLONE}, "task_type", "'Base'"),
    ({"ref_text": "Ah"}, "ref_text", "missing"),
    ({"x_vector_only_mode": True}, "x_vector_only_mode", "ref_audio"),
    ({"ref_audio": CLONE["ref_audio"]}, "ref_text", "x_vector_only_mode"),
    ({**CLONE, **EMBEDDING}, "speaker_embedding", "exclude"),
    ({**EMBEDDING, "ref_text": "Ah"}, "ref_text", "missing"),
    ({"speaker_embedding": []}, "speaker_embedding", "0 numbers"),
    ({"speaker_embedding": [1e300]}, "speaker_embedding", "finite"),
    ({"speaker_embedding": ["x"]}, "speaker_embedding[0]", "number"),
    ({**CLONE, "ref_audio": "https://example.com/a.wav"}, "ref_audio", "fetches nothing"),
    ({**CLONE, "ref_audio": "file:///etc/passwd"}, "ref_audio", "--allowed-local-media-path"),
    ({**CLONE, "ref_audio": "UklGRg=="}, "ref_audio", "data:"),
    ({**CLONE, "ref_audio": "data:audio/wav,abc"}, "ref_audio", ";base64,"),
    ({**CLONE, "ref_audio": "data:audio/wav;base64,?"}, "ref_audio", "base64"),
    ({**CLONE, "ref_audio": data_url(b"noise")}, "ref_audio", "WAV"),
    ({**CLONE, "ref_audio": data_url(tone(0.5))}, "ref_audio", "1 to 30 s"),
    ({**CLONE, "ref_audio": data_url(tone(31))}, "ref_audio", "1 to 30 s"),
    ({**CLONE, "ref_audio": data_url(tone(rate=4000))}, "ref_audio", "8000"),
    ({"max_new_tokens": 10_000}, "max_new_tokens", "9999"),
    ({"max_new_tokens": 0}, "max_new_tokens", "1"),
    ({"response_format": "aac"}, "response_format", "'opus'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "said"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_refused_by_name(
    reading: ReadingServer, fields: dict[str, Any], param: str, said: str
) -> None:
    assert_refused(reading.say(**{"text": "Hi", **_renamed(fields)}), 400, param, said)
    assert not reading.pipeline.requests


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"text" if name == "input" else name: value for name, value in fields.items()}


def test_a_sound_over_ten_megabytes_is_too_large(reading: ReadingServer) -> None:
    big = {**CLONE, "ref_audio": data_url(b"x" * (10 * 2**20 + 1))}
    assert_refused(reading.say("Hi", **big), 413, "ref_audio", "10 MB")


def test_files_are_read_only_below_the_open_directory(
    reading: ReadingServer, tmp_path: Path
) -> None:
    inside = tmp_path / "open"
    inside.mkdir()
    (tmp_path / "secret.wav").write_bytes(tone())
    (inside / "link.wav").symlink_to(tmp_path / "secret.wav")
    opened = ReadingServer(reading.runner, tmp_path, allowed_local_media_path=inside)
    for path in (
        f"{tmp_path}/secret.wav", f"{inside}/../secret.wav", f"{inside}/link.wav",
        f"{inside}/nothing.wav", f"{inside}", f"{inside}/%00.wav", "relative.wav",
    ):  # fmt: skip
        response = opened.say("Hi", **{**CLONE, "ref_audio": f"file://{path}"})
        assert_refused(response, 400, "ref_audio", "may be read")


def test_a_checkpoint_does_what_it_was_made_for(runner: asyncio.Runner, tmp_path: Path) -> None:
    design = ReadingServer(runner, tmp_path, kinds=("VoiceDesign",), speakers=())
    assert_refused(design.say("Hi"), 400, "instructions", "describe")
    assert design.say("Hi", voice="alloy", instructions="An old man.").status_code == 200
    assert_refused(design.say("Hi", **CLONE), 400, "ref_audio", "VoiceDesign")
    assert_refused(design.say("Hi", task_type="CustomVoice"), 400, "task_type", "VoiceDesign")
    base = ReadingServer(runner, tmp_path, kinds=("Base",), speakers=())
    assert_refused(base.say("Hi"), 400, "ref_audio", "uploaded voice")


def test_limits_are_the_operators(runner: asyncio.Runner, tmp_path: Path) -> None:
    reading = ReadingServer(runner, tmp_path, max_input_chars=10, max_instruction_chars=3)
    assert_refused(reading.say("x" * 11), 400, "input", "10")
    assert_refused(reading.say("x", instructions="yyyy"), 400, "instructions", "3")


def test_the_official_sdk_speaks_in_every_format(reading: ReadingServer) -> None:
    async def speak() -> None:
        async with reading.at_a_port() as address:
            client = openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0)
            for audio_format in FORMATS:
                async with client.audio.speech.with_streaming_response.create(
                    model="gpt-4o-mini-tts", voice="alloy", input=LONG, speed=1.25,
                    response_format=audio_format, instructions="Softly.",
                ) as response:  # fmt: skip
                    assert await response.read()
            with pytest.raises(openai.BadRequestError, match="500"):
                await client.audio.speech.create(
                    model="tts-1", voice="alloy", input="Hi", instructions="x" * 501
                )
            with pytest.raises(openai.BadRequestError, match="'opus'"):
                await client.audio.speech.create(
                    model="tts-1", voice="alloy", input="Hi", response_format="aac"
                )
            await client.close()

    reading.runner.run(speak())


# ---- batches -------------------------------------------------------------------------------------


def batch(reading: ReadingServer, items: list[Any], **shared: Any) -> Any:
    body = {"response_format": "pcm", "items": items, **shared}
    return reading.post("/v1/audio/speech/batch", body)


def test_a_batch_answers_each_item_with_its_sound_or_its_error(reading: ReadingServer) -> None:
    items = [
        {"input": "One"}, {"input": "Two", "voice": "vivian", "response_format": "wav"},
        {"input": " "}, {"input": "x", "voice": "nobody"}, {"input": "a \a b"}, {"inputs": "x"},
        {"input": LONG},
    ]  # fmt: skip
    body = batch(reading, items, voice="ryan", seed=4).json()
    results = body["results"]
    assert [result["index"] for result in results] == list(range(7))
    assert (body["total"], body["succeeded"], body["failed"]) == (7, 3, 4)
    assert text_of(decoded(results[0]["audio_data"])) == "One"
    assert results[0]["media_type"] == "audio/pcm" and results[0]["error"] is None
    assert results[0]["usage"] == {"input_tokens": 3, "output_tokens": 3, "total_tokens": 6}
    assert results[1]["media_type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(decoded(results[1]["audio_data"])))
    assert (len(samples), rate) == (3 * FRAME, RATE)
    for index, said in ((2, "empty"), (3, "vivian"), (4, "cannot say"), (5, "input")):
        assert results[index]["status"] == "error" and said in results[index]["error"]
        assert results[index]["audio_data"] is None
    assert text_of(decoded(results[6]["audio_data"])) == "".join(segments(LONG, max_chars=60))
    speakers = {asked.text: asked.speaker for asked in reading.model.asked}
    assert speakers["One"] == "ryan" and speakers["Two"] == "vivian"


def test_items_run_side_by_side_and_wait_for_places(runner: asyncio.Runner, tmp_path: Path) -> None:
    reading = ReadingServer(runner, tmp_path, max_requests=5)
    body = batch(reading, [{"input": f"text {n}"} for n in range(32)]).json()
    assert body["succeeded"] == 32
    assert reading.pipeline.most_at_once == 5


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"items": []}, "items", "at least 1"),
        ({"items": [{"input": "x"}] * 33}, "items", "32"),
        ({"items": {"input": "x"}}, "items", "list"),
        ({"items": ["x"]}, "items[0]", "object"),
        ({"speed": 9}, "speed", "4"),
        ({"voise": "ryan"}, "voise", "not a field"),
        ({"input": "x"}, "input", "items"),
        ({"stream": True}, "stream", "whole"),
    ],
)
def test_what_is_wrong_for_all_is_refused_at_once(
    reading: ReadingServer, fields: dict[str, Any], param: str, said: str
) -> None:
    body = {"items": [{"input": "x"}], **fields}
    assert_refused(reading.post("/v1/audio/speech/batch", body), 400, param, said)


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/speech/batch"])
def test_a_client_that_goes_ends_all_of_it(reading: ReadingServer, path: str) -> None:
    reading.pipeline.delta_s = 0.02
    body = {"input": LONG} if path.endswith("speech") else {"items": [{"input": LONG}] * 8}

    async def leave() -> None:
        async with reading.at_a_port() as address:
            host, port = address.split(":")
            data = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(data)}\r\n\r\n"
            )
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + data)
            while reading.pipeline.most_at_once < (2 if "input" in body else 8):
                await asyncio.sleep(0.005)
            # What would go on takes longer than anybody waits.
            reading.pipeline.delta_s = 2 * WAIT_S
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            writer.close()
            await reading.until_empty()

    reading.runner.run(leave())
    text = reading.get("/metrics").text
    assert series(text, "vllm_omni:requests_failed_total", '"client_disconnect"') >= 2
