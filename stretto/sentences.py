"""Where a text is cut into pieces that can be spoken one after the other.

    split(text, ...)                  a whole text
    Splitter: push ... push, finish   a text that is still being written

Both cut at the same places however the text arrives: a place is decided only when everything that
the decision looks at is there, at the latest with the first character of what follows. Blanks
around a cut are dropped; nothing else is lost, added or moved.

    Dr. Smith paid 3.14 dollars, i.e. all he had. "Why?" she asked. 好的。再见！
                                                 ^                 ^    ^     ^
A piece ends with its sentence. One that would be longer than `max_chars` is cut behind its last
clause, else at its last blank, else, inside a giant word, at the limit.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

Granularity = Literal["sentence", "clause"]

CLOSERS = "[\"'”’»)\\]」』）】》]*"
# Ends that count before a blank, ends that need none, and an empty line.
SENTENCE_END = re.compile(
    f"(?P<spaced>[.!?…।॥؟۔]+{CLOSERS})(?=\\s|$)|(?P<full>[。！？｡]+[。！？｡…]*{CLOSERS})|"
    "(?P<line>\n[^\\S\n]*\n)"
)
CLAUSE_END = re.compile(f"[,;:–—]{CLOSERS}(?=\\s)|[，、；：]{CLOSERS}|\n")
# A clause shorter than this is not worth a cut of its own.
MIN_CLAUSE_CHARS = 16
# Words whose full stop ends no sentence. Of those that may stand at an end, a cut missed there
# costs nothing: the piece becomes longer.
ABBREVIATIONS = frozenset(
    (
        "dr", "mr", "mrs", "ms", "mx", "prof", "rev", "hon", "gen", "col", "capt", "lt", "sgt",
        "sr", "jr", "st", "mt", "ft", "eds", "vs", "cf", "al", "ca", "approx", "dept", "est",
        "tel", "ext", "jan", "feb", "apr", "jun", "jul", "aug", "sept", "oct", "nov", "dec", "hr",
        "fr", "bzw", "bspw", "ggf", "evtl", "usw", "vgl", "mme", "mlle", "sra", "srta",
    )
)  # fmt: skip
# Those that are such only before a number.
BEFORE_NUMBERS = frozenset(
    (
        "no", "nos", "nr", "vol", "fig", "figs", "eq", "sec", "ch", "pp", "ed", "art", "par",
    )
)  # fmt: skip
# "e.g.", "U.S.", "z.B.", and initials: single letters, each with its stop.
DOTTED = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]*$")


class Splitter:
    """For a text that is still being written."""

    def __init__(self, *, granularity: Granularity = "sentence", max_chars: int) -> None:
        self._clauses = granularity == "clause"
        self._max_chars = max_chars
        self._rest = ""

    def push(self, text: str) -> list[str]:
        """The pieces that are certain now."""
        self._rest += text
        return self._take(ended=False)

    def finish(self) -> list[str]:
        """The others; nothing follows."""
        return self._take(ended=True)

    def _take(self, *, ended: bool) -> list[str]:
        pieces: list[str] = []
        while True:
            self._rest = self._rest.lstrip()
            cut = self._cut(self._rest, ended=ended) if self._rest else None
            if cut is None:
                return pieces
            pieces.append(self._rest[:cut].rstrip())
            self._rest = self._rest[cut:]

    def _cut(self, text: str, *, ended: bool) -> int | None:
        """Where the first piece of `text` ends; None if that is not certain yet."""
        # One more than fits: whether a run of stops is over is seen at the character behind it.
        window = text[: self._max_chars + 1]
        for end, kind in self._candidates(window):
            if end > self._max_chars:
                break
            if end == len(text) and not ended:
                return None
            if not any(map(str.isalnum, text[:end])):
                continue
            if kind != "spaced":
                return end
            follows = text[end:].lstrip()[:1]
            if not follows and not ended:
                return None
            if _ends_sentence(text[:end], follows):
                return end
        if len(text) > self._max_chars:
            return self._forced(window)
        return len(text) if ended else None

    def _candidates(self, window: str) -> list[tuple[int, str]]:
        found = [(match.end(), str(match.lastgroup)) for match in SENTENCE_END.finditer(window)]
        if self._clauses:
            ends = (match.end() for match in CLAUSE_END.finditer(window))
            found += [(end, "clause") for end in ends if end >= MIN_CLAUSE_CHARS]
        return sorted(found)

    def _forced(self, window: str) -> int:
        """A cut within `max_chars`, where no sentence ends. `window` has a character more."""
        clauses = [match.end() for match in CLAUSE_END.finditer(window)]
        # The limit itself is a cut between words if a blank follows it.
        blanks = [at for at in range(1, len(window)) if window[at].isspace()]
        for places in (clauses, blanks):
            # A cut near the front would leave most of the room unused.
            fitting = [at for at in places if self._max_chars // 3 < at <= self._max_chars]
            if fitting:
                return fitting[-1]
        if blanks:
            return blanks[-1]
        at = self._max_chars
        # Marks and joiners belong to the character before them.
        while at > 1 and (unicodedata.combining(window[at]) or "\u200d" in window[at - 1 : at + 1]):
            at -= 1
        return at


def split(text: str, *, granularity: Granularity = "sentence", max_chars: int) -> list[str]:
    splitter = Splitter(granularity=granularity, max_chars=max_chars)
    return splitter.push(text) + splitter.finish()


def segments(text: str, *, max_chars: int) -> list[str]:
    """As few pieces as sentences allow, each of at most `max_chars`; a short text stays whole."""
    if len(text) <= max_chars:
        return [text]
    # Slices of the text itself, so that what stands between two sentences stays as it is.
    packed: list[str] = []
    start = end = 0
    for sentence in split(text, max_chars=max_chars):
        begin = text.index(sentence, end)
        if end > start and begin + len(sentence) - start > max_chars:
            packed.append(text[start:end])
            start = end
        if end == start:
            start = begin
        end = begin + len(sentence)
    packed.append(text[start:end])
    return packed


def _ends_sentence(text: str, follows: str) -> bool:
    """Whether a stop at the end of `text` ends a sentence, `follows` being the next letter."""
    if follows.islower():
        return False
    stripped = text.rstrip("\"'”’»)]」』）】》")
    if not stripped.endswith(".") or stripped.endswith(".."):
        return True
    found = LAST_WORD.search(stripped[:-1])
    word = found.group() if found else ""
    # "1. First, ..." is a list, "in 1999. Then" is not.
    is_listed = word.isdecimal() and word == stripped[:-1]
    known = ABBREVIATIONS | BEFORE_NUMBERS if follows.isdecimal() else ABBREVIATIONS
    return not (is_listed or word.lower() in known or DOTTED.fullmatch(word))
