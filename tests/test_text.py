"""Text that comes in pieces is the text that would have come at once, and nothing is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.pipeline.assembly import load_decode
from stretto.text import Decode, TextStream

NUM_WORDS = 2944


@pytest.fixture(scope="module")
def decode(tiny_dir: Path) -> Decode:
    return load_decode(str(tiny_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def encode(tiny_tokenizer: object) -> Callable[[str], list[int]]:
    return lambda text: list(tiny_tokenizer.encode(text, add_special_tokens=False).ids)  # type: ignore[attr-defined]


def pieces_of(
    ids: Sequence[int], decode: Decode, stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    """What each push gave, then what the end gave."""
    stream = TextStream(decode, stop)
    pieces = [stream.push(token_id) for token_id in ids]
    return [*pieces, stream.finish()], stream


def one_byte_each(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are single bytes: every character longer than one is torn."""
    return bytes(ids).decode(errors="replace")


def one_letter_each(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@settings(max_examples=300)
@given(st.lists(st.integers(0, NUM_WORDS + 40), max_size=40))
def test_the_pieces_joined_are_the_whole_for_any_ids(decode: Decode, ids: list[int]) -> None:
    pieces, _ = pieces_of(ids, decode)
    assert "".join(pieces) == decode(ids)


# The parts of characters of one to four bytes, in any order.
torn = st.lists(st.sampled_from(b"a\x80\x82\xac\xc3\xa9\xe2\xf0\x9f\x99\xff"), max_size=60)


@settings(max_examples=600)
@given(st.binary(max_size=40) | torn.map(bytes))
def test_the_pieces_joined_are_the_whole_for_any_bytes(data: bytes) -> None:
    pieces, _ = pieces_of(data, one_byte_each)
    assert "".join(pieces) == one_byte_each(data)


@settings(max_examples=300)
@given(st.text(max_size=30))
def test_a_text_of_whole_characters_never_shows_a_torn_one(text: str) -> None:
    pieces, _ = pieces_of(text.encode(errors="ignore"), one_byte_each)
    whole = text.encode(errors="ignore").decode()
    assert "".join(pieces) == whole
    for piece in pieces:
        assert piece in whole
        assert "\ufffd" not in piece or "\ufffd" in whole


@pytest.mark.parametrize(
    "text",
    [
        "plain words here",
        "naïve café",
        "日本語とEnglishと한국어",
        "👩‍👩‍👧 🙂🏽 🇩🇪",
        "שלום नमस्ते",
        "e\u0301 ÿ\x00\n\n",
        "",
    ],
)
def test_every_character_comes_as_soon_as_it_is_whole(
    decode: Decode, encode: Callable[[str], list[int]], text: str
) -> None:
    ids = encode(text)
    pieces, _ = pieces_of(ids, decode)
    assert "".join(pieces) == text
    for count in range(len(ids) + 1):
        known = decode(ids[:count])
        torn = len(known) - len(known.rstrip("\ufffd"))
        assert len("".join(pieces[:count])) >= len(known) - torn


def test_a_torn_character_at_the_end_comes_out_as_replacement() -> None:
    pieces, _ = pieces_of("ab€".encode()[:-1], one_byte_each)
    assert "".join(pieces) == one_byte_each("ab€".encode()[:-1]) == "ab\ufffd"


stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500)
@given(st.text("abcd", max_size=25), stops)
def test_the_text_ends_where_the_first_whole_stop_string_begins(
    text: str, stop_strings: list[str]
) -> None:
    pieces, stream = pieces_of([ord(c) for c in text], one_letter_each, tuple(stop_strings))
    said = "".join(pieces)
    completed = [text.find(stop) + len(stop) for stop in stop_strings if text.find(stop) >= 0]
    assert stream.stopped == bool(completed)
    if not completed:
        assert said == text
        return
    end = min(completed)
    assert said == text[: min(end - len(s) for s in stop_strings if text[:end].endswith(s))]


@settings(max_examples=500)
@given(st.lists(st.text("abcd", min_size=1, max_size=5), max_size=10), stops)
def test_what_was_given_out_never_contains_a_stop_string_nor_its_beginning_at_the_stop(
    words: list[str], stop_strings: list[str]
) -> None:
    """Tokens of several letters: a stop string may begin and end inside of tokens."""
    pieces, stream = pieces_of(
        range(len(words)), lambda ids: "".join(words[i] for i in ids), tuple(stop_strings)
    )
    text, said = "".join(words), "".join(pieces)
    assert text.startswith(said)
    assert not any(stop in said for stop in stop_strings)
    if stream.stopped:
        assert any(text[len(said) :].startswith(stop) for stop in stop_strings)
    else:
        assert said == text


def test_only_what_could_still_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(one_letter_each, ("STOP",))
    assert [stream.push(ord(c)) for c in "aSTaSTOx"] == ["a", "", "", "STa", "", "", "", "STOx"]
    assert stream.finish() == ""


def test_what_was_held_back_comes_with_the_end() -> None:
    pieces, stream = pieces_of([ord(c) for c in "abSTO"], one_letter_each, ("STOP",))
    assert (pieces[-1], stream.stopped) == ("STO", False)


def test_nothing_follows_a_stop_string() -> None:
    pieces, stream = pieces_of([ord(c) for c in "ab.cd.e"], one_letter_each, (".",))
    assert ("".join(pieces), pieces[3:], stream.stopped) == ("ab", [""] * 5, True)


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("words", [ord(c) for c in "word " * 200]),
        ("characters of four bytes", list("🙂".encode() * 200)),
        ("bytes that are no text", [0x80] * 800),
        ("characters that never become whole", [0xE2, 0x82] * 400),
    ],
)
def test_the_cost_of_a_token_does_not_grow_with_what_was_said(kind: str, ids: list[int]) -> None:
    longest = 0

    def decode(part: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(part))
        return one_byte_each(part)

    pieces, _ = pieces_of(ids, decode)
    assert "".join(pieces) == one_byte_each(ids)
    assert longest <= 16, kind
