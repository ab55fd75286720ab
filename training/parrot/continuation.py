"""Go on from a finished checkpoint: its models and tokenizer, where the steps look for theirs.

    python -m training.parrot.continuation --work <folder>
    python -m training.parrot.talker --work <folder> --steps 5000 --embeddings-until 0

`vocabulary` would make another tokenizer of today's corpus, and the models would be lost in it.
The folder gets the shipped checkpoint's codec, which lies beside this file, unless it holds one
already: that of another checkpoint, or one fitted with `codec --start`, whose codes mean nearly
what they meant. A training step takes the models as its start and begins a schedule of its own.
The Thinker need not be trained again as long as the text embeddings stand still.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3OmniMoeForConditionalGeneration

import stretto.models
from training.parrot.talker import SpeechModel
from training.parrot.thinker import TextModel
from training.parrot.workspace import Workspace, argument_parser, open_workspace, save

SHIPPED = Path(stretto.models.__file__).parent / "parrot"
SHIPPED_CODEC = Path(__file__).with_name("codec.pt")
_RUN = "a checkpoint"


def take_apart(checkpoint: Path, workspace: Workspace) -> None:
    """Leaves `tokenizer.json`, `talker.pt`, `thinker.pt` and `code2wav.pt`.

    Raises:
        FileExistsError: one of them is there already.
    """
    paths = (workspace.talker, workspace.thinker, workspace.code2wav)
    for path in (workspace.tokenizer, *paths):
        if path.exists():
            raise FileExistsError(f"{path} would be replaced; delete it first")
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    shutil.copy(checkpoint / "tokenizer.json", workspace.tokenizer)
    speech = SpeechModel(tokenizer)
    speech.talker = model.talker
    speech.text_embedding = model.thinker.model.embed_tokens
    text = TextModel(tokenizer, model.thinker.model.embed_tokens.weight)
    text.decoder = model.thinker.model
    text.head = model.thinker.lm_head
    for path, part in zip(paths, (speech, text, model.code2wav), strict=True):
        save(path, run=_RUN, step=0, model=part.state_dict())


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED)
    options = parser.parse_args()
    workspace = open_workspace(options)
    if not workspace.codec.exists():
        if options.checkpoint != SHIPPED:
            parser.error(f"{workspace.codec} is not there: the codec of {options.checkpoint}")
        shutil.copy(SHIPPED_CODEC, workspace.codec)
    take_apart(options.checkpoint, workspace)


if __name__ == "__main__":
    main()
