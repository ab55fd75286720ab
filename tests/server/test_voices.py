"""Voices that clients bring: kept whole, found by name, the same after a restart."""

from __future__ import annotations

import asyncio
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from stretto.server.errors import ApiError
from stretto.server.voice_store import VoiceStore, new_voice
from tests.server.reading import ReadingServer, sentences_of, text_of
from tests.server.test_refusals import assert_refused
from tests.server.test_takes import CLONE, batch, tone


@pytest.fixture
def reading(runner: asyncio.Runner, tmp_path: Path) -> ReadingServer:
    return ReadingServer(runner, tmp_path)


def upload(
    reading: ReadingServer, sound: bytes | None = None, *, name: str = "Anna", **fields: Any
) -> Any:
    files = {} if sound is None else {"audio_sample": ("a.wav", sound, "audio/mpeg")}
    data = {"name": name, "consent": "anna-2026", **fields}
    given = {key: value for key, value in data.items() if value is not ...}
    # httpx writes a multipart body only where there is a file.
    parts = {**files, **{key: (None, value) for key, value in given.items()}}
    return reading.request("POST", "/v1/audio/voices", files=parts)


def voices_of(reading: ReadingServer) -> dict[str, Any]:
    body: dict[str, Any] = reading.get("/v1/audio/voices").json()
    return body


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_an_uploaded_voice_is_listed_and_spoken_with(reading: ReadingServer, kind: str) -> None:
    sound = tone(2, kind=kind)
    body = upload(reading, sound, ref_text="Ah", speaker_description="calm").json()
    assert body["success"] is True
    voice = body["voice"]
    assert voice["name"] == "Anna" and voice["consent"] == "anna-2026"
    assert voice["file_size"] == len(sound) and voice["embedding_source"] == "audio"
    mime = {"WAV": "audio/wav", "FLAC": "audio/flac", "OGG": "audio/ogg", "MP3": "audio/mpeg"}
    assert voice["mime_type"] == mime[kind]
    assert (voice["ref_text"], voice["speaker_description"]) == ("Ah", "calm")
    assert voices_of(reading) == {
        "voices": ["ryan", "vivian", "Anna"], "uploaded_voices": [voice],
    }  # fmt: skip
    for named in ("anna", "ANNA", {"id": "Anna"}):
        assert text_of(reading.say("Hi", voice=named).content) == "Hi"
    sample = reading.model.asked[-1].voice
    assert sample is not None and reading.model.asked[-1].speaker is None
    assert sample.content_key == voice["content_key"] and sample.ref_text == "Ah"
    assert abs(len(sample.samples) - 2 * sample.sample_rate) < 0.1 * sample.sample_rate
    reading.say("Hi", voice="anna", x_vector_only_mode=True)
    assert reading.model.asked[-1].voice.ref_text is None
    reading.say("Hi", voice="anna", ref_text="Oh")
    assert reading.model.asked[-1].voice.ref_text == "Oh"


def test_voices_outlive_the_server_until_they_are_deleted(
    reading: ReadingServer, tmp_path: Path
) -> None:
    upload(reading, tone())
    again = ReadingServer(reading.runner, tmp_path)
    assert voices_of(again) == voices_of(reading)
    assert again.say("Hi", voice="anna").status_code == 200
    response = again.request("DELETE", "/v1/audio/voices/ANNA")
    assert response.json()["success"] is True
    assert_refused(again.request("DELETE", "/v1/audio/voices/anna"), 404, "name", "anna")
    assert_refused(reading.say("Hi", voice="anna"), 400, "voice", "ryan")
    assert [path for path in (tmp_path / "voices").rglob("*") if path.is_file()] == []


def test_equal_content_has_one_key_and_is_kept_until_nobody_needs_it(
    reading: ReadingServer, tmp_path: Path
) -> None:
    keys = [upload(reading, tone(), name=name).json()["voice"]["content_key"] for name in "ab"]
    other = upload(reading, tone(1.7), name="c").json()["voice"]["content_key"]
    assert keys[0] == keys[1] != other
    contents = tmp_path / "voices" / "content"
    assert {path.name for path in contents.iterdir()} == {keys[0], other}
    reading.request("DELETE", "/v1/audio/voices/a")
    assert reading.say("Hi", voice="b").status_code == 200
    reading.request("DELETE", "/v1/audio/voices/b")
    assert {path.name for path in contents.iterdir()} == {other}
    # The same sound in a request has the same key: what was computed for one serves the other.
    upload(reading, tone(), name="d")
    reading.say("Hi", voice="d", x_vector_only_mode=True)
    reading.say("Hi", **CLONE)
    assert len({asked.voice.content_key for asked in reading.model.asked[-2:]}) == 1


def test_an_embedding_is_a_voice_too(reading: ReadingServer) -> None:
    voice = upload(reading, speaker_embedding="[0.25, -1, 3]").json()["voice"]
    assert voice["embedding_source"] == "direct" and voice["embedding_dim"] == 3
    reading.say("Hi", voice="anna")
    sample = reading.model.asked[-1].voice
    assert sample.samples is None and np.array_equal(sample.speaker_embedding, [0.25, -1, 3])


def test_voices_are_heard_in_batches_and_on_sockets(reading: ReadingServer) -> None:
    upload(reading, tone(), ref_text="Ah")
    assert batch(reading, [{"input": "Hi"}], voice="anna").json()["succeeded"] == 1

    async def talk() -> None:
        async with reading.session(voice="anna") as talk:
            await talk.write("Hi")
            assert text_of(sentences_of(await talk.until("session.done"))[0][1]) == "Hi"

    reading.runner.run(talk())
    assert len({asked.voice.content_key for asked in reading.model.asked}) == 1


