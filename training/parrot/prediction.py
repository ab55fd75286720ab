"""Step 10: the codes that the Talker says by itself, for the sentences that have sound.

Spoken with stretto from the assembled checkpoint. As a token is a frame, what it says lines up
with the recorded wave by itself; where it says a sound a little earlier or later, or something
else, the true codes stand in.
"""

from __future__ import annotations

import numpy as np

from stretto.api import Omni
from training.parrot.codec import NUM_STAGES
from training.parrot.synthesis import load_utterances
from training.parrot.workspace import argument_parser, open_workspace, save

_AT_ONCE = 32


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--utterances", type=int, default=400)
    options = parser.parse_args()
    workspace = open_workspace(options)
    utterances = load_utterances(workspace.codes)[: options.utterances]
    codes: list[np.ndarray] = []
    frames = same = replaced = 0
    with Omni(str(workspace.checkpoint), cache_dir=workspace.root) as omni:
        for start in range(0, len(utterances), _AT_ONCE):
            batch = utterances[start : start + _AT_ONCE]
            answers = omni.generate_all([each.text for each in batch], return_codes=True)
            for utterance, answer in zip(batch, answers, strict=True):
                true, spoken = utterance.codes, answer.codes
                if spoken is None or spoken.shape != true.shape:
                    replaced += 1
                    spoken = true
                frames += len(true)
                same += int((spoken[:, 0] == true[:, 0]).sum())
                codes.append(aligned(spoken.astype(np.uint8), true))
            print(
                f"{len(codes)} utterances, {replaced} of them not as written, "
                f"{same / frames:.1%} of the frames with their code 0",
                flush=True,
            )
    save(workspace.predicted_codes, codes=codes)


def aligned(spoken: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Codes uint8 [frames, 16]: the spoken frames that sound as the true ones do, else the true.

    The melodies are all true: the wave that they are held against has those.
    """
    codes = np.where(spoken[:, :1] == true[:, :1], spoken, true)
    codes[:, NUM_STAGES:] = true[:, NUM_STAGES:]
    return codes


if __name__ == "__main__":
    main()
