"""What the Talker hears and speaks, and that it never runs ahead of what it was told."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.bridges.thinker_to_talker import (
    TalkerInbox,
    ThinkerToTalker,
    heard_prompt,
    talker_prompt_length,
)
from stretto.config.deployment import EdgeConfig
from stretto.errors import InvalidRequest
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.spec import PromptIds
from stretto.payloads import CodecFrames, Payload, SpokenTokens, TextStep, ThinkerPrompt
from stretto.request import FinishReason
from tests.fakes import ticket

# Far from every id that means something.
SYSTEM, NEWLINE = 900, 901
words = st.lists(st.integers(1, 800), max_size=30)


@dataclass(frozen=True)
class Talk:
    """A prompt by its turns, and what the Thinker then writes."""

    turns: tuple[tuple[str, tuple[int, ...]], ...]
    answer: tuple[int, ...]
    ends: FinishReason
    begun: tuple[int, ...] = ()

    def prompt(self, ids: PromptIds) -> tuple[int, ...]:
        return (*itertools.chain(*(self._turn(ids, *turn) for turn in self.turns)),
                *self.head(ids), *self.begun)  # fmt: skip

    def head(self, ids: PromptIds) -> tuple[int, ...]:
        return (ids.im_start, ids.assistant, NEWLINE)

    def heard(self, ids: PromptIds) -> list[int]:
        user = [self._turn(ids, role, said) for role, said in self.turns if role == "user"]
        return list(itertools.chain(*user))

    @property
    def spoken(self) -> list[int]:
        """All but the last token; a single one that a limit cut off is spoken all the same."""
        if not self.begun and len(self.answer) == 1 and self.ends == "length":
            return list(self.answer)
        return [*self.begun, *self.answer[:-1]]

    @staticmethod
    def _turn(ids: PromptIds, role: str, said: tuple[int, ...]) -> tuple[int, ...]:
        roles = {"system": SYSTEM, "user": ids.user, "assistant": ids.assistant}
        return (ids.im_start, roles[role], NEWLINE, *said, ids.im_end, NEWLINE)


talks = st.builds(
    Talk,
    turns=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), words.map(tuple)), max_size=5
    ).map(tuple),
    answer=st.lists(st.integers(1, 800), min_size=1, max_size=20).map(tuple),
    ends=st.sampled_from(["stop", "length"]),
    begun=st.just(()) | st.lists(st.integers(1, 800), max_size=3).map(tuple),
)


def bridge(spec: OmniSpec, *, streaming: bool) -> ThinkerToTalker:
    edge = EdgeConfig(from_stage="thinker", to_stage="talker")
    return ThinkerToTalker(spec, edge, async_chunk=streaming)


def steps_of(talk: Talk, prompt_length: int, cell: int) -> list[TextStep]:
    """The Thinker's steps: prompt cells, the last of which draws the first token, then decodes."""
    cells = [min(cell, prompt_length - at) for at in range(0, prompt_length, cell)]
    last = len(talk.answer) - 1
    ends = [talk.ends if at == last else None for at in range(len(talk.answer))]
    return [
        *(TextStep(count, None, None) for count in cells[:-1]),
        TextStep(cells[-1], talk.answer[0], ends[0]),
        *(TextStep(0, token, end) for token, end in list(zip(talk.answer, ends, strict=True))[1:]),
    ]


def bundles_of(spec: OmniSpec, talk: Talk, *, streaming: bool, cell: int) -> list[list[Payload]]:
    """What each step hands on; what is held back to the end comes with the last one."""
    prompt = talk.prompt(spec.prompt_ids)
    stream = bridge(spec, streaming=streaming).open(ticket("r", prompt=prompt))
    bundles = [list(stream.push(step)) for step in steps_of(talk, len(prompt), cell)]
    bundles[-1] += stream.finish()
    return bundles


def inbox_of(spec: OmniSpec) -> TalkerInbox:
    return bridge(spec, streaming=True).inbox(ticket("r"))


def rows_of(spec: OmniSpec, talk: Talk, count: int) -> list[int]:
    """The Talker's text ids by position, as transformers' generate lays them out."""
    ids = spec.prompt_ids
    rows = [*talk.heard(ids), *talk.head(ids), *[ids.tts_pad] * 4, ids.tts_bos, *talk.spoken]
    return [*rows, ids.tts_eos, *[ids.tts_pad] * count][:count]


@settings(max_examples=150)
@given(talks, st.sampled_from([1, 2, 3, 7, 16, 512]))
def test_streamed_or_whole_the_inbox_holds_the_same_whatever_the_cells(
    tiny_spec: OmniSpec, talk: Talk, cell: int
) -> None:
    expected = rows_of(tiny_spec, talk, 150)
    for streaming in (True, False):
        inbox = inbox_of(tiny_spec)
        bundles = bundles_of(tiny_spec, talk, streaming=streaming, cell=cell)
        if not streaming:
            assert not any(bundles[:-1])
        for payload in itertools.chain(*bundles):
            inbox.push(payload)
        inbox.end()
        assert inbox.is_void == (not talk.spoken)
        if not inbox.is_void:
            assert inbox.positions_ready > 150
            assert inbox.text_ids(0, 150) == expected
        heard = talk.heard(tiny_spec.prompt_ids)
        assert inbox.prompt_length == len(heard) + 9