def test_a_name_is_taken_once_whoever_comes_at_the_same_time(reading: ReadingServer) -> None:
    assert upload(reading, tone()).status_code == 200
    response = upload(reading, tone(2), name="ANNA")
    assert_refused(response, 409, "name", "already")
    assert response.headers["x-should-retry"] == "false"
    assert_refused(upload(reading, tone(), name="Ryan"), 409, "name", "own")
    assert_refused(upload(reading, tone(), name="default"), 409, "name", "own")
    # A name of OpenAI's may be given to a voice; whoever asks for it hears that one.
    assert upload(reading, tone(1.9), name="alloy").status_code == 200
    reading.say("Hi", voice="alloy")
    assert reading.model.asked[-1].task_type == "Base"


def test_of_many_uploads_of_one_name_one_is_kept(tmp_path: Path) -> None:
    def add(n: int) -> bool:
        # Stores of their own, like those of several processes.
        voice, content = new_voice(
            name="anna", consent="x", sound=None, numbers=[float(n)], ref_text=None,
            speaker_description=None,
        )  # fmt: skip
        try:
            VoiceStore(tmp_path).add(voice, content)
        except ApiError as error:
            assert error.status == 409
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(add, range(32))) == 1
    store = VoiceStore(tmp_path)
    voice = store.find("anna")
    assert voice is not None
    assert store.sample(voice, ref_text=None).speaker_embedding is not None


BAD_UPLOADS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"name": ...}, 400, "name", "letter"),
    ({"name": ""}, 400, "name", "letter"),
    ({"name": "../x"}, 400, "name", "letter"),
    ({"name": ".x"}, 400, "name", "letter"),
    ({"name": "x" * 65}, 400, "name", "64"),
    ({"name": "a/b"}, 400, "name", "letter"),
    ({"consent": ...}, 400, "consent", "agreed"),
    ({"consent": "false"}, 400, "consent", "agreed"),
    ({"sound": None}, 400, "audio_sample", "speaker_embedding"),
    ({"speaker_embedding": "[1]"}, 400, "audio_sample", "either"),
    ({"sound": None, "speaker_embedding": "[]"}, 400, "speaker_embedding", "0 numbers"),
    ({"sound": None, "speaker_embedding": "{"}, 400, "speaker_embedding", "list"),
    ({"sound": None, "speaker_embedding": "[1e999]"}, 400, "speaker_embedding", ""),
    ({"sound": None, "speaker_embedding": "[1]", "ref_text": "x"}, 400, "ref_text", "audio"),
    ({"sound": b"noise"}, 400, "audio_sample", "WAV"),
    ({"sound": b""}, 400, "audio_sample", "WAV"),
    ({"sound": tone(0.9)}, 400, "audio_sample", "1 to 30"),
    ({"sound": tone(30.5, rate=8000)}, 400, "audio_sample", "1 to 30"),
    ({"sound": b"x" * (10 * 2**20 + 1)}, 413, "audio_sample", "10 MB"),
    ({"descripton": "x"}, 400, "descripton", "speaker_description"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "status", "param", "said"), BAD_UPLOADS, ids=lambda v: str(v)[:40]
)
def test_what_is_no_voice_is_refused_and_leaves_nothing(
    reading: ReadingServer, fields: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    given = {"sound": tone(), **fields}
    assert_refused(upload(reading, **given), status, param, said)
    assert voices_of(reading)["uploaded_voices"] == []


def test_silence_is_no_voice(reading: ReadingServer) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(32000), 16000, format="WAV")
    assert_refused(upload(reading, file.getvalue()), 400, "audio_sample", "silent")


def test_an_upload_is_a_form(reading: ReadingServer) -> None:
    response = reading.post("/v1/audio/voices", {"name": "anna"})
    assert_refused(response, 400, None, "multipart")
    response = reading.request(
        "POST", "/v1/audio/voices", content=b"--x\r\nnonsense",
        headers={"content-type": "multipart/form-data; boundary=x"},
    )  # fmt: skip
    assert response.status_code == 400


def test_a_model_that_clones_nobody_takes_no_voices(reading: ReadingServer, tmp_path: Path) -> None:
    upload(reading, tone())
    own = ReadingServer(reading.runner, tmp_path, kinds=("CustomVoice",))
    assert_refused(upload(own, tone()), 404, None, "clones none")
    assert voices_of(own) == {"voices": ["ryan", "vivian"], "uploaded_voices": []}
    assert_refused(own.request("DELETE", "/v1/audio/voices/ryan"), 400, "name", "stays")
    assert_refused(own.say("Hi", voice="anna"), 400, "voice", "CustomVoice")


def test_what_is_broken_on_disk_is_passed_over(reading: ReadingServer, tmp_path: Path) -> None:
    key = upload(reading, tone()).json()["voice"]["content_key"]
    (tmp_path / "voices" / "broken.json").write_text(json.dumps({"name": 5}))
    assert len(voices_of(reading)["uploaded_voices"]) == 1
    assert_refused(reading.say("Hi", voice="broken"), 400, "voice", "gone")
    (tmp_path / "voices" / "content" / key).unlink()
    assert_refused(reading.say("Hi", voice="anna"), 400, "voice", "upload it again")
