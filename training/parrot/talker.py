"""Step 6: the Talker and its code predictor, from text tokens to codec frames.

Teacher-forced, with inputs exactly as transformers' `generate` builds them:

    text    user's turn <|im_start|> assistant \\n  pad x4  bos  t0  t1 ...  tn  eos  pad pad
    codec                                          4 tags  pad bos  f0 ...
    target                                                     c0  c1 ...              end

where f is the sum of a frame's 16 code embeddings and t(n) stands with the frame before its own
by `DELAY_FRAMES`. Some frames of the history are exchanged for others, so that the model learns
to trust the text when its own past is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from training.parrot import architecture
from training.parrot.architecture import HIDDEN, SPEAKERS, TextIds, parrot_config, text_vocabulary
from training.parrot.codec import CODEBOOK_SIZE, NUM_CODEBOOKS, NUM_STAGES, Codec, load_codec
from training.parrot.layers import dense_decoder, init_linears, moe_decoder
from training.parrot.optimisation import Cosine, Muon, TrainingRun, all_but
from training.parrot.synthesis import Utterance, load_utterances
from training.parrot.vocabulary import SPACE, in_capitals
from training.parrot.workspace import argument_parser, open_workspace

modeling: Any = modeling_qwen3_omni_moe

# Steps after which the text embeddings stand still, and the Thinker can be trained.
EMBEDDINGS_UNTIL = 1400
_IGNORED = -100
# Codes 1 to 5 decide what is understood (README); the later ones are detail that nobody misses, but
# the last is the melody.
_REST_WEIGHTS = torch.cat(
    [torch.ones(5), torch.linspace(0.6, 0.2, NUM_STAGES - 6), torch.tensor([0.6])]
)
_CONTROL_CODES = (
    architecture.CODEC_NOTHINK,
    architecture.CODEC_THINK_BOS,
    architecture.CODEC_THINK_EOS,
)
# Behind the user's turn: the assistant's header, then pads and bos; the codec's tags end with it.
_HEADER_TOKENS = 3
_PROMPT_TOKENS = 9


@dataclass(frozen=True)
class Line:
    """One thing to say: what the user wrote, the answer's tokens and its frames, a speaker."""

    user: list[int]
    token_ids: np.ndarray
    codes: np.ndarray
    speaker: int

    @property
    def prompt_length(self) -> int:
        return len(self.user) + _PROMPT_TOKENS

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.codes)


@dataclass(frozen=True)
class Batch:
    """Right-padded lines. text [b, n]; control [b, n] codec tags or -1; frames [b, n, 16] or -1.

    target [b, n]: code 0 that comes next, or the end, or `_IGNORED`.
    """

    text: Tensor
    control: Tensor
    frames: Tensor
    target: Tensor


@dataclass(frozen=True)
class Losses:
    """first: code 0 and the end; rest [15]: the predictor's codes; balance of the experts."""

    first: Tensor
    rest: Tensor
    balance: Tensor
    first_accuracy: Tensor
    second_accuracy: Tensor

    def total(self) -> Tensor:
        rest = (self.rest * _REST_WEIGHTS).sum() / _REST_WEIGHTS.sum()
        return self.first + rest + 0.01 * self.balance


