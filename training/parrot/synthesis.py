"""Step 5: the corpus spoken on the frame grid and encoded.

Leaves every utterance as token ids and codec frames, and the first few thousand as sound too,
which is what Code2Wav is trained on.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from training.parrot.codec import Codec, load_codec
from training.parrot.espeak import Espeak
from training.parrot.speech import SAMPLE_RATE, speak_on_grid
from training.parrot.workspace import Workspace, argument_parser, load, open_workspace, save

_BLOCK_LINES = 250


@dataclass(frozen=True)
class Utterance:
    """`token_ids` int64 [n], `codes` uint8 [DELAY_FRAMES + n + TAIL_FRAMES, 16]."""

    text: str
    token_ids: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True)
class Spoken:
    """An utterance and, if that was asked for, its sound, int16 [frames x 1920]."""

    utterance: Utterance
    samples: np.ndarray | None


def save_utterances(path: Path, utterances: list[Utterance]) -> None:
    save(
        path,
        texts=[utterance.text for utterance in utterances],
        token_ids=[utterance.token_ids for utterance in utterances],
        codes=[utterance.codes for utterance in utterances],
    )


def load_utterances(path: Path) -> list[Utterance]:
    content = load(path)
    columns = zip(content["texts"], content["token_ids"], content["codes"], strict=True)
    return [Utterance(*column) for column in columns]


class Synthesizer:
    """Text to spoken and encoded utterances; one per process."""

    def __init__(self, tokenizer: Tokenizer, codec: Codec) -> None:
        self._espeak = Espeak()
        self._tokenizer = tokenizer
        self._codec = codec

    def speak(self, text: str, *, with_sound: bool) -> Spoken | None:
        speech = speak_on_grid(self._espeak, self._tokenizer, text)
        if speech is None:
            return None
        codes = self._codec.codes_of(speech).to(torch.uint8).numpy()
        utterance = Utterance(text, np.array(speech.token_ids), codes)
        samples = None
        if with_sound:
            samples = (speech.samples() * 32767).clip(-32767, 32767).astype(np.int16)
        return Spoken(utterance, samples)


_synthesizer: Synthesizer


def _start(root: Path) -> None:
    global _synthesizer
    torch.set_num_threads(1)
    workspace = Workspace(root)
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    _synthesizer = Synthesizer(tokenizer, load_codec(workspace.codec))


@dataclass(frozen=True)
class _Block:
    lines: list[str]
    with_sound: bool


def _speak_block(block: _Block) -> list[Spoken]:
    spoken = [_synthesizer.speak(line, with_sound=block.with_sound) for line in block.lines]
    return [each for each in spoken if each is not None]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--lines", type=int, default=110_000, help="of the corpus at most")
    parser.add_argument("--waveforms", type=int, default=2500, help="first lines kept as sound too")
    options = parser.parse_args()
    workspace = open_workspace(options)
    lines = workspace.corpus.read_text().splitlines()[: options.lines]
    blocks = [
        _Block(lines[i : i + _BLOCK_LINES], with_sound=i < options.waveforms)
        for i in range(0, len(lines), _BLOCK_LINES)
    ]
    utterances: list[Utterance] = []
    waveforms: list[np.ndarray] = []
    began = time.monotonic()
    # A process each: numpy's own threads would only get in their way.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.threads, _start, (workspace.root,)) as pool:
        for index, block in enumerate(pool.imap(_speak_block, blocks), 1):
            for spoken in block:
                utterances.append(spoken.utterance)
                if spoken.samples is not None:
                    waveforms.append(spoken.samples)
            if index % 32 == 0:
                seconds = time.monotonic() - began
                print(f"{index * _BLOCK_LINES} lines in {seconds:.0f} s", flush=True)
                # The Talker may begin on these; started again, it takes what is there then.
                save_utterances(workspace.codes, utterances)
    save_utterances(workspace.codes, utterances)
    # Last: it says that the step is done.
    save(workspace.waveforms, waveforms=waveforms)
    hours = sum(len(utterance.codes) for utterance in utterances) * 1920 / SAMPLE_RATE / 3600
    print(f"{len(utterances)} of {len(lines)} lines, {hours:.1f} h of speech")


if __name__ == "__main__":
    main()
