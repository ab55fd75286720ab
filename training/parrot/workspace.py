"""Where the recipe keeps its data and checkpoints, and how a training run is saved and resumed.

Every step writes its files under another name and renames them, so a step that was killed can
be started again: what exists is whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_ROOT = Path.home() / ".cache" / "stretto" / "parrot"


@dataclass(frozen=True)
class Workspace:
    """The work directory; each property is one file or folder in it."""

    root: Path

    @property
    def corpus(self) -> Path:
        """One utterance a line, already normalised."""
        return self.root / "corpus.txt"

    @property
    def merges(self) -> Path:
        """BPE merges whose token counts fit word durations."""
        return self.root / "merges.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def codec(self) -> Path:
        return self.root / "codec.pt"

    @property
    def codes(self) -> Path:
        """All utterances as token ids and codec frames."""
        return self.root / "codes.pt"

    @property
    def waveforms(self) -> Path:
        """The utterances that Code2Wav is trained on, as sound."""
        return self.root / "waveforms.pt"

    @property
    def predicted_codes(self) -> Path:
        """The same utterances' frames as the Talker says them."""
        return self.root / "predicted_codes.pt"

    @property
    def talker(self) -> Path:
        return self.root / "talker.pt"

    @property
    def thinker(self) -> Path:
        return self.root / "thinker.pt"

    @property
    def code2wav(self) -> Path:
        return self.root / "code2wav.pt"

    @property
    def checkpoint(self) -> Path:
        """The assembled model in Hugging Face layout."""
        return self.root / "parrot"

    @property
    def quality(self) -> Path:
        """Sound and figures of the quality gate."""
        return self.root / "quality"


def argument_parser(module_doc: str) -> argparse.ArgumentParser:
    """A step's parser, with the options that every step has."""
    parser = argparse.ArgumentParser(
        description=module_doc.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_ROOT, help="the work directory")
    parser.add_argument("--threads", type=int, default=2, help="threads, or processes")
    return parser


def open_workspace(options: argparse.Namespace) -> Workspace:
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    return Workspace(options.work)


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """A name to write to; leaving the block without an error renames it to `path`."""
    unpublished = path.with_name(path.name + ".part")
    yield unpublished
    unpublished.replace(path)


def save(path: Path, **content: Any) -> None:
    with published(path) as unpublished:
        torch.save(content, unpublished)


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=False)
    return content
