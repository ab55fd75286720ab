"""Go on from a finished checkpoint: its three models, where the training steps look for theirs.

    python -m training.parrot.continuation --work <folder>
    python -m training.parrot.talker --work <folder> --steps 5000 --embeddings-until 0

The folder gets the shipped checkpoint's codec, which lies beside this file; of another checkpoint
it has to hold the codec already. With `--old-codec` for the checkpoint's, the folder's may be one
that was fitted with `codec --start`: then the codes' embeddings are carried over to those that
sound alike, and the heads of codes 1 to 15 start anew. A training step takes the models as its
start and begins a schedule of its own. The Thinker need not be trained again as long as the text
embeddings stand still.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration

import stretto.models
from training.parrot.codec import CODEBOOK_SIZE, Codec, load_codec
from training.parrot.talker import SpeechModel
from training.parrot.thinker import TextModel
from training.parrot.workspace import Workspace, argument_parser, open_workspace, save

SHIPPED = Path(stretto.models.__file__).parent / "parrot"
SHIPPED_CODEC = Path(__file__).with_name("codec.pt")
_RUN = "a checkpoint"
# Of a codebook's spread: few rows are to say what many components mean.
_RIDGE = 0.03


def take_apart(checkpoint: Path, workspace: Workspace, old_codec: Codec | None = None) -> None:
    """Leaves `talker.pt`, `thinker.pt` and `code2wav.pt`.

    `old_codec` is the checkpoint's, where the folder has another with the same code 0.

    Raises:
        FileExistsError: one of them is there already.
    """
    paths = (workspace.talker, workspace.thinker, workspace.code2wav)
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} would be replaced; delete it first")
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    speech = SpeechModel(tokenizer)
    speech.talker = model.talker
    speech.text_embedding = model.thinker.model.embed_tokens
    text = TextModel(tokenizer, model.thinker.model.embed_tokens.weight)
    text.decoder = model.thinker.model
    text.head = model.thinker.lm_head
    if old_codec is not None:
        _recode(model, old_codec, load_codec(workspace.codec))
    for path, part in zip(paths, (speech, text, model.code2wav), strict=True):
        save(path, run=_RUN, step=0, model=part.state_dict())


def _recode(model: Any, old: Codec, new: Codec) -> None:
    """Moves the embeddings of codes 1 to 15, and all of Code2Wav's, to a new codec."""
    before = old.centroids @ (old.projection.T @ new.projection)
    before[0] += (old.mean - new.mean) @ new.projection
    predictor = model.talker.code_predictor
    tables = [embedding.weight for embedding in predictor.model.codec_embedding]
    moved = moved_rows(torch.stack([table.data for table in tables]), before[1:], new.centroids[1:])
    for table, rows in zip(tables, moved, strict=True):
        table.data.copy_(rows)
    for head in predictor.lm_head:
        # Moved like embeddings they would be sure of what is wrong; equal rows know nothing.
        head.weight.data.copy_(head.weight.data.mean(0, keepdim=True).expand_as(head.weight))
    table = model.code2wav.code_embedding.weight.data
    rows = moved_rows(table.view(-1, CODEBOOK_SIZE, table.shape[1]), before, new.centroids)
    table.copy_(rows.flatten(0, 1))


def moved_rows(tables: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Rows for the centroids `after` [k, 256, d], by ridge regression of `tables` [k, 256, h] on
    those `before`. Each table keeps its mean.
    """
    means, points = tables.mean(1, keepdim=True), before - before.mean(1, keepdim=True)
    flat, rows = points.flatten(0, 1), (tables - means).flatten(0, 1)
    gram = flat.T @ flat
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    weights: Tensor = torch.linalg.solve(gram, flat.T @ rows)
    return (after - after.mean(1, keepdim=True)) @ weights + means


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED)
    parser.add_argument("--old-codec", type=Path, default=None, help="the checkpoint's own")
    options = parser.parse_args()
    workspace = open_workspace(options)
    if not workspace.codec.exists():
        if options.checkpoint != SHIPPED:
            parser.error(f"{workspace.codec} is not there: the codec of {options.checkpoint}")
        shutil.copy(SHIPPED_CODEC, workspace.codec)
    old_codec = None if options.old_codec is None else load_codec(options.old_codec)
    take_apart(options.checkpoint, workspace, old_codec)


if __name__ == "__main__":
    main()
