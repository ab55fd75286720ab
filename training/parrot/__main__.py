"""Every step of the recipe, in order; a step whose results are there is passed over.

Training steps go on where they were stopped. To do a step again, delete what it left.

    corpus, ... synthesis ─┬─ talker ─────────────────────────────┬─ prediction, code2wav, ...
                           └─ code2wav on true codes ─ thinker ───┘
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from training.parrot.talker import EMBEDDINGS_UNTIL
from training.parrot.workspace import Workspace, argument_parser, load

_POLL_S = 10.0


class Recipe:
    def __init__(self, workspace: Workspace, threads: int) -> None:
        self._workspace = workspace
        self._threads = threads

    def step(
        self, name: str, *options: str, leaves: Path | None = None, threads: int | None = None
    ) -> None:
        """Runs one step, unless the file that it leaves is there.

        Raises:
            subprocess.CalledProcessError: the step failed.
        """
        if leaves is not None and leaves.exists():
            return
        print(f"== {name} {' '.join(options)}", flush=True)
        command: Sequence[str] = [
            *(sys.executable, "-m", f"training.parrot.{name}"),
            *("--work", str(self._workspace.root)),
            *("--threads", str(threads or self._threads)),
            *options,
        ]
        subprocess.run(command, check=True)

    def train(self) -> None:
        """The three models; two at a time get more out of two cores than one with two threads."""
        threads = max(1, self._threads // 2)
        with ThreadPoolExecutor(2) as lanes:
            talker = lanes.submit(partial(self.step, "talker", threads=threads))
            others = lanes.submit(self._train_others, talker, threads)
            others.result()
            talker.result()

    def _train_others(self, talker: Future[None], threads: int) -> None:
        space = self._workspace
        if not space.predicted_codes.exists():
            self.step("code2wav", "--true-codes-only", threads=threads)
        # The Thinker takes the Talker's embeddings of text, as soon as they stand still.
        while not talker.done() and not _embeddings_stand_still(space.talker):
            time.sleep(_POLL_S)
        if _embeddings_stand_still(space.talker):
            self.step("thinker", threads=threads)


def _embeddings_stand_still(talker: Path) -> bool:
    return talker.exists() and load(talker)["step"] >= EMBEDDINGS_UNTIL


def main() -> None:
    options = argument_parser(__doc__ or "").parse_args()
    space = Workspace(options.work)
    recipe = Recipe(space, options.threads)
    recipe.step("corpus", leaves=space.corpus)
    recipe.step("durations", leaves=space.merges)
    recipe.step("vocabulary", leaves=space.tokenizer)
    recipe.step("codec", leaves=space.codec)
    recipe.step("synthesis", leaves=space.waveforms)
    recipe.train()
    if not space.predicted_codes.exists():
        recipe.step("assemble")
        recipe.step("prediction")
    recipe.step("code2wav")
    recipe.step("assemble")
    recipe.step("quality")
    recipe.step("spectrograms")


if __name__ == "__main__":
    main()
