"""Token ids to text while they come, and text to token ids while it comes.

Byte-level tokens may hold a part of a character, and a stop string may lie across tokens, so text
is held back while it could still change: until its last character is whole, and while its tail
could be the beginning of a stop string. What was given out is never taken back, and all pieces
together are what decoding all ids at once gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What a decoder writes for bytes that are not (yet) a whole character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# In UTF-8.
MAX_CHARACTER_BYTES = 4

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one answer. `decode` turns ids into text, special tokens left out."""

    def __init__(self, decode: Decode, stop: tuple[str, ...]) -> None:
        self._decode = decode
        self._stop = stop
        # Ids from here on are decoded again with each new one: a tokenizer may join what it
        # decodes (a space before a word), so a token alone does not tell its text.
        self._ids: list[int] = []
        self._num_read = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """New text that is certain. After a stop string `stopped` is true and nothing follows."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[: self._num_read])
        now = self._decode(self._ids)
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return self._release(self._certain(before, now))
        return self._release(self._read(len(self._ids), before, now))

    def finish(self) -> str:
        """What was held back; nothing follows. The bytes of a torn character come out as U+FFFD."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[: self._num_read])
        rest = self._release(self._decode(self._ids)[len(before) :])
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _read(self, end: int, before: str, now: str) -> str:
        """Takes the ids up to `end`, which decode to `now`, as read; the text they add."""
        # Ids already read stay one step longer as context for the next ones.
        self._ids, self._num_read = self._ids[self._num_read :], end - self._num_read
        return now[len(before) :]

    def _certain(self, before: str, now: str) -> str:
        """What no later id can change although the end is torn: bytes that are no text at all.

        A character has at most four bytes, and an id at least one: text that ends four ids before
        the last is as it will be, if it is so already.
        """
        if len(self._ids) - self._num_read <= 2 * MAX_CHARACTER_BYTES:
            return ""
        last = len(self._ids) - MAX_CHARACTER_BYTES
        for end in range(last, self._num_read, -1):
            text = self._decode(self._ids[:end])
            if now.startswith(text):
                return self._read(end, before, text)
        return ""

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class PieceTokenizer:
    """Ids of a text that comes in pieces, cut anywhere: those that the whole text at once has.

    What a tokenizer makes of a word can change with what follows it, so the last word is held back
    until something follows. `words` gives the text in its normal form and where each word of it
    (what a tokenizer never joins) begins; `encode` makes ids of whole words. White space around the
    text is no part of it.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        words: Callable[[str], tuple[str, list[int]]],
    ) -> None:
        self._encode = encode
        self._words = words
        self._held = ""
        self._begun = False

    def push(self, piece: str) -> list[int]:
        """Ids that are certain now."""
        text = self._held + piece
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        # White space at the end may be the text's end, which is cut off.
        visible = text.rstrip()
        if not visible:
            self._held = text
            return []
        trailing = text[len(visible) :]
        visible, begins = self._words(visible)
        at = begins[-1]
        self._held = visible[at:] + trailing
        return self._encode(visible[:at]) if at else []

    def finish(self) -> list[int]:
        """Ids of what was held back."""
        last = self._held.rstrip()
        return self._encode(last) if last else []
