"""Chat answers in both dialects: what is in them, in which order, and that the sums are right."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile

from stretto.audio import pcm16
from stretto.server.chat import read_chat
from stretto.server.protocol import ChatRequest
from tests.server.conftest import (
    NUM_FRAMES,
    NUM_SAMPLES,
    NUM_TOKENS,
    RATE,
    SHORT,
    LocalServer,
    audio_parts,
    chat_body,
    content_of,
    decoded,
    pcm_samples,
    sse_events,
    wav_samples,
)

OPENAI_AUDIO = {"voice": "alloy", "format": "pcm16"}
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def finish_reasons(events: list[dict[str, Any]]) -> list[str]:
    reasons = [choice.get("finish_reason") for e in events for choice in e["choices"]]
    return [reason for reason in reasons if reason is not None]


def shape(event: dict[str, Any]) -> str:
    """What a chunk is, in a word."""
    if not event["choices"]:
        return "usage"
    choice = event["choices"][0]
    delta = choice["delta"]
    if choice.get("finish_reason") is not None:
        assert delta == {}
        return "stop"
    if "expires_at" in delta.get("audio", {}):
        return "expiry"
    if "role" in delta and not delta.get("content"):
        return "head"
    return str(event["modality"])


# ---- vllm-omni's dialect -------------------------------------------------------------------------


def test_without_an_audio_object_each_chunk_of_sound_is_a_wav(server: LocalServer) -> None:
    events = sse_events(server.chat(stream=True, stream_options=CONTINUOUS))
    wavs = [decoded(data) for data in content_of(events, "audio")]
    assert len(wavs) >= 2
    for wav in wavs:
        info = soundfile.info(io.BytesIO(wav))
        assert (info.format, info.samplerate, info.channels) == ("WAV", RATE, 1)
    for event in events:
        if event.get("modality") == "audio":
            metadata = event["choices"][0]["audio_metadata"]
            wav = decoded(event["choices"][0]["delta"]["content"])
            assert metadata["frame_count"] == len(wav_samples(wav))
            assert event["usage"]["completion_tokens"] == 0
    assert "".join(content_of(events, "text"))


def test_text_tokens_grow_on_every_text_chunk(server: LocalServer) -> None:
    events = sse_events(server.chat(stream=True, stream_options=CONTINUOUS))
    counts = [e["usage"]["completion_tokens"] for e in events if shape(e) == "text"]
    assert counts == sorted(set(counts))
    assert counts[-1] == NUM_TOKENS
    plain = sse_events(server.chat(stream=True))
    assert all("usage" not in event for event in plain if shape(event) == "text")


@pytest.mark.parametrize(
    ("modalities", "shapes"),
    [
        (["text", "audio"], {"head", "text", "audio", "stop", "usage"}),
        (["text"], {"head", "text", "stop", "usage"}),
        (["audio"], {"audio", "stop", "usage"}),
    ],
)
def test_a_stream_has_exactly_the_modalities_asked_for(
    server: LocalServer, modalities: list[str], shapes: set[str]
) -> None:
    events = sse_events(server.chat(stream=True, stream_options=USAGE, modalities=modalities))
    assert {shape(event) for event in events} == shapes
    assert [shape(event) for event in events][-2:] == ["stop", "usage"]
    assert finish_reasons(events) == ["length"]
    audio_tokens = events[-1]["usage"]["completion_tokens_details"]["audio_tokens"]
    assert audio_tokens == (NUM_FRAMES if "audio" in modalities else 0)


# ---- OpenAI's dialect ----------------------------------------------------------------------------


def test_with_an_audio_object_the_words_are_its_transcript(server: LocalServer) -> None:
    events = sse_events(server.chat(stream=True, stream_options=USAGE, audio=OPENAI_AUDIO))
    shapes = [shape(event) for event in events]
    assert shapes[0] == "head"
    assert shapes[-3:] == ["stop", "usage", "expiry"]
    assert set(shapes[1:-3]) == {"text", "audio"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert "finish_reason" not in events[-1]["choices"][0]
    assert finish_reasons(events) == ["length"]
    ids = audio_parts(events, "id")
    assert len(ids) == 2 and len(set(ids)) == 1, "once with each kind of content"
    whole = server.chat(audio=OPENAI_AUDIO).json()["choices"][0]["message"]
    assert "".join(audio_parts(events, "transcript")) == whole["audio"]["transcript"]
    assert all(
        event["choices"][0]["delta"].get("content") is None for event in events if event["choices"]
    )


@pytest.mark.parametrize("initial", [1, 2, 3])
def test_pieces_of_pcm_can_be_joined_as_text(server: LocalServer, initial: int) -> None:
    response = server.chat(stream=True, audio=OPENAI_AUDIO, initial_codec_chunk_frames=initial)
    data = audio_parts(sse_events(response), "data")
    assert all(len(decoded(piece)) % 6 == 0 for piece in data[:-1])
    assert decoded("".join(data)) == b"".join(map(decoded, data))


def test_usage_chunks_come_only_when_asked_for(server: LocalServer) -> None:
    events = sse_events(server.chat(stream=True, audio=OPENAI_AUDIO))
    assert all(event["choices"] for event in events)
    events = sse_events(server.chat(stream=True, audio=OPENAI_AUDIO, stream_options=USAGE))
    (usage,) = [event["usage"] for event in events if not event["choices"]]
    assert_adds_up(usage)
    assert usage == server.chat().json()["usage"]


def assert_adds_up(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    prompt, made = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    assert prompt["text_tokens"] == usage["prompt_tokens"] > 0
    assert made["text_tokens"] + made["audio_tokens"] == usage["completion_tokens"]
    assert (made["text_tokens"], made["audio_tokens"]) == (NUM_TOKENS, NUM_FRAMES)


# ---- whole answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("audio_format", ["wav", "pcm16", "pcm", "flac", "mp3", "opus"])
def test_whole_sound_comes_in_the_format_asked_for(
    server: LocalServer, audio_format: str, default_sound: np.ndarray
) -> None:
    body = server.chat(audio={"voice": "alloy", "format": audio_format}).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["content"] is None
    assert set(message["audio"]) == {"id", "data", "expires_at", "transcript"}
    assert 3500 < message["audio"]["expires_at"] - body["created"] < 3700
    data = decoded(message["audio"]["data"])
    if audio_format in ("pcm", "pcm16"):
        assert data == default_sound.tobytes()
        return
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    if audio_format in ("wav", "flac"):
        assert np.array_equal(samples, default_sound)
    else:
        assert abs(len(samples) - len(default_sound)) < 0.1 * RATE


def test_a_whole_answer_of_vllm_omni_has_words_and_sound(server: LocalServer) -> None:
    body = server.chat().json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["content"] == message["audio"]["transcript"] != ""
    assert (
        len(wav_samples(decoded(message["audio"]["data"])))
        == choice["audio_metadata"]["frame_count"]
    )
    assert choice["finish_reason"] == "length"
    assert_adds_up(body["usage"])


@pytest.mark.parametrize("modalities", [["text"], ["audio"], ["text", "audio"]])
def test_a_whole_answer_has_exactly_the_modalities_asked_for(
    server: LocalServer, modalities: list[str]
) -> None:
    message = server.chat(modalities=modalities).json()["choices"][0]["message"]
    assert (message["content"] is not None) == ("text" in modalities)
    assert ("audio" in message) == ("audio" in modalities)


def test_text_alone_lets_the_speech_stages_rest(server: LocalServer) -> None:
    before = server.get("/metrics").text
    server.chat(modalities=["text"], sampling_params_list=...)
    after = server.get("/metrics").text
    assert series(after, "vllm:generation_tokens_total", "talker") == series(
        before, "vllm:generation_tokens_total", "talker"
    )


def test_streamed_sound_is_the_whole_sound_bit_for_bit(
    server: LocalServer, default_sound: np.ndarray
) -> None:
    events = sse_events(server.chat(stream=True))
    pieces = [wav_samples(decoded(data)) for data in content_of(events, "audio")]
    assert np.array_equal(np.concatenate(pieces), default_sound)
    events = sse_events(server.chat(stream=True, audio=OPENAI_AUDIO))
    assert decoded("".join(audio_parts(events, "data"))) == default_sound.tobytes()
    offline = server.runner.run(
        server.omni.generate(
            [{"role": "user", "content": "Hello there"}],
            sampling={"max_tokens": NUM_TOKENS, "seed": 7},
            talker_sampling=SHORT[1],
        )
    )
    assert pcm16(offline.audio) == default_sound.tobytes()


# ---- what is heard depends on what was said ------------------------------------------------------


def sound_of(response: Any) -> np.ndarray:
    """The samples of a whole answer in WAV or PCM."""
    assert response.status_code == 200, response.text
    data = decoded(response.json()["choices"][0]["message"]["audio"]["data"])
    return wav_samples(data) if data.startswith(b"RIFF") else pcm_samples(data)


@pytest.fixture(scope="module")
def default_sound(server: LocalServer) -> np.ndarray:
    """What the request of `chat_body` sounds like."""
    return sound_of(server.chat())


@pytest.fixture(scope="module")
def chelsie(server: LocalServer) -> np.ndarray:
    return sound_of(server.chat(speaker="chelsie"))


def test_the_same_seed_gives_the_same_sound_wherever_it_stands(server: LocalServer) -> None:
    expected = sound_of(server.chat(seed=3))
    own = [{}, {**SHORT[1], "seed": 3}]
    for same in ({"seed": 3}, {"seed": ..., "extra_body": {"seed": 3}},
                 {"seed": 9, "sampling_params_list": own}):  # fmt: skip
        assert np.array_equal(sound_of(server.chat(**same)), expected)
    assert not np.array_equal(sound_of(server.chat(seed=4)), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"voice": "chelsie"},
        {"voice": "Chelsie"},
        {"voice": {"id": "CHELSIE"}},
        {"speaker": "chelsie"},
        {"audio": {"voice": "chelsie", "format": "wav"}},
        {"audio": {"voice": {"id": "chelsie"}}},
        {"extra_body": {"voice": "chelsie"}},
        {"voice": "chelsie", "speaker": "CHELSIE"},
    ],
)
def test_a_voice_is_the_same_however_it_is_named(
    server: LocalServer, fields: Any, chelsie: np.ndarray, default_sound: np.ndarray
) -> None:
    sound = sound_of(server.chat(**fields))
    assert np.array_equal(sound, chelsie) and not np.array_equal(sound, default_sound)


@pytest.mark.parametrize("voice", ["alloy", "Marin", "default", "ethan"])
def test_openai_voices_are_the_default_speaker(
    server: LocalServer, voice: str, default_sound: np.ndarray
) -> None:
    assert np.array_equal(sound_of(server.chat(voice=voice)), default_sound)


def test_max_tokens_cuts_the_text_and_a_stage_limit_the_sound(server: LocalServer) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        fields = {"max_tokens": ..., name: 3}
        usage = server.chat(**fields).json()["usage"]["completion_tokens_details"]
        assert (usage["text_tokens"], usage["audio_tokens"]) == (3, NUM_FRAMES)
    limits = [{"max_tokens": 2}, {"max_tokens": 4, "ignore_eos": True}, {"max_tokens": 65536}]
    usage = server.chat(sampling_params_list=limits).json()["usage"]["completion_tokens_details"]
    assert (usage["text_tokens"], usage["audio_tokens"]) == (2, 4)


def test_a_stop_string_ends_the_text(server: LocalServer) -> None:
    text = server.chat(modalities=["text"], sampling_params_list=...).json()["choices"][0][
        "message"
    ]["content"]
    stop = text[len(text) // 2 :][:3]
    for given in (stop, [stop, "never said"]):
        response = server.chat(modalities=["text"], sampling_params_list=..., stop=given)
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"


def test_vllm_sampling_fields_are_taken(server: LocalServer) -> None:
    response = server.chat(
        temperature=0.8, top_p=0.9, top_k=-1, min_p=0.01, repetition_penalty=1.1, min_tokens=2,
        presence_penalty=0.1, frequency_penalty=0.1, ignore_eos=True, stop_token_ids=[1],
        user="somebody", metadata={"a": "b"}, n=1, logprobs=False, tools=[],
        response_format={"type": "text"},
    )  # fmt: skip
    assert response.status_code == 200, response.text


def test_token_ids_and_stage_metrics_come_on_request(server: LocalServer) -> None:
    events = sse_events(
        server.chat(stream=True, return_token_ids=True, return_stage_metrics=True,
                    stream_options=USAGE)
    )  # fmt: skip
    ids = [i for e in events if shape(e) == "text" for i in e["choices"][0]["token_ids"]]
    whole = server.chat(return_token_ids=True, return_stage_metrics=True).json()
    assert ids == whole["choices"][0]["token_ids"]
    for stages in (events[-1]["metrics"]["stage_metrics"], whole["metrics"]["stage_metrics"]):
        assert [stages[str(i)]["final_output_type"] for i in range(3)] == ["text", None, "audio"]
        assert stages["0"]["num_tokens_out"] == NUM_TOKENS
        assert stages["2"]["output_unit_count"] == NUM_FRAMES


# ---- which modalities, when none are named -------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "speaks"),
    [
        ({}, False),
        ({"audio": OPENAI_AUDIO}, True),
        ({"voice": "ethan"}, True),
        ({"speaker": "ethan"}, True),
        ({"initial_codec_chunk_frames": 2}, True),
        ({"sampling_params_list": [{}, {"max_tokens": 4}]}, True),
        ({"sampling_params_list": [{"max_tokens": 4}]}, False),
        ({"audio": OPENAI_AUDIO, "modalities": ["text"]}, False),
    ],
)
def test_without_modalities_sound_comes_if_the_request_speaks_of_it(
    server: LocalServer, fields: dict[str, Any], speaks: bool
) -> None:
    body = {"modalities": ..., "sampling_params_list": ..., "max_tokens": 3, **fields}
    limited = body.get("sampling_params_list") is ... and speaks
    if limited:
        body["sampling_params_list"] = [{}, {"max_tokens": 4}]
    message = server.chat(**body).json()["choices"][0]["message"]
    assert ("audio" in message) == speaks


def test_an_operator_may_let_absent_modalities_mean_all(server: LocalServer) -> None:
    other = LocalServer(server.runner, server.omni, default_modalities=("text", "audio"))
    body = ChatRequest.model_validate(chat_body(modalities=..., sampling_params_list=...))
    for own, speaks in ((server, False), (other, True)):
        wishes, _, options = read_chat(body, own.service)
        assert wishes.audio == options["speak"] == speaks


# ---- conversations -------------------------------------------------------------------------------


def prompt_tokens(response: Any) -> int:
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens"]
    return count


def test_content_may_be_a_list_of_text_parts(
    server: LocalServer, default_sound: np.ndarray
) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    response = server.chat(messages=[{"role": "user", "content": parts}])
    assert np.array_equal(sound_of(response), default_sound)


def test_all_turns_and_the_system_prompt_are_read(server: LocalServer) -> None:
    text_only = {"modalities": ["text"], "sampling_params_list": ..., "max_tokens": 1}
    user = {"role": "user", "content": "Hello there"}
    alone = prompt_tokens(server.chat(messages=[user], **text_only))
    system = {"role": "system", "content": "Be brief."}
    guided = prompt_tokens(server.chat(messages=[system, user], **text_only))
    developer = {"role": "developer", "content": "Be brief."}
    assert prompt_tokens(server.chat(messages=[developer, user], **text_only)) == guided > alone
    turns = [system, user, {"role": "assistant", "content": "Good morning."}, user]
    assert prompt_tokens(server.chat(messages=turns, **text_only)) > guided


def test_a_spoken_turn_can_be_named_by_its_id(server: LocalServer) -> None:
    user = {"role": "user", "content": "Hello there"}
    follow_up = {"role": "user", "content": "And then?"}
    first = server.chat(audio={"voice": "alloy", "format": "wav"}).json()["choices"][0]["message"]
    written = {"role": "assistant", "content": first["audio"]["transcript"]}
    expected = sound_of(server.chat(messages=[user, written, follow_up]))
    named = {"role": "assistant", "audio": {"id": first["audio"]["id"]}}
    events = sse_events(server.chat(stream=True, audio=OPENAI_AUDIO))
    streamed = {"role": "assistant", "audio": {"id": audio_parts(events, "id")[0]}}
    assert np.array_equal(
        sound_of(server.chat(messages=[user, {**named, "content": ""}, follow_up])), expected
    )
    # `first` is what a client sends that sends back all that it got.
    for turn in (named, first, streamed):
        assert np.array_equal(sound_of(server.chat(messages=[user, turn, follow_up])), expected)
    unknown = {"role": "assistant", "audio": {"id": "audio_unknown"}}
    response = server.chat(messages=[user, unknown, follow_up])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].audio.id"


# ---- figures -------------------------------------------------------------------------------------


def series(text: str, name: str, label: str = "") -> float:
    """The value of a series, summed over what is not named; 0 if there is none."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


