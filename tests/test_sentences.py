"""A text is cut where its sentences end, loses nothing, and is cut alike however it arrives."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.sentences import Granularity, Splitter, segments, split

# Much of what decides about a cut, and little else.
TEXTS = st.lists(
    st.sampled_from(
        ["word", "Word", "a", "J", "Dr", "e.g", "3.14", "1", "U.S", ".", ".", "!", "?", "...", "…",
         ",", ";", " ", " ", " ", "\n", "\n\n", '"', "”", ")", "(", "。", "！？", "，", "好的",
         "」", "e\u0301", "\u200d", "looooooooooooooooong"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


def words_of(text: str) -> str:
    return re.sub(r"\s", "", text)


@given(text=TEXTS, max_chars=st.integers(1, 40))
@pytest.mark.parametrize("granularity", ["sentence", "clause"])
def test_nothing_is_lost_or_doubled_and_no_piece_is_too_long(
    granularity: Granularity, text: str, max_chars: int
) -> None:
    for pieces in (
        split(text, granularity=granularity, max_chars=max_chars),
        segments(text, max_chars=max_chars),
    ):
        assert words_of("".join(pieces)) == words_of(text)
        assert all(len(piece) <= max_chars for piece in pieces)
    assert all(piece and piece == piece.strip() for piece in split(text, max_chars=max_chars))


@given(text=TEXTS, max_chars=st.integers(1, 40), cuts=st.lists(st.integers(0, 200), max_size=20))
@pytest.mark.parametrize("granularity", ["sentence", "clause"])
def test_a_text_in_pieces_is_cut_like_the_whole(
    granularity: Granularity, text: str, max_chars: int, cuts: list[int]
) -> None:
    splitter = Splitter(granularity=granularity, max_chars=max_chars)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces: list[str] = []
    for start, end in itertools.pairwise(places):
        pieces += splitter.push(text[start:end])
    pieces += splitter.finish()
    assert pieces == split(text, granularity=granularity, max_chars=max_chars)


@pytest.mark.parametrize(
    ("joint", "sentences"),
    [
        (" ", ["Dr. Smith paid 3.14 dollars, i.e. all he had.", '"Why?" she asked.', "He left!"]),
        (" ", ["It was made in the U.S. by J. R. Tolkien.", "In 1999.", "Then"]),
        (" ", ["Well... perhaps.", "Wait...", "What?!", "Yes…", "No.", "See no. 5."]),
        (" ", ["He said “Stop.”", "(She did.)", "They left."]),
        ("", ["好的。", "再见！", "真的吗？！", "他说：“走吧。”", "走。"]),
        ("\n\n", ["A heading", "Then a text."]),
        ("\n", ["1. First, wash.", "2. Then dry."]),
        (" ", ["a text without any end"]),
        (" ", ["Look at example.com, version 2.0.1, now."]),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(joint: str, sentences: list[str]) -> None:
    assert split(joint.join(sentences), max_chars=100) == sentences


def test_clauses_are_pieces_of_their_own_where_they_are_long_enough() -> None:
    text = "Yes, when it rains for a week, we stay at home; otherwise, we go out."
    assert split(text, granularity="clause", max_chars=100) == [
        "Yes, when it rains for a week,", "we stay at home;", "otherwise, we go out.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("one two three four five", ["one two", "three four", "five"]),
        ("one two, three four five", ["one two,", "three four", "five"]),
        ("abcdefghijklmnopqrstuvwxyz", ["abcdefghijk", "lmnopqrstuv", "wxyz"]),
        ("x " + "l" * 15, ["x", "l" * 11, "l" * 4]),
        ("abcdefghijklm. No", ["abcdefghijk", "lm.", "No"]),
    ],
)
def test_what_is_too_long_is_cut_at_clauses_blanks_or_the_limit(
    text: str, pieces: list[str]
) -> None:
    assert split(text, max_chars=11) == pieces


def test_a_sentence_is_there_with_the_first_letter_of_the_next() -> None:
    splitter = Splitter(max_chars=100)
    seen = [splitter.push(character) for character in "One. Two. 3"]
    assert [index for index, pieces in enumerate(seen) if pieces] == [5, 10]
    assert splitter.finish() == ["3"]


def test_segments_are_filled_up_with_sentences_and_short_texts_stay_whole() -> None:
    text = "One is here. Two is here. Three is here. Four is here."
    assert segments(text, max_chars=30) == [
        "One is here. Two is here.", "Three is here. Four is here.",
    ]  # fmt: skip
    assert segments(text + " ", max_chars=100) == [text + " "]
    assert segments("A head\n\nOne. Two. Three.", max_chars=15) == ["A head\n\nOne.", "Two. Three."]
    assert segments("好的。再见！走吧。", max_chars=6) == ["好的。再见！", "走吧。"]
