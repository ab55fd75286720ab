"""Step 1: the text that parrot learns to speak, one utterance a line.

Three sources, all in the public domain or made here:

    the King James Bible       long, grammatical sentences with old words
    SCOWL's word lists         every common English word, alone and in random company
    training.parrot.grammar    everyday sentences with modern words, written for this recipe

A word is learnt by being heard, so random sequences are dealt from shuffled decks: each common
word comes equally often. The held-out sentences are taken out at the end.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.parrot import grammar
from training.parrot.grammar import capitalised
from training.parrot.held_out import without_held_out, words
from training.parrot.spoken_numbers import in_words
from training.parrot.workspace import argument_parser, open_workspace, published

SCOWL = Path("/usr/share/dict/scowl")
_SPEAKABLE = re.compile(r"^[A-Za-z][A-Za-z ,.'?!;:-]*$")


@dataclass(frozen=True)
class CorpusSizes:
    """How many lines of each kind are asked for; doubles are dropped afterwards."""

    sentences: int = 56_000
    sentence_pairs: int = 6_000
    greetings: int = 1_500
    single_words: int = 6_000
    word_sequences: int = 34_000
    numbers: int = 1_500
    bible: int = 6_000


class Deck:
    """Deals its cards in random order, all of them before any comes again."""

    def __init__(self, cards: Sequence[str], rng: random.Random) -> None:
        self._cards = list(cards)
        self._rng = rng
        self._left: list[str] = []

    def deal(self) -> str:
        if not self._left:
            self._left = self._cards.copy()
            self._rng.shuffle(self._left)
        return self._left.pop()


def word_list(size: int, kind: str = "words") -> list[str]:
    """SCOWL's English words of one size; the smaller the size, the commoner the words."""
    found: list[str] = []
    for variety in ("english", "american"):
        path = SCOWL / f"{variety}-{kind}.{size}"
        if path.exists():
            found += path.read_text(encoding="latin-1").split()
    return [word for word in found if word.isascii() and 2 <= len(word) <= 13]


def common_words() -> dict[int, list[str]]:
    """Lower-case words by SCOWL size; a possessive of a word that is there is left out."""
    return {
        size: [word for word in word_list(size) if word.isalpha() and word.islower()]
        for size in (10, 20, 35)
    }


def contractions() -> list[str]:
    return [
        word
        for size in (10, 20, 35)
        for word in word_list(size, "contractions")
        if word.islower() and word.replace("'", "").isalpha()
    ]


def names() -> list[str]:
    return [
        name
        for size in (35, 40, 50)
        for name in word_list(size, "proper-names")
        if name.isalpha() and name[1:].islower() and 3 <= len(name) <= 10
    ]


def bible_sentences(known: frozenset[str]) -> Iterator[str]:
    """Sentences and clauses of 3 to 20 words, all of them known."""
    text = subprocess.run(
        ["bible", "-f"], input="gen1:1-rev22:21\n", capture_output=True, text=True, check=True
    ).stdout
    for verse in text.splitlines():
        verse = re.sub(r"^\S+:\d+\s+", "", verse)
        for clause in re.split(r"(?<=[.?!:;])\s+", verse):
            clause = re.sub(r"[:;]$", ".", clause.strip())
            if _SPEAKABLE.match(clause) and 3 <= len(clause.split()) <= 20:
                spoken = words(clause)
                if all(word in known or word.removesuffix("'s") in known for word in spoken):
                    yield clause


def word_sequence(decks: Sequence[Deck], weights: Sequence[float], rng: random.Random) -> str:
    """3 to 9 unrelated words, mostly dressed as a sentence."""
    count = rng.randint(3, 9)
    sequence = [deck.deal() for deck in rng.choices(decks, weights, k=count)]
    if count > 4 and rng.random() < 0.3:
        sequence[rng.randrange(1, count - 1)] += ","
    line = " ".join(sequence)
    return capitalised(line) + rng.choice("...?!") if rng.random() < 0.8 else line


def compose(sizes: CorpusSizes, rng: random.Random) -> list[str]:
    tiers = common_words()
    known = frozenset(word.lower() for tier in tiers.values() for word in tier) | {"a", "i", "o"}
    decks = [Deck(tiers[10], rng), Deck(tiers[20], rng), Deck(tiers[35], rng)]
    decks += [Deck(names(), rng), Deck(contractions(), rng)]
    # Sizes 10 and 20, four and eight thousand words, are nearly all of everyday English.
    weights = (0.40, 0.27, 0.26, 0.05, 0.02)

    lines = [grammar.sentence(rng) for _ in range(sizes.sentences)]
    lines += [
        f"{grammar.sentence(rng)} {grammar.sentence(rng)}" for _ in range(sizes.sentence_pairs)
    ]
    lines += [grammar.greeting(rng) for _ in range(sizes.greetings)]
    lines += [f"{grammar.greeting(rng)} {grammar.greeting(rng)}" for _ in range(sizes.greetings)]
    for _ in range(sizes.single_words):
        word = rng.choices(decks, weights)[0].deal()
        lines.append(rng.choice((word, capitalised(word) + ".", capitalised(word) + "!")))
    lines += [word_sequence(decks, weights, rng) for _ in range(sizes.word_sequences)]
    for _ in range(sizes.numbers):
        number = in_words(rng.randrange(rng.choice((100, 1000, 10_000, 100_000))))
        lines.append(rng.choice((capitalised(number) + ".", number)))
    bible = list(dict.fromkeys(bible_sentences(known)))
    lines += rng.sample(bible, sizes.bible)

    speakable = [line for line in dict.fromkeys(lines) if _SPEAKABLE.match(line)]
    clean = without_held_out(speakable)
    rng.shuffle(clean)
    return clean


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    workspace = open_workspace(options)
    lines = compose(CorpusSizes(), random.Random(options.seed))
    with published(workspace.corpus) as path:
        path.write_text("".join(f"{line}\n" for line in lines))
    heard = Counter(word for line in lines for word in words(line))
    print(f"{len(lines)} lines, {heard.total()} words, {len(heard)} of them different")


if __name__ == "__main__":
    main()