class SpeechModel(nn.Module):
    """The Talker together with the text embeddings that it shares with the Thinker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        config = parrot_config(tokenizer).talker_config
        self.talker: Any = modeling.Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config)
        self.text_embedding = nn.Embedding(text_vocabulary(tokenizer), HIDDEN)
        self._moe_decoder: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = moe_decoder
        self._dense_decoder: Callable[[Any, Tensor], Tensor] = dense_decoder

    def compile_decoders(self) -> None:
        """Halves a training step; the first few steps take minutes for it."""
        self._moe_decoder = torch.compile(moe_decoder, dynamic=True)
        self._dense_decoder = torch.compile(dense_decoder, dynamic=True)

    def init(self, tokenizer: Tokenizer, codec: Codec, seed: int) -> None:
        """Start from what is known: spellings for the text, centroids for the codes."""
        generator = torch.Generator().manual_seed(seed)
        talker = self.talker
        init_linears(talker, generator)
        self.text_embedding.weight.data = spelling_embeddings(
            tokenizer, len(self.text_embedding.weight), generator
        )
        basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator))[0]
        centroids = codec.centroids @ basis[: codec.centroids.shape[-1]]
        centroids = centroids / (centroids[0].pow(2).sum(1).mean() / HIDDEN).sqrt()
        talker.model.codec_embedding.weight.data.normal_(0, 0.7, generator=generator)
        talker.model.codec_embedding.weight.data[:CODEBOOK_SIZE] = centroids[0]
        predictor = talker.code_predictor
        *stages, melodies = predictor.model.codec_embedding
        for embedding, rows in zip(stages, centroids[1:], strict=True):
            embedding.weight.data = rows.clone()
        melodies.weight.data.normal_(0, 0.3, generator=generator)
        for layer in talker.model.layers:
            layer.mlp.experts.down_proj.data.mul_(0.5)
            layer.mlp.shared_expert.down_proj.weight.data.mul_(0.5)
            layer.self_attn.o_proj.weight.data.mul_(0.5)
        for layer in predictor.model.layers:
            layer.mlp.down_proj.weight.data.mul_(0.5)
            layer.self_attn.o_proj.weight.data.mul_(0.5)
        for head in (talker.codec_head, *predictor.lm_head):
            head.weight.data.mul_(0.3)

    def matrices(self) -> list[Tensor]:
        """What Muon trains: the weights inside the layers."""
        return [
            weight
            for name, weight in self.talker.named_parameters()
            if weight.dim() >= 2
            and ("layers." in name or name.startswith("text_projection"))
            and "gate.weight" not in name
        ]

    def others(self) -> list[Tensor]:
        """What AdamW trains. `hidden_projection` is for pictures and sound, never used here."""
        trained = (w for name, w in self.named_parameters() if "hidden_projection" not in name)
        return all_but(trained, self.matrices())

    def embed(self, text: Tensor, control: Tensor, frames: Tensor) -> Tensor:
        """The Talker's inputs [b, n, HIDDEN] of a batch's three streams."""
        talker = self.talker
        hidden = F.embedding(text, talker.text_projection(self.text_embedding.weight))
        codec_embedding = talker.model.codec_embedding.weight
        tags = F.embedding(control.clamp(min=0), codec_embedding)
        hidden = hidden + torch.where((control >= 0)[..., None], tags, torch.zeros(()))
        row, position = (frames[..., 0] >= 0).nonzero(as_tuple=True)
        rest = [embedding.weight for embedding in talker.code_predictor.model.codec_embedding]
        table = torch.cat([codec_embedding[:CODEBOOK_SIZE], *rest])
        offsets = torch.arange(NUM_CODEBOOKS) * CODEBOOK_SIZE
        summed = F.embedding_bag(frames[row, position] + offsets, table, mode="sum")
        return hidden.index_put((row, position), summed.to(hidden.dtype), accumulate=True)

    def predict_rest(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """The predictor's logits [m, 15, 256] for true codes [m, 16] behind hidden [m, HIDDEN]."""
        predictor = self.talker.code_predictor
        inputs = [hidden, F.embedding(codes[:, 0], self.talker.model.codec_embedding.weight)]
        embeddings = list(predictor.model.codec_embedding)[: NUM_CODEBOOKS - 2]
        inputs += [embedding(codes[:, i]) for i, embedding in enumerate(embeddings, 1)]
        out = self._dense_decoder(predictor.model, torch.stack(inputs, 1))[:, 1:]
        heads = torch.stack([head.weight for head in predictor.lm_head])
        return torch.einsum("mkd,kvd->mkv", out, heads)

    def losses(
        self, batch: Batch, *, predicted_frames: int, corrupted: float, rng: torch.Generator
    ) -> Losses:
        """`predicted_frames` of them train the predictor; a share of history is `corrupted`."""
        frames = batch.frames
        if corrupted:
            frames = frames.clone()
            row, position = (frames[..., 0] >= 0).nonzero(as_tuple=True)
            wrong = torch.rand(len(row), generator=rng) < corrupted
            other = torch.randint(len(row), (int(wrong.sum()),), generator=rng)
            frames[row[wrong], position[wrong]] = batch.frames[row[other], position[other]]
        hidden, balance = self._moe_decoder(
            self.talker.model, self.embed(batch.text, batch.control, frames)
        )
        row, position = (batch.target >= 0).nonzero(as_tuple=True)
        hidden, target = hidden[row, position], batch.target[row, position]
        logits = self.talker.codec_head(hidden).float()
        is_frame = (target < CODEBOOK_SIZE).nonzero().flatten()
        chosen = is_frame[torch.randperm(len(is_frame), generator=rng)[:predicted_frames]]
        codes = batch.frames[row[chosen], position[chosen] + 1]
        rest = self.predict_rest(hidden[chosen], codes).float()
        rest_loss = F.cross_entropy(
            rest.reshape(-1, CODEBOOK_SIZE), codes[:, 1:].reshape(-1), reduction="none"
        ).view(-1, NUM_CODEBOOKS - 1)
        return Losses(
            first=F.cross_entropy(logits, target),
            rest=rest_loss.mean(0),
            balance=balance,
            first_accuracy=(logits.argmax(-1) == target).float().mean(),
            second_accuracy=(rest[:, 0].argmax(-1) == codes[:, 1]).float().mean(),
        )


