"""Step 10: the codes that the Talker says by itself, for the sentences that have sound.

Spoken with stretto from the assembled checkpoint. As a token is a frame, what it says lines up
with the recorded wave by itself; where it does not, the true codes stand in.
"""

from __future__ import annotations

import numpy as np

from stretto.api import Answer, Omni
from training.parrot.synthesis import Utterance, load_utterances
from training.parrot.workspace import argument_parser, open_workspace, save

_AT_ONCE = 32


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--utterances", type=int, default=400)
    options = parser.parse_args()
    workspace = open_workspace(options)
    utterances = load_utterances(workspace.codes)[: options.utterances]
    codes: list[np.ndarray] = []
    replaced = 0
    with Omni(str(workspace.checkpoint), cache_dir=workspace.root) as omni:
        for start in range(0, len(utterances), _AT_ONCE):
            batch = utterances[start : start + _AT_ONCE]
            answers = omni.generate_all([each.text for each in batch], return_codes=True)
            for utterance, answer in zip(batch, answers, strict=True):
                spoken = predicted_codes(utterance, answer)
                replaced += spoken is None
                codes.append(utterance.codes if spoken is None else spoken)
            print(f"{len(codes)} utterances, {replaced} of them not as written", flush=True)
    save(workspace.predicted_codes, codes=codes)


def predicted_codes(utterance: Utterance, answer: Answer) -> np.ndarray | None:
    """The answer's codes uint8 [frames, 16] if it has the utterance's frames, else None."""
    if answer.codes is None or answer.codes.shape != utterance.codes.shape:
        return None
    return answer.codes.astype(np.uint8)


if __name__ == "__main__":
    main()
