"""Qwen3-TTS from text to sound: the reference's codes, whatever the mode and however text comes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.api import Answer, AsyncOmni, Omni, collect
from stretto.errors import InvalidRequest, StageFailed
from stretto.events import AudioDelta, Failed, Finished
from stretto.pipeline.tts_frontend import TtsFrontend, Voice
from stretto.verify.tts import sample_sound
from tests.reference_tts import load_reference, reference_codes

TEXT = "Computers can learn to speak with very small models."
NUM_FRAMES = 24
TOLERANCE = 1e-4
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": NUM_FRAMES}


class Take(msgspec.Struct, frozen=True):
    """One way to have a text read out, as we and as the reference call it."""

    model: str
    kind: str
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    cloned: bool = False
    ref_text: str | None = None


REFERENCE_TEXT = "It is what was said before."
TAKES = {
    "a speaker": Take("tiny-tts", "custom_voice"),
    "a language and instructions": Take(
        "tiny-tts",
        "custom_voice",
        {"language": "English", "instructions": "Very happy."},
        {"language": "English", "instruct": "Very happy."},
    ),
    "text beside the frames": Take(
        "tiny-tts", "custom_voice", {"text_first": False}, {"non_streaming_mode": False}
    ),
    "a designed voice": Take(
        "tiny-tts-design",
        "voice_design",
        {"instructions": "An old man, out of breath."},
        {"instruct": "An old man, out of breath."},
    ),
    "a cloned speaker": Take("tiny-tts-base", "base", cloned=True),
    "a continued voice": Take("tiny-tts-base", "base", cloned=True, ref_text=REFERENCE_TEXT),
    "a continued voice, text first": Take(
        "tiny-tts-base",
        "base",
        {"text_first": True},
        {"non_streaming_mode": True},
        cloned=True,
        ref_text=REFERENCE_TEXT,
    ),
}


@cache
def expected(name: str, cache_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """What the reference says: codes int16 [n, codebooks], samples float32."""
    from stretto.models.tiny import cached_checkpoint

    take = TAKES[name]
    model = load_reference(cached_checkpoint(take.model, cache_dir=cache_dir))
    theirs = dict(take.theirs)
    if take.kind == "custom_voice":
        theirs["speaker"] = next(iter(model.get_supported_speakers()))
    if take.cloned:
        theirs |= {"ref_audio": (sample_sound(), 24000), "ref_text": take.ref_text}
    # The last token gives no frame.
    return reference_codes(
        model,
        TEXT,
        kind=take.kind,
        max_new_tokens=NUM_FRAMES + 1,
        repetition_penalty=1.05,
        **theirs,
    )


def options(omni: Omni | AsyncOmni, take: Take) -> dict[str, Any]:
    given: dict[str, Any] = {"sampling": GREEDY, "return_codes": True, **take.ours}
    if take.kind == "custom_voice":
        given["speaker"] = omni.frontend.speakers[0]
    if take.cloned:
        given["voice"] = Voice(samples=sample_sound(), sample_rate=24000, text=take.ref_text)
    return given


def an_omni(cache_dir: Path, model: str = "tiny-tts", **more: Any) -> Omni:
    more.setdefault("inline", True)
    flags = more.pop("flags", {"stages": {"talker": {"prefill_chunk_tokens": 16}}})
    return Omni(model, cache_dir=cache_dir, flags=flags, **more)


@pytest.fixture(scope="module")
def omni(cache_dir: Path) -> Iterator[Omni]:
    with an_omni(cache_dir) as omni:
        yield omni


def assert_same(answer: Answer, codes: np.ndarray, audio: np.ndarray) -> None:
    assert answer.codes is not None
    np.testing.assert_array_equal(answer.codes, codes)
    assert answer.audio.shape == audio.shape
    np.testing.assert_allclose(answer.audio, audio, atol=TOLERANCE)


@pytest.mark.parametrize("async_chunk", [True, False])
@pytest.mark.parametrize("name", TAKES)
def test_codes_and_sound_are_the_references(name: str, async_chunk: bool, cache_dir: Path) -> None:
    take = TAKES[name]
    codes, audio = expected(name, cache_dir)
    assert len(codes) == NUM_FRAMES
    with an_omni(cache_dir, take.model, async_chunk=async_chunk) as omni:
        assert_same(omni.generate(TEXT, **options(omni, take)), codes, audio)
        assert omni.pipeline.is_empty


@pytest.mark.process
def test_stages_in_processes_say_the_same_side_by_side_and_as_text_comes(cache_dir: Path) -> None:
    codes, audio = expected("text beside the frames", cache_dir)
    take = TAKES["text beside the frames"]
    with an_omni(cache_dir, inline=False) as omni:
        how = options(omni, take)
        for answer in omni.generate_all([TEXT] * 3, **how):
            assert_same(answer, codes, audio)
        del how["text_first"]
        for size in (1, 7, len(TEXT)):
            pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
            assert_same(collect(list(omni.speak(pieces, **how))), codes, audio)


# ---- text in pieces ------------------------------------------------------------------------------

WORDS = st.lists(
    st.sampled_from(
        ["Dr. Smith's", " ", "  ", "\n\n", "na", "ïve", "café", "\u0301", "—", "1234", "it", "'s",
         "don't", "!", "?!", "...", "。", "你好", "한", "🙂", "\u200d", "<|im_end|>", ",", "b "]
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@settings(max_examples=300)
@given(WORDS, st.data())
def test_ids_of_a_text_do_not_depend_on_how_it_was_cut(
    omni: Omni, words: list[str], data: st.DataObject
) -> None:
    frontend = omni.frontend
    assert isinstance(frontend, TtsFrontend)
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    tokenizer = frontend.prepare_pieces(frontend.options()).open_text
    assert tokenizer is not None
    pieces = tokenizer()
    ids: list[int] = []
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        ids += pieces.push(text[begin:end])
    ids += pieces.finish()
    assert ids == frontend.plain_ids(text.strip())


def test_speech_begins_before_the_text_has_ended_and_waits_where_it_runs_ahead(
    cache_dir: Path,
) -> None:
    async def run() -> None:
        async with AsyncOmni("tiny-tts", inline=True, cache_dir=cache_dir) as omni:
            whole = await omni.generate(
                TEXT, text_first=False, return_codes=True, sampling=GREEDY,
            )  # fmt: skip
            handle = omni.submit_pieces(return_codes=True, sampling=GREEDY)
            words = iter(TEXT.split(" "))
            handle.feed(f"{next(words)} {next(words)} ")
            coming = handle.__aiter__()
            events = [await anext(coming)]
            assert isinstance(events[0], AudioDelta)
            # All that the text so far allows was said, and no more is.
            await asyncio.sleep(0.3)
            waiting = omni.pipeline.num_in_flight
            for word in words:
                handle.feed(f"{word} ")
            handle.end_text()
            with pytest.raises(InvalidRequest, match="no more text"):
                handle.feed("late")
            events += [event async for event in coming]
            assert waiting == 1
            assert isinstance(events[-1], Finished)
            answer = collect([event for event in events if not isinstance(event, Failed)])
            assert whole.codes is not None
            assert_same(answer, whole.codes, whole.audio)
            assert answer.usage.prompt_tokens == whole.usage.prompt_tokens

    asyncio.run(run())


def test_a_text_of_nothing_is_said_without_a_frame(omni: Omni) -> None:
    answer = collect(list(omni.speak(["", " ", "\n"])))
    assert (len(answer.audio), answer.usage.audio_tokens, answer.finish_reason) == (0, 0, "stop")
    assert omni.pipeline.is_empty


def test_a_writer_that_fails_ends_its_request_and_is_heard_of(omni: Omni) -> None:
    def writer() -> Iterator[str]:
        yield "Hello there, "
        raise KeyError("the writer's own")

    with pytest.raises(KeyError, match="the writer's own"):
        list(omni.speak(writer()))
    assert omni.pipeline.is_empty


def test_a_writer_that_falls_silent_is_waited_for_and_then_named(cache_dir: Path) -> None:
    async def run() -> None:
        flags = {"chunk_timeout_s": 0.5}
        async with AsyncOmni("tiny-tts", inline=True, cache_dir=cache_dir, flags=flags) as omni:
            handle = omni.submit_pieces(sampling=GREEDY)
            handle.feed("Hello there, my ")
            events = [event async for event in handle]
            assert isinstance(events[-1], Failed)
            assert "client->talker" in str(events[-1].error)
            handle.feed("friend.")
            await handle.abort()
            assert omni.pipeline.is_empty

    asyncio.run(run())


def test_a_listener_who_leaves_ends_the_request_in_every_stage(cache_dir: Path) -> None:
    async def run() -> None:
        async with AsyncOmni("tiny-tts", inline=True, cache_dir=cache_dir) as omni:
            handle = omni.submit_pieces(sampling=GREEDY)
            handle.feed("Hello there, my ")
            async for event in handle:
                assert isinstance(event, AudioDelta)
                break
            await handle.abort()
            handle.feed("friend.")
            handle.end_text()
            assert omni.pipeline.is_empty

    asyncio.run(run())


@pytest.mark.process
def test_a_talker_that_dies_fails_its_texts_and_says_so(cache_dir: Path) -> None:
    async def run() -> None:
        async with AsyncOmni("tiny-tts", cache_dir=cache_dir) as omni:
            handle = omni.submit_pieces(sampling=GREEDY)
            handle.feed("Hello there, my ")
            os.kill(omni.pipeline.stage_pids["talker"], signal.SIGKILL)
            events = [event async for event in handle]
            assert isinstance(events[-1], Failed)
            assert "talker" in str(events[-1].error)
            handle.feed("friend.")
            with pytest.raises(StageFailed, match="talker"):
                omni.submit_pieces(sampling=GREEDY)

    asyncio.run(run())


# ---- limits and refusals -------------------------------------------------------------------------


def test_a_take_without_an_end_is_cut_in_proportion_to_its_text(omni: Omni) -> None:
    request = omni.frontend.prepare("Hi.", omni.frontend.options())
    limit = request.sampling.max_tokens
    assert limit is not None
    assert limit < 150
    asked = omni.frontend.prepare("Hi.", omni.frontend.options(sampling={"max_tokens": 1000}))
    assert asked.sampling.max_tokens == 1000


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"speaker": "nobody"}, "speaker"),
        ({"language": "Klingon"}, "language"),
        ({"voice": Voice(samples=np.zeros(24000, np.float32))}, "ref_audio"),
        ({"sampling": {"max_tokens": 10**6}}, "max_tokens"),
        ({"sampling": {"stop": "x"}}, "stop"),
        ({"initial_codec_chunk_frames": 26}, "initial_codec_chunk_frames"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_options_are_refused_by_name(omni: Omni, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        omni.generate(TEXT, **given)
    assert caught.value.param == param


@pytest.mark.parametrize("text", ["", "  \n "])
def test_an_empty_text_is_refused(omni: Omni, text: str) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        omni.generate(text)


def test_messages_are_refused_by_a_model_that_reads_texts_out(omni: Omni) -> None:
    with pytest.raises(InvalidRequest, match="no messages"):
        omni.generate([{"role": "user", "content": "Hi"}])


def test_the_other_kinds_say_what_they_need(cache_dir: Path) -> None:
    embedding = np.zeros(3, np.float32)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("tiny-tts-design", {}, "instructions"),
        ("tiny-tts-design", {"speaker": "x", "instructions": "Old."}, "speaker"),
        ("tiny-tts-base", {}, "ref_audio"),
        ("tiny-tts-base", {"voice": Voice()}, "ref_audio"),
        ("tiny-tts-base", {"voice": Voice(speaker_embedding=embedding)}, "speaker_embedding"),
        (
            "tiny-tts-base",
            {"voice": Voice(samples=np.zeros(240, np.float32))},
            "ref_audio",
        ),
    ]
    for model, group in itertools.groupby(cases, key=lambda case: case[0]):
        with an_omni(cache_dir, model) as omni:
            for _, given, param in group:
                with pytest.raises(InvalidRequest) as caught:
                    omni.generate(TEXT, **given)
                assert caught.value.param == param, given