def spelling_embeddings(tokenizer: Tokenizer, rows: int, generator: torch.Generator) -> Tensor:
    """One vector a token: tokens that are spelled alike start alike."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    by_place, anywhere = noise(8, 128, HIDDEN), noise(128, HIDDEN)
    space, capital = noise(HIDDEN), noise(HIDDEN)
    table = noise(rows, HIDDEN)
    for token, index in tokenizer.get_vocab().items():
        spelling = token.lstrip(SPACE)
        is_spelling = spelling.replace("'", "").isalpha() and spelling.isascii()
        if not is_spelling or len(spelling) > 6:
            continue
        letters = [ord(letter) for letter in spelling.lower()]
        vector = sum(by_place[i, letter] for i, letter in enumerate(letters))
        vector = vector + 0.7 * anywhere[letters].sum(0) + 0.7 * anywhere[letters[-1]]
        vector = vector / vector.pow(2).mean().sqrt()
        if token.startswith(SPACE):
            vector = vector + 0.5 * space
        if spelling[0].isupper():
            vector = vector + 0.3 * capital
        table[index] = vector + 0.08 * noise(HIDDEN)
    return table


class Script:
    """Turns utterances into batches of lines: who said what before, and in which spelling."""

    def __init__(self, utterances: list[Utterance], tokenizer: Tokenizer, seed: int) -> None:
        self._utterances = utterances
        self._ids = TextIds.of(tokenizer)
        capitals = in_capitals(tokenizer)
        self._capitals = np.arange(tokenizer.get_vocab_size())
        for token, capital in capitals.items():
            self._capitals[token] = capital
        self._rng = random.Random(seed)

    def line(self, utterance: Utterance) -> Line:
        """Usually the user wrote what is to be said; sometimes something else, or more."""
        rng, ids = self._rng, utterance.token_ids
        if rng.random() < 0.04:
            ids = self._capitals[ids]
        kind = rng.random()
        if kind < 0.6:
            written = ids
        elif kind < 0.8:
            written = self._other()[: rng.randint(1, 30)]
        else:
            written = self._other()[: rng.randint(0, 6)]
        user = self._ids.turn(self._ids.user, written.tolist())
        if rng.random() < 0.1:
            user = self._ids.turn(self._ids.user, self._other()[:10].tolist()) + user
        speaker = rng.choice(list(SPEAKERS.values()))
        return Line(user, ids, utterance.codes, speaker)

    def plain_line(self, utterance: Utterance) -> Line:
        """As it is when parrot answers: the user wrote it, nothing else is there."""
        user = self._ids.turn(self._ids.user, utterance.token_ids.tolist())
        return Line(user, utterance.token_ids, utterance.codes, SPEAKERS["ethan"])

    def batches(self, positions: int) -> Iterator[list[Line]]:
        """One epoch in random order: lines of like length, about `positions` positions each."""
        lines = sorted(map(self.line, self._utterances), key=lambda line: line.length)
        batches: list[list[Line]] = [[]]
        for line in lines:
            if batches[-1] and line.length * (len(batches[-1]) + 1) > positions:
                batches.append([])
            batches[-1].append(line)
        self._rng.shuffle(batches)
        yield from batches

    def _other(self) -> np.ndarray:
        return self._rng.choice(self._utterances).token_ids

    def batch(self, lines: list[Line]) -> Batch:
        ids = self._ids
        shape = (len(lines), max(line.length for line in lines))
        text = torch.full(shape, ids.tts_pad)
        control = torch.full(shape, -1)
        frames = torch.full((*shape, NUM_CODEBOOKS), -1)
        target = torch.full(shape, _IGNORED)
        for row, line in enumerate(lines):
            start, end = line.prompt_length, line.length
            written = [
                *line.user,
                *(ids.im_start, ids.assistant, ids.newline),
                *[ids.tts_pad] * 4,
                ids.tts_bos,
                *line.token_ids.tolist(),
                ids.tts_eos,
            ]
            text[row, : len(written)] = torch.tensor(written)
            tags = [*_CONTROL_CODES, line.speaker, architecture.CODEC_PAD, architecture.CODEC_BOS]
            control[row, len(line.user) + _HEADER_TOKENS : start] = torch.tensor(tags)
            codes = torch.from_numpy(line.codes.astype(np.int64))
            frames[row, start:end] = codes
            target[row, start - 1 : end - 1] = codes[:, 0]
            target[row, end - 1] = architecture.CODEC_EOS
        return Batch(text, control, frames, target)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--peak", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--positions", type=int, default=2400, help="positions in a batch")
    parser.add_argument("--predicted-frames", type=int, default=320, help="of a batch's frames")
    parser.add_argument(
        "--embeddings-until", type=int, default=EMBEDDINGS_UNTIL, help="steps they are trained"
    )
    parser.add_argument("--stop-at", type=int, default=None, help="leave the schedule early")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workspace = open_workspace(options)
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    utterances = load_utterances(workspace.codes)
    seen_only_by_the_eye, utterances = utterances[:64], utterances[64:]

    model = SpeechModel(tokenizer)
    model.init(tokenizer, load_codec(workspace.codec), options.seed)
    muon = Muon(model.matrices())
    adamw = torch.optim.AdamW(model.others(), betas=(0.9, 0.97), weight_decay=0.0)
    optimizers = {"muon": muon, "adamw": adamw}
    cosine = Cosine(options.peak, options.steps)
    run = TrainingRun(
        workspace.talker, "talker", model, optimizers, cosine, stop_at=options.stop_at
    )
    model.compile_decoders()
    print(f"{len(utterances)} utterances", flush=True)

    while not run.is_done:
        script = Script(utterances, tokenizer, seed=options.seed + run.step)
        chance = random.Random(run.step)
        for lines in script.batches(options.positions):
            if run.is_done:
                break
            model.text_embedding.weight.requires_grad_(run.step < options.embeddings_until)
            generator = torch.Generator().manual_seed(run.step)
            with torch.autocast("cpu", torch.bfloat16):
                losses = model.losses(
                    script.batch(lines),
                    predicted_frames=options.predicted_frames,
                    corrupted=0.12 if chance.random() < 0.7 else 0.0,
                    rng=generator,
                )
            losses.total().backward()  # type: ignore[no-untyped-call]
            was_saved = run.finish_step(
                {
                    "code 0": losses.first.item(),
                    "right": losses.first_accuracy.item(),
                    "code 1": losses.rest[0].item(),
                    "code 4": losses.rest[3].item(),
                    "rest": losses.rest.mean().item(),
                }
            )
            if was_saved:
                heard = unheard(model, script, seen_only_by_the_eye)
                print(f"{run.step}: unheard {heard}", flush=True)


@torch.no_grad()
def unheard(model: SpeechModel, script: Script, utterances: list[Utterance]) -> str:
    """Losses on utterances that are not trained on."""
    batch = script.batch([script.plain_line(utterance) for utterance in utterances])
    generator = torch.Generator().manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        losses = model.losses(batch, predicted_frames=600, corrupted=0.0, rng=generator)
    rest = " ".join(f"{loss:.2f}" for loss in losses.rest.tolist())
    return f"code 0 {losses.first:.3f}, right {losses.first_accuracy:.3f}, rest {rest}"


if __name__ == "__main__":
    main()
