"""Where a text stands beside the frames, whole or in pieces, and what the Talker waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bridges.text_to_talker import TextInbox, prompt_positions
from stretto.models.qwen3_tts.spec import SPEECH_TOKENIZER, TtsSpec, read_spec
from stretto.payloads import CodecFrames, SpokenTokens
from stretto.pipeline.model import read_json
from stretto.request import NO_CODEC, SpeechPrompt

HEAD = (1, 2, 3, 90, 91)
CODEC = (NO_CODEC, NO_CODEC, NO_CODEC, 70, 71)
TEXT = (11, 12, 13)
REFERENCE_TEXT = (21, 22)


@pytest.fixture(scope="module")
def spec(cache_dir: Path) -> TtsSpec:
    from stretto.models.tiny import cached_checkpoint

    directory = cached_checkpoint("tiny-tts-base", cache_dir=cache_dir)
    codec = read_json(directory / SPEECH_TOKENIZER / "config.json")
    return read_spec(read_json(directory / "config.json"), codec, str(directory))


def a_prompt(**more: Any) -> SpeechPrompt:
    return SpeechPrompt(head_ids=HEAD, codec_ids=CODEC, **{"text_ids": TEXT, **more})


def an_inbox(spec: TtsSpec, prompt: SpeechPrompt, max_positions: int = 100) -> TextInbox:
    return TextInbox(spec, prompt, max_positions=max_positions)


def frames(count: int) -> np.ndarray:
    return np.arange(count * 16, dtype=np.int16).reshape(count, 16)


def spoken(*ids: int) -> SpokenTokens:
    return SpokenTokens(np.array(ids, np.int32))


def test_beside_the_frames_the_text_goes_on_then_its_end_then_pads(spec: TtsSpec) -> None:
    inbox = an_inbox(spec, a_prompt())
    eos, pad, codec = spec.prompt_ids.tts_eos, spec.prompt_ids.tts_pad, spec.talker.codec_ids
    assert inbox.prompt_length == prompt_positions(a_prompt()) == 6
    assert inbox.text_ids(0, 11) == [*HEAD, *TEXT, eos, pad, pad]
    assert inbox.codec_ids(0, 6) == [*CODEC, codec.bos]
    assert inbox.reference is None


def test_a_text_that_comes_first_is_all_there_before_the_first_frame(spec: TtsSpec) -> None:
    prompt = a_prompt(text_first=True)
    inbox = an_inbox(spec, prompt)
    eos, pad, codec = spec.prompt_ids.tts_eos, spec.prompt_ids.tts_pad, spec.talker.codec_ids
    assert inbox.prompt_length == prompt_positions(prompt) == 10
    assert inbox.text_ids(0, 12) == [*HEAD, *TEXT, eos, pad, pad, pad]
    assert inbox.codec_ids(0, 10) == [*CODEC, *[codec.pad] * 4, codec.bos]


@pytest.mark.parametrize("num_frames", [1, 3, 9])
def test_a_reference_is_heard_before_the_text(spec: TtsSpec, num_frames: int) -> None:
    codes = frames(num_frames)
    prompt = a_prompt(reference_text_ids=REFERENCE_TEXT, reference_codes=codes)
    inbox = an_inbox(spec, prompt)
    eos, pad, codec = spec.prompt_ids.tts_eos, spec.prompt_ids.tts_pad, spec.talker.codec_ids
    assert inbox.prompt_length == 6 + num_frames
    texts = [*REFERENCE_TEXT, *TEXT, eos, *[pad] * 20]
    assert inbox.text_ids(0, 20) == [*HEAD, *texts[:15]]
    assert inbox.codec_ids(0, 6 + num_frames) == [*CODEC, codec.bos, *[NO_CODEC] * num_frames]
    assert inbox.reference is not None
    first, given_codes = inbox.reference
    assert first == 6
    assert given_codes is codes


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.data())
def test_positions_are_covered_as_the_text_comes_and_never_by_pads_before_its_end(
    spec: TtsSpec, text: list[int], data: st.DataObject
) -> None:
    whole = an_inbox(spec, a_prompt(text_ids=tuple(text)))
    inbox = an_inbox(spec, a_prompt(text_ids=(), text_follows=True))
    given_so_far = 0
    while given_so_far < len(text):
        assert inbox.positions_ready == len(HEAD) + given_so_far
        assert not inbox.is_void
        size = data.draw(st.integers(1, len(text) - given_so_far))
        inbox.push(spoken(*text[given_so_far : given_so_far + size]))
        given_so_far += size
        ready = inbox.positions_ready
        assert inbox.text_ids(0, ready) == whole.text_ids(0, ready)
    inbox.end()
    assert inbox.positions_ready > 10**6
    assert inbox.text_ids(0, 40) == whole.text_ids(0, 40)
    assert inbox.prompt_length == whole.prompt_length


@pytest.mark.parametrize("reference", [(), REFERENCE_TEXT])
def test_a_text_that_ends_without_a_word_is_void(spec: TtsSpec, reference: tuple[int, ...]) -> None:
    prompt = a_prompt(text_ids=(), text_follows=True, reference_text_ids=reference)
    inbox = an_inbox(spec, prompt)
    assert not inbox.is_void
    inbox.end()
    assert inbox.is_void
    assert inbox.positions_ready == len(HEAD) + len(reference)


def test_text_that_can_never_be_reached_is_not_kept(spec: TtsSpec) -> None:
    inbox = an_inbox(spec, a_prompt(text_ids=(), text_follows=True), max_positions=50)
    for _ in range(1000):
        inbox.push(spoken(*range(10)))
    assert inbox.positions_ready <= len(HEAD) + 50


def test_frames_at_the_door_are_refused(spec: TtsSpec) -> None:
    with pytest.raises(TypeError, match="CodecFrames"):
        an_inbox(spec, a_prompt()).push(CodecFrames(frames(1)))
