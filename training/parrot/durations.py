"""Step 2: how long espeak-ng takes for each word, and the BPE merges that count it in frames.

The trick that lets so small a model speak: one text token is one codec frame of 80 ms. Words
start as single letters; merges are added greedily, each the one that brings the token counts of
all words nearest to their durations.

    thought   0.31 s = 3.9 frames   t h o u g h t ─> th ou gh t
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from training.parrot.espeak import Espeak, Utterance
from training.parrot.workspace import argument_parser, open_workspace, published

FRAME_S = 0.08

# A merge helps at least so much or none is made; longer pieces would hide the spelling.
_LEAST_GAIN = 1.0
_MOST_LETTERS = 5
# Fewer words say too little about a pair.
_FEWEST_WORDS = 3

Merge = tuple[str, str]


@dataclass(frozen=True)
class TimedWord:
    """One spoken word. `start`, `end` in samples; the text it covers is [first, last)."""

    first: int
    last: int
    start: int
    end: int


def timed_words(utterance: Utterance, text: str) -> list[TimedWord]:
    """Where each word sounds: from its first phoneme to the next pause or word."""
    words = utterance.words
    sounding = [phoneme.sample for phoneme in utterance.phonemes if not phoneme.is_pause]
    pauses = [phoneme.sample for phoneme in utterance.phonemes if phoneme.is_pause]
    # espeak's phoneme events may come up to 40 samples before their word's.
    starts = [
        next((sample for sample in sounding if sample >= word.sample - 40), word.sample)
        for word in words
    ]
    ends = [*starts[1:], len(utterance.samples)]
    timed = []
    for index, (word, start, end) in enumerate(zip(words, starts, ends, strict=True)):
        end = next((pause for pause in pauses if start < pause <= end), end)
        last = words[index + 1].text_position if index + 1 < len(words) else len(text)
        timed.append(TimedWord(word.text_position, last, start, end))
    return timed


def word_durations(espeak: Espeak, lines: list[str]) -> dict[str, list[float]]:
    """Seconds that each word took, each time it was said."""
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        for word in timed_words(espeak.say(line), line):
            written = line[word.first : word.last]
            spelling = re.sub(r"[^a-z' ]", "", written.lower()).strip(" '")
            duration_s = (word.end - word.start) / espeak.sample_rate
            if spelling and " " not in spelling and "-" not in written and duration_s > 0.02:
                durations[spelling].append(duration_s)
    return durations


def fitted_merges(durations: dict[str, list[float]]) -> Iterator[tuple[Merge, float]]:
    """The merges in order, each with what it gained."""
    pieces = [list(word) for word in durations]
    counts = np.array([float(len(word)) for word in pieces])
    frames = np.array([float(np.median(heard)) for heard in durations.values()]) / FRAME_S
    # Common words weigh more, though not as much more as they are commoner.
    weights = np.array([min(len(heard), 40) ** 0.75 for heard in durations.values()])

    def misfit(counts: np.ndarray, frames: np.ndarray) -> np.ndarray:
        return np.asarray((counts - frames) ** 2 / (frames + 1))

    while True:
        uses: defaultdict[Merge, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        for index, word in enumerate(pieces):
            for pair in pairwise(word):
                if len(pair[0]) + len(pair[1]) <= _MOST_LETTERS:
                    uses[pair][index] += 1
        best: tuple[float, Merge] | None = None
        for pair, words in uses.items():
            if len(words) < _FEWEST_WORDS:
                continue
            users = np.fromiter(words.keys(), int)
            fewer = np.fromiter(words.values(), float)
            before = misfit(counts[users], frames[users])
            after = misfit(counts[users] - fewer, frames[users])
            gain = float((weights[users] * (before - after)).sum())
            if gain >= _LEAST_GAIN and (best is None or gain > best[0]):
                best = gain, pair
        if best is None:
            return
        gain, merge = best
        for word_index in uses[merge]:
            pieces[word_index] = merged(pieces[word_index], merge)
            counts[word_index] = len(pieces[word_index])
        yield merge, gain


def merged(pieces: list[str], merge: Merge) -> list[str]:
    """The pieces with each neighbouring pair of `merge` joined, from the left."""
    joined: list[str] = []
    for piece in pieces:
        if joined and (joined[-1], piece) == merge:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--lines", type=int, default=10_000, help="corpus lines that are timed")
    options = parser.parse_args()
    workspace = open_workspace(options)
    lines = workspace.corpus.read_text().splitlines()[: options.lines]
    durations = word_durations(Espeak(), lines)
    print(f"{len(durations)} different words timed", flush=True)
    merges = []
    for merge, gain in fitted_merges(durations):
        merges.append(merge)
        print(f"{len(merges):3} {merge[0]}+{merge[1]} gains {gain:.1f}", flush=True)
    with published(workspace.merges) as path:
        path.write_text(json.dumps(merges))


if __name__ == "__main__":
    main()
