"""Step 7: the Thinker, which repeats the last thing the user wrote.

Copying is one attention head's work: on the way to answer token i it must look at token i of
the question. Two heads of the last layer are told so by a loss of their own, which spares the
long search for it. The text embeddings are the Talker's and stand still.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from training.parrot.architecture import HEAD_DIM, HIDDEN, TextIds, parrot_config, text_vocabulary
from training.parrot.layers import decoder_layer, init_linears, queries_keys_values, rms_norm
from training.parrot.optimisation import Cosine, Muon, TrainingRun, all_but
from training.parrot.vocabulary import LETTERS
from training.parrot.workspace import argument_parser, load, open_workspace

modeling: Any = modeling_qwen3_omni_moe

_IGNORED = -100
_GUIDED_HEADS = 2
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech.",
    "You are a parrot.",
    "Repeat what the user says.",
)


@dataclass(frozen=True)
class Exchange:
    """A conversation up to the answer, and the answer with its end."""

    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Batch:
    """Right-padded [b, n]: tokens, the next token or `_IGNORED`, the place it is copied from."""

    tokens: Tensor
    target: Tensor
    source: Tensor


class TextModel(nn.Module):
    """The Thinker's decoder and head; the embedding is lent by the Talker."""

    def __init__(self, tokenizer: Tokenizer, text_embedding: Tensor) -> None:
        super().__init__()
        config = parrot_config(tokenizer).thinker_config.text_config
        self.decoder: Any = modeling.Qwen3OmniMoeThinkerTextModel._from_config(config)
        embedding = nn.Embedding(*text_embedding.shape)
        embedding.weight = nn.Parameter(text_embedding.clone(), requires_grad=False)
        self.decoder.embed_tokens = embedding
        self.head = nn.Linear(HIDDEN, text_vocabulary(tokenizer), bias=False)

    def init(self, seed: int) -> None:
        init_linears(self.decoder, torch.Generator().manual_seed(seed))
        # A copied token's vector is already its own logit.
        self.head.weight.data = self.decoder.embed_tokens.weight.data * 0.05

    def matrices(self) -> list[Tensor]:
        return [
            weight
            for name, weight in self.decoder.named_parameters()
            if weight.dim() >= 2 and "layers." in name and "gate.weight" not in name
        ]

    def others(self) -> list[Tensor]:
        trained = (w for name, w in self.named_parameters() if "embed_tokens" not in name)
        return all_but(trained, self.matrices())

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [b, n, vocabulary], the experts' balance loss, and how far the guided heads
        are from looking where they should."""
        hidden = self.decoder.embed_tokens(batch.tokens)
        balances = []
        guidance = torch.zeros(())
        for index, layer in enumerate(self.decoder.layers):
            if index + 1 == len(self.decoder.layers):
                normed = rms_norm(hidden, layer.input_layernorm.weight)
                guidance = copy_loss(layer.self_attn, normed, batch.source)
            hidden, balance = decoder_layer(layer, hidden)
            balances.append(balance)
        logits = self.head(rms_norm(hidden, self.decoder.norm.weight))
        return logits, torch.stack(balances).mean(), guidance


def copy_loss(attention: Any, hidden: Tensor, source: Tensor) -> Tensor:
    """-log of the attention that the first heads pay to `source` [b, n]; -1 is anywhere."""
    queries, keys, _ = queries_keys_values(attention, hidden)
    scores = queries[:, :_GUIDED_HEADS] @ keys[:, :1].mT
    length = source.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (scores.float() / HEAD_DIM**0.5).masked_fill(future, -1e9)
    row, position = (source >= 0).nonzero(as_tuple=True)
    attended: Tensor = scores.log_softmax(-1)[row, :, position, source[row, position]]
    return -attended.mean()


class Conversations:
    """Endless exchanges in which the assistant repeats the user."""

    def __init__(self, lines: list[str], tokenizer: Tokenizer, seed: int) -> None:
        self._lines = lines
        self._tokenizer = tokenizer
        self._ids = TextIds.of(tokenizer)
        self._rng = random.Random(seed)

    def exchange(self) -> Exchange:
        rng, ids = self._rng, self._ids
        prompt: list[int] = []
        if rng.random() < 0.3:
            system = self._tokenizer.encode(rng.choice(_SYSTEM_PROMPTS)).ids
            prompt += ids.turn(ids.system, system)
        if rng.random() < 0.15:
            earlier = self._text()
            prompt += ids.turn(ids.user, earlier) + ids.turn(ids.assistant, earlier)
        text = self._text()
        prompt += [*ids.turn(ids.user, text), ids.im_start, ids.assistant, ids.newline]
        return Exchange(prompt, [*text, ids.im_end])

    def batches(self, positions: int) -> list[Batch]:
        """Some exchanges, sorted by length into batches of about `positions` positions."""
        batches: list[list[Exchange]] = [[]]
        exchanges = [self.exchange() for _ in range(400)]
        for exchange in sorted(exchanges, key=lambda each: each.length):
            if batches[-1] and exchange.length * (len(batches[-1]) + 1) > positions:
                batches.append([])
            batches[-1].append(exchange)
        self._rng.shuffle(batches)
        return [_batch(exchanges) for exchanges in batches]

    def _text(self) -> list[int]:
        rng = self._rng
        kind = rng.random()
        if kind < 0.7:
            text = rng.choice(self._lines)
        elif kind < 0.9:
            text = " ".join(rng.choice(self._lines) for _ in range(rng.randint(2, 4)))
        else:
            text = " ".join(
                "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 7)))
                for _ in range(rng.randint(1, 8))
            )
        if rng.random() < 0.1:
            text = text.lower().rstrip(".?!")
        if rng.random() < 0.06:
            text = text.upper()
        if rng.random() < 0.08:
            text = " ".join(text.split()[: rng.randint(1, 2)])
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids


def _batch(exchanges: list[Exchange]) -> Batch:
    shape = (len(exchanges), max(exchange.length for exchange in exchanges))
    tokens = torch.zeros(shape, dtype=torch.long)
    target = torch.full(shape, _IGNORED)
    source = torch.full(shape, -1)
    for row, exchange in enumerate(exchanges):
        start, end = len(exchange.prompt), exchange.length
        tokens[row, :end] = torch.tensor(exchange.prompt + exchange.answer)
        target[row, start - 1 : end - 1] = torch.tensor(exchange.answer)
        # The question ends five tokens before the answer begins: its end, a line break, and the
        # assistant's header of three. The copied end is the question's end.
        question = start - 5 - (len(exchange.answer) - 1)
        source[row, start - 1 : end - 1] = torch.arange(question, start - 4)
    return Batch(tokens, target, source)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--peak", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--positions", type=int, default=2600, help="positions in a batch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workspace = open_workspace(options)
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    text_embedding = load(workspace.talker)["model"]["text_embedding.weight"]
    lines = workspace.corpus.read_text().splitlines()

    model = TextModel(tokenizer, text_embedding)
    model.init(options.seed)
    muon = Muon(model.matrices())
    adamw = torch.optim.AdamW(model.others(), betas=(0.9, 0.98), weight_decay=0.0)
    cosine = Cosine(options.peak, options.steps)
    optimizers = {"muon": muon, "adamw": adamw}
    run = TrainingRun(workspace.thinker, "thinker", model, optimizers, cosine)
    conversations = Conversations(lines, tokenizer, options.seed + run.step)
    queue: list[Batch] = []
    while not run.is_done:
        queue = queue or conversations.batches(options.positions)
        batch = queue.pop()
        with torch.autocast("cpu", torch.bfloat16):
            logits, balance, guidance = model(batch)
        row, position = (batch.target >= 0).nonzero(as_tuple=True)
        logits, target = logits[row, position].float(), batch.target[row, position]
        loss = F.cross_entropy(logits, target)
        (loss + 0.01 * balance + 0.5 * guidance).backward()
        right = (logits.argmax(-1) == target).numpy()
        whole = ~np.isin(np.arange(len(batch.tokens)), row.numpy()[~right])
        run.finish_step(
            {
                "loss": loss.item(),
                "guidance": guidance.item(),
                "right": right.mean(),
                "whole answers": whole.mean(),
            }
        )


if __name__ == "__main__":
    main()