def test_one_request_counts_once_everywhere(server: LocalServer) -> None:
    own = LocalServer(server.runner, server.omni)
    own.chat(stream=True)
    text = own.get("/metrics").text
    for name in (
        "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_time_per_output_token_seconds", "vllm_omni:e2e_request_latency_s",
        "vllm_omni:audio_ttfp_s", "vllm_omni:audio_rtf", "vllm_omni:audio_duration_s",
        "vllm_omni:audio_underrun_s", "vllm:request_prompt_tokens",
    ):  # fmt: skip
        assert series(text, f"{name}_count") == 1, name
    for stage, units in [("thinker", NUM_TOKENS), ("talker", NUM_FRAMES), ("code2wav", NUM_FRAMES)]:
        assert series(text, "vllm:generation_tokens_total", stage) == units
        assert series(text, "vllm_omni:stage_gen_time_s_count", stage) == 1
        assert series(text, "vllm_omni:request_queue_wait_s_count", stage) == 1
    assert series(text, "vllm:inter_token_latency_seconds_count") == NUM_TOKENS - 1
    assert series(text, "vllm_omni:generation_tokens_total") == NUM_TOKENS + NUM_FRAMES
    assert series(text, "vllm:request_success_total", 'finished_reason="length"') == 1
    assert series(text, "vllm_omni:requests_success_total") == 1
    assert series(text, "vllm_omni:requests_failed_total") == 0
    assert series(text, "vllm_omni:audio_frames_total") == NUM_SAMPLES
    assert series(text, "http_requests_total", "/v1/chat/completions") == 1
    assert series(text, "http_requests_total") == 1, "scraping is no traffic"