@settings(max_examples=150)
@given(talks, st.sampled_from([1, 3, 16, 512]))
def test_the_inbox_never_covers_a_row_that_is_still_to_come(
    tiny_spec: OmniSpec, talk: Talk, cell: int
) -> None:
    inbox = inbox_of(tiny_spec)
    expected = rows_of(tiny_spec, talk, 200)
    covered = 0
    for payload in itertools.chain(*bundles_of(tiny_spec, talk, streaming=True, cell=cell)):
        inbox.push(payload)
        assert covered <= inbox.positions_ready <= 200
        covered = inbox.positions_ready
        assert inbox.text_ids(0, covered) == expected[:covered]
        # Before the end nothing but what was said is covered: no pad, no end of speech.
        num_prompt = len(talk.heard(tiny_spec.prompt_ids)) + 8
        assert covered <= num_prompt + len(talk.spoken)


@settings(max_examples=100)
@given(talks)
def test_a_decode_step_sends_one_id_and_never_the_history(tiny_spec: OmniSpec, talk: Talk) -> None:
    prompt = talk.prompt(tiny_spec.prompt_ids)
    bundles = bundles_of(tiny_spec, talk, streaming=True, cell=512)
    for bundle in bundles[-len(talk.answer) :][1:]:
        sizes = [len(p.token_ids) for p in bundle if isinstance(p, SpokenTokens)]
        assert len(bundle) == len(sizes)
        assert sum(sizes) <= 1
    pieces = [p for p in itertools.chain(*bundles) if isinstance(p, ThinkerPrompt)]
    assert sum(len(piece.user_ids) for piece in pieces) <= len(prompt)


@settings(max_examples=100)
@given(talks, st.sampled_from([1, 4, 512]))
def test_each_piece_of_the_prompt_is_handed_on_with_its_cell(
    tiny_spec: OmniSpec, talk: Talk, cell: int
) -> None:
    prompt = talk.prompt(tiny_spec.prompt_ids)
    bundles = bundles_of(tiny_spec, talk, streaming=True, cell=cell)
    heard, _ = heard_prompt(prompt, tiny_spec.prompt_ids)
    for number, at in enumerate(range(0, len(prompt), cell)):
        pieces = [p for p in bundles[number] if isinstance(p, ThinkerPrompt)]
        ids = [int(token) for piece in pieces for token in piece.user_ids]
        assert ids == [prompt[i] for i in range(at, min(at + cell, len(prompt))) if heard[i]]
        assert [p.head_ids is not None for p in pieces] == [at + cell >= len(prompt)]


@given(talks)
def test_the_front_knows_how_long_the_talkers_prompt_will_be(
    tiny_spec: OmniSpec, talk: Talk
) -> None:
    ids = tiny_spec.prompt_ids
    assert talker_prompt_length(talk.prompt(ids), ids) == len(talk.heard(ids)) + 9


@pytest.mark.parametrize(
    ("answer", "ends", "spoken"),
    [
        ((5,), "stop", []),
        ((5,), "length", [5]),
        ((5, 6), "stop", [5]),
        ((5, 6), "length", [5]),
        ((5, 6, 7), "stop", [5, 6]),
    ],
)
def test_the_last_token_is_not_spoken_but_an_only_one_that_a_limit_cut_off(
    tiny_spec: OmniSpec, answer: tuple[int, ...], ends: FinishReason, spoken: list[int]
) -> None:
    talk = Talk((("user", (1, 2)),), answer, ends)
    for streaming in (True, False):
        bundles = bundles_of(tiny_spec, talk, streaming=streaming, cell=512)
        payloads = [p for p in itertools.chain(*bundles) if isinstance(p, SpokenTokens)]
        assert [int(token) for p in payloads for token in p.token_ids] == spoken


def test_what_a_prompt_has_behind_its_head_is_the_beginning_of_the_answer(
    tiny_spec: OmniSpec,
) -> None:
    talk = Talk((("user", (1,)),), (5, 6), "stop", begun=(3, 4))
    inbox = inbox_of(tiny_spec)
    for payload in itertools.chain(*bundles_of(tiny_spec, talk, streaming=True, cell=2)):
        inbox.push(payload)
    assert inbox.prompt_length is not None
    assert inbox.text_ids(inbox.prompt_length - 1, inbox.positions_ready) == [3, 4, 5]


def test_a_prompt_that_opens_no_answer_is_refused(tiny_spec: OmniSpec) -> None:
    ids = tiny_spec.prompt_ids
    user = (ids.im_start, ids.user, NEWLINE, 5, ids.im_end, NEWLINE)
    for prompt in [(), (5, 6, 7), user, (*user, ids.im_start, ids.assistant)]:
        with pytest.raises(InvalidRequest, match="opened assistant turn") as refused:
            heard_prompt(prompt, ids)
        assert refused.value.param == "messages"


def test_an_answer_of_only_an_end_is_void_and_before_the_end_nothing_is(
    tiny_spec: OmniSpec,
) -> None:
    inbox = inbox_of(tiny_spec)
    talk = Talk((("user", (1,)),), (5,), "stop")
    for payload in itertools.chain(*bundles_of(tiny_spec, talk, streaming=True, cell=512)):
        inbox.push(payload)
    assert not inbox.is_void
    inbox.end()
    assert inbox.is_void


def test_frames_at_the_talkers_door_are_refused(tiny_spec: OmniSpec) -> None:
    with pytest.raises(TypeError):
        inbox_of(tiny_spec).push(CodecFrames(np.zeros((1, 16), np.int16)))
