"""Every step of the recipe, in order; a step whose results are there is passed over.

Training steps go on where they were stopped. To do a step again, delete what it left.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from training.parrot.workspace import Workspace, argument_parser


def commands(workspace: Workspace) -> list[tuple[str, list[str], Path | None]]:
    """(step, its options, the file it leaves; None if it is to be started in any case)."""
    return [
        ("corpus", [], workspace.corpus),
        ("durations", [], workspace.merges),
        ("vocabulary", [], workspace.tokenizer),
        ("codec", [], workspace.codec),
        ("synthesis", [], workspace.waveforms),
        ("talker", [], None),
        ("thinker", [], None),
        ("code2wav", ["--true-codes-only"], workspace.predicted_codes),
        ("assemble", [], workspace.predicted_codes),
        ("prediction", [], workspace.predicted_codes),
        ("code2wav", ["--steps", "600", "--peak", "6e-4"], None),
        ("assemble", [], None),
        ("quality", [], None),
    ]


def main() -> None:
    options = argument_parser(__doc__ or "").parse_args()
    for step, extra, result in commands(Workspace(options.work)):
        if result is not None and result.exists():
            continue
        print(f"== {step} {' '.join(extra)}", flush=True)
        command = [sys.executable, "-m", f"training.parrot.{step}", "--work", str(options.work)]
        subprocess.run([*command, "--threads", str(options.threads), *extra], check=True)


if __name__ == "__main__":
    main()
