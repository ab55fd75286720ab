"""What is wrong is refused with the right status and a message that helps; nothing is a 500."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conftest import LocalServer, chat_body, sse_events
from tests.server.test_chat import OPENAI_AUDIO, series

USER = {"role": "user", "content": "Hi"}
BIG = 2**70


def assert_refused(response: Any, status: int, param: str | None, said: str = "") -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert said.lower() in error["message"].lower()


BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    # What is missing or of the wrong type.
    ({"messages": ...}, "messages", "missing"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "empty"),
    ({"messages": [USER, {"role": "user", "content": " \n"}]}, "messages[1].content", "empty"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "missing"),
    ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
     "messages[0].content[0].type", "missing"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "tools"),
    ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "messages[0].content", "unicode"),
    # Media.
    *(
        ({"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]},
         "messages[0].content[0].type", "'text'")
        for kind in ("image_url", "input_audio", "audio_url", "video_url", "file")
    ),
    # Modalities and sound.
    ({"modalities": ["text", "video"]}, "modalities[1]", "'text' or 'audio'"),
    ({"modalities": []}, "modalities", "at least 1"),
    ({"modalities": "audio"}, "modalities", "list"),
    ({"audio": {"voice": "nobody"}}, "audio.voice", "chelsie"),
    ({"voice": ""}, "voice", "chelsie"),
    ({"voice": "nobody"}, "voice", "chelsie"),
    ({"voice": 5}, "voice", ""),
    ({"voice": {"name": "ethan"}}, "voice.id", "missing"),
    ({"speaker": "nobody"}, "speaker", "chelsie"),
    ({"voice": "ethan", "speaker": "chelsie"}, "speaker", "different"),
    ({"audio": {"format": "mpeg"}}, "audio.format", "'wav'"),
    ({"audio": {"format": "aac"}}, "audio.format", "'wav'"),
    ({"audio": {"fromat": "wav"}}, "audio.fromat", "not a field"),
    ({"audio": {"format": "wav"}, "stream": True}, "audio.format", "pcm16"),
    ({"audio": "alloy"}, "audio", ""),
    ({"initial_codec_chunk_frames": 0}, "initial_codec_chunk_frames", "1 to 25"),
    ({"initial_codec_chunk_frames": 26}, "initial_codec_chunk_frames", "1 to 25"),
    ({"initial_codec_chunk_frames": BIG}, "initial_codec_chunk_frames", "1 to 25"),
    # Sampling.
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"max_tokens": -5}, "max_tokens", "1 or more"),
    ({"max_tokens": 10**9}, "max_tokens", "context"),
    ({"max_tokens": "8"}, "max_tokens", "integer"),
    ({"max_tokens": 8.0}, "max_tokens", "integer"),
    ({"max_completion_tokens": 9}, "max_completion_tokens", "max_tokens"),
    ({"min_tokens": 99}, "min_tokens", "max_tokens"),
    ({"temperature": -0.1}, "temperature", "0"),
    ({"temperature": True}, "temperature", ""),
    ({"temperature": math.nan}, "temperature", ""),
    ({"temperature": math.inf}, "temperature", ""),
    ({"top_p": 0}, "top_p", ""),
    ({"top_p": 1.5}, "top_p", ""),
    ({"top_k": -2}, "top_k", ""),
    ({"top_k": BIG}, "top_k", ""),
    ({"min_p": 2}, "min_p", ""),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"repetition_penalty": 0}, "repetition_penalty", ""),
    ({"seed": 1.5}, "seed", ""),
    ({"seed": BIG}, "seed", "64"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["a"] * 17}, "stop", "16"),
    ({"stop": [1]}, "stop[0]", ""),
    ({"stop": "\ud800"}, "stop", "unicode"),
    ({"\ud800": 1}, None, "unicode"),
    ({"voice": "\ud800"}, "voice", "chelsie"),
    ({"model": "\ud800"}, "model", "served here"),
    ({"stop_token_ids": [BIG]}, "stop_token_ids", ""),
    ({"sampling_params_list": [{}] * 4}, "sampling_params_list", "thinker, talker, code2wav"),
    ({"sampling_params_list": [{}, {"temprature": 1}]},
     "sampling_params_list[1].temprature", "temperature"),
    ({"sampling_params_list": [{}, {"max_tokens": 0}]}, "sampling_params_list[1].max_tokens", ""),
    ({"sampling_params_list": [{}, {"top_k": BIG}]}, "sampling_params_list[1].top_k", ""),
    ({"sampling_params_list": [{}, {"stop_token_ids": [5]}]},
     "sampling_params_list[1].stop_token_ids", "end code"),
    ({"sampling_params_list": [{}, {"stop": "a"}]}, "stop", "Talker"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ""),
    ({"max_tokens": BIG}, "max_tokens", ""),
    ({"sampling_params_list": [{"stop": 5}]}, "sampling_params_list[0].stop", ""),
    ({"sampling_params_list": [{}, {}, {"max_tokens": "x"}]},
     "sampling_params_list[2].max_tokens", ""),
    # What is not done here.
    ({"n": 2}, "n", "1"),
    ({"tools": [{"type": "function"}]}, "tools", ""),
    ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    ({"logprobs": True}, "logprobs", ""),
    ({"language": "Klingon"}, "language", "Auto"),
    ({"ref_audio": "data:"}, "ref_audio", ""),
    ({"temperatur": 1}, "temperatur", "did you mean 'temperature'"),
    ({"extra_body": 5}, "extra_body", ""),
    ({"extra_body": {"seeed": 5}}, "seeed", "did you mean 'seed'"),
    ({"extra_body": {"seed": 8}}, None, "contradicts"),
    # The stream.
    ({"stream": "yes please"}, "stream", ""),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "said"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_a_bad_chat_is_refused_with_the_field_at_fault(
    server: LocalServer, fields: dict[str, Any], param: str | None, said: str
) -> None:
    body = json.dumps(chat_body(**fields))
    response = server.request(
        "POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert_refused(response, 404 if param == "model" else 400, param, said)
    assert server.omni.pipeline.is_empty


@pytest.mark.parametrize("body", ["", "{", "[]", "5", "null", '"Hi"', "[" * 100_000, "\xff"])
def test_a_body_that_is_no_object_is_refused(server: LocalServer, body: str) -> None:
    response = server.request(
        "POST",
        "/v1/chat/completions",
        content=body.encode("latin-1"),
        headers={"content-type": "application/json"},
    )
    assert_refused(response, 400, None)


def test_a_body_that_is_not_sent_as_json_is_told_so(server: LocalServer) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = server.request(
        "POST", "/v1/chat/completions", content=json.dumps(chat_body()), headers=form
    )
    assert_refused(response, 400, None, "application/json")


def test_an_unknown_model_is_not_found(server: LocalServer) -> None:
    for response in (
        server.chat(model="gpt-4o-audio-preview"),
        server.get("/v1/models/gpt-4o-audio-preview"),
        server.post("/v1/audio/speech", {"model": "other", "input": "Hi"}),
    ):
        assert_refused(response, 404, "model", "served here: m")
        assert response.json()["error"]["code"] == "model_not_found"
    assert server.chat(model=..., modalities=["text"], sampling_params_list=...).status_code == 200


def test_a_prompt_that_fills_the_context_has_its_own_code(server: LocalServer) -> None:
    response = server.chat(messages=[{"role": "user", "content": "word " * 20_000}])
    assert_refused(response, 400, "messages", "context")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_what_is_echoed_is_cut_short(server: LocalServer) -> None:
    for fields in ({"voice": "x" * 100_000}, {"x" * 100_000: 1}, {"max_tokens": "9" * 100_000},
                   {"sampling_params_list": [{"x" * 100_000: 1}]}):  # fmt: skip
        response = server.chat(**fields)
        assert response.status_code == 400
        assert len(response.text) < 3000
    many = server.chat(messages=[{"role": 5}] * 50).json()["error"]["message"]
    assert "and 40 more" in many


def test_unknown_paths_and_methods_answer_in_json(server: LocalServer) -> None:
    assert_refused(server.get("/v1/nothing"), 404, None, "/v1/nothing")
    assert_refused(server.get("/v1/chat/completions"), 405, None, "GET")


def test_only_those_with_a_key_come_in_and_only_v1_is_guarded(server: LocalServer) -> None:
    guarded = LocalServer(server.runner, server.omni, api_keys=("one", "two"))
    for path in ("/health", "/metrics", "/version", "/ping", "/load", "/"):
        assert guarded.get(path).status_code == 200
    routes = (
        ("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/audio/speech"),
        ("GET", "/v1/audio/voices"),
    )  # fmt: skip
    for sent in (None, "Bearer None", "one", "Basic one", "Bearer on\u00e9"):
        headers = {} if sent is None else {"authorization": sent.encode("latin-1")}
        for method, path in routes:
            response = guarded.request(method, path, headers=headers)
            assert_refused(response, 401, None, "Bearer")
            assert response.json()["error"]["code"] == "invalid_api_key"
    for key in ("one", "two"):
        response = guarded.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
    preflight = {"origin": "http://page", "access-control-request-method": "POST"}
    response = guarded.request("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert server.get("/v1/models", headers={"authorization": "Bearer None"}).status_code == 200


def test_a_body_over_the_limit_is_refused_whether_announced_or_not(server: LocalServer) -> None:
    small = LocalServer(server.runner, server.omni, max_body_bytes=1000)
    response = small.chat(messages=[{"role": "user", "content": "x" * 2000}])
    assert_refused(response, 413, None, "1000 bytes")

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    response = small.request("POST", "/v1/chat/completions", content=pieces())
    assert_refused(response, 413, None, "1000 bytes")
    assert small.chat(modalities=["text"], sampling_params_list=...).status_code == 200


def test_request_ids_go_in_and_out_and_need_not_be_unique(server: LocalServer) -> None:
    response = server.post("/v1/chat/completions", chat_body(modalities=["text"],
                           sampling_params_list=...), headers={"x-request-id": "mine"})  # fmt: skip
    assert response.headers["x-request-id"] == "mine"
    made = server.get("/version").headers["x-request-id"]
    assert made != server.get("/version").headers["x-request-id"]
    for odd in ("", "a b", "x" * 500, "\u00e9"):
        headers = {"x-request-id": odd.encode("latin-1")}
        assert server.get("/version", headers=headers).headers["x-request-id"].startswith("req-")

    async def twice() -> list[int]:
        async with server.client() as client:
            send = [
                client.post("/v1/chat/completions", json=chat_body(), headers={"x-request-id": "s"})
                for _ in range(2)
            ]
            return [response.status_code for response in await asyncio.gather(*send)]

    assert server.runner.run(twice()) == [200, 200]


def test_one_more_than_fit_is_told_to_come_back(server: LocalServer) -> None:
    limit = server.omni.pipeline.config.max_requests

    async def fill() -> None:
        handles = [
            server.omni.submit("Hi", speak=False, sampling={"max_tokens": 500})
            for _ in range(limit)
        ]
        async with server.client() as client:
            for stream in (False, True):
                body = chat_body(stream=stream)
                response = await client.post("/v1/chat/completions", json=body)
                assert_refused(response, 429, None, "max_requests")
                assert response.headers["retry-after"] == "1"
                assert response.json()["error"]["code"] == "rate_limit_exceeded"
        await asyncio.gather(*(handle.abort() for handle in handles))

    server.runner.run(fill())
    server.settle()


# ---- failures while a request runs ---------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"stream": True, "modalities": ["audio"]}])
def test_a_failure_before_the_first_event_has_a_status(
    breaking_server: LocalServer, fields: dict[str, Any]
) -> None:
    before = series(breaking_server.get("/metrics").text, "vllm_omni:requests_failed_total")
    slow = [{}, {"max_tokens": 8, "ignore_eos": True}]
    response = breaking_server.chat(
        initial_codec_chunk_frames=25, sampling_params_list=slow, **fields
    )
    assert_refused(response, 500, None, "this bridge breaks")
    assert response.json()["error"]["type"] == "server_error"
    breaking_server.settle()
    after = breaking_server.get("/metrics").text
    assert series(after, "vllm_omni:requests_failed_total", 'reason="stage_error"') == before + 1
    assert series(after, "vllm_omni:requests_success_total") == 0


@pytest.mark.parametrize("audio", [..., OPENAI_AUDIO])
def test_a_failure_after_it_is_an_error_event_and_a_proper_end(
    breaking_server: LocalServer, audio: Any
) -> None:
    slow = [{}, {"max_tokens": 8, "ignore_eos": True}]
    response = breaking_server.chat(
        stream=True, audio=audio, initial_codec_chunk_frames=2, sampling_params_list=slow
    )
    events = sse_events(response)
    assert any(event.get("modality") == "audio" for event in events)
    error = events[-1]["error"]
    assert error["code"] == 500 and "talker" in error["message"]
    assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])
    breaking_server.settle()


# ---- whatever comes ------------------------------------------------------------------------------

FIELDS = sorted(
    {*chat_body(), "audio", "stream", "stop", "voice", "speaker", "temperature", "top_k", "top_p",
     "min_p", "min_tokens", "stop_token_ids", "stream_options", "extra_body", "ignore_eos",
     "initial_codec_chunk_frames", "max_completion_tokens", "tools", "n", "logit_bias"}
    - {"max_tokens", "sampling_params_list"}
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["text", "audio", "ethan", "user", "pcm16", BIG, -BIG]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "id", "voice", "format", "max_tokens"])
        | st.text(max_size=5),
        inner,
        max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=80)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_no_body_makes_the_server_fail_or_hang(server: LocalServer, fields: dict[str, Any]) -> None:
    limits = {"max_tokens": 2, "sampling_params_list": [{"max_tokens": 2}, {"max_tokens": 2}]}
    body = json.dumps({**chat_body(), **fields, **limits})
    response = server.request(
        "POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
