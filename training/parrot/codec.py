"""Step 4: the codec, 16 codes of 256 per 80 ms frame.

A frame's features (8 columns of 64 log-mels and 3 voicings) are projected to 240 principal
components and quantised in 15 stages, each by k-means on what the stages before it left over; then
the stages are fitted anew to the codes that are chosen together. Code 0 is the coarse sound, the
later ones are detail. The last code of a frame is its melody, which needs no fitting.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.parrot.espeak import Espeak
from training.parrot.speech import (
    NUM_BANDS,
    NUM_MELS,
    VOICING_WEIGHT,
    GridSpeech,
    speak_on_grid,
)
from training.parrot.workspace import argument_parser, load, open_workspace, save

CODEBOOK_SIZE = 256
NUM_CODEBOOKS = 16
# All but the melody's.
NUM_STAGES = NUM_CODEBOOKS - 1
# Fewer cost bursts: they are a small part of the variance, and differ in where they lie.
NUM_COMPONENTS = 240

# So many beginnings of a frame's codes are kept while its next code is chosen.
_BEGINNINGS = 4
_BLOCK_FRAMES = 1000
# What a centroid was counts as so many frames when it moves.
_INERTIA_FRAMES = 3

# 10 log10 of a power, from its natural logarithm.
DECIBELS = 4.343


@dataclass(frozen=True)
class Codec:
    """`mean` [FRAME_FEATURES], `projection` [FRAME_FEATURES, 240], `centroids` [15, 256, 240]."""

    mean: torch.Tensor
    projection: torch.Tensor
    centroids: torch.Tensor

    def codes_of(self, speech: GridSpeech) -> torch.Tensor:
        """Codes int64 [frames, 16] of a whole utterance."""
        sound = self.encode(torch.from_numpy(speech.features))
        return torch.cat([sound, torch.from_numpy(speech.melodies).long()[:, None]], 1)

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Codes int64 [frames, 15] of features [frames, FRAME_FEATURES]."""
        return chosen_codes((features - self.mean) @ self.projection, self.centroids)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Features [frames, FRAME_FEATURES] of codes [frames, up to 15]."""
        stages = enumerate(self.centroids[: codes.shape[1]])
        components = torch.stack([centroids[codes[:, stage]] for stage, centroids in stages])
        return components.sum(0) @ self.projection.T + self.mean


def save_codec(path: Path, codec: Codec) -> None:
    save(
        path,
        mean=codec.mean,
        projection=codec.projection,
        centroids=codec.centroids,
        voicing_weight=VOICING_WEIGHT,
    )


def load_codec(path: Path) -> Codec:
    """Raises ValueError if it is a codec of other features or of other codes."""
    content = load(path)
    codec = Codec(*(content[name].float() for name in ("mean", "projection", "centroids")))
    made_for = (content["voicing_weight"], len(codec.centroids))
    if made_for != (VOICING_WEIGHT, NUM_STAGES):
        raise ValueError(
            f"{path}: voicing weight and stages are {made_for}, "
            f"must be {(VOICING_WEIGHT, NUM_STAGES)}: delete it, and `codec` fits it anew"
        )
    return codec


def fit_codec(
    features: torch.Tensor,
    *,
    max_frames: int = 150_000,
    rounds: int = 8,
    start: Codec | None = None,
) -> Codec:
    """A codec for features [frames, FRAME_FEATURES], fitted on a random sample of them.

    Its codes mean what those of `start` mean, by and large. `rounds` of choosing all codes and
    moving all centroids follow.
    """
    sample = features[torch.randperm(len(features))[:max_frames]].float()
    mean = sample.mean(0)
    centred = sample - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred / len(sample))
    projection = vectors.flip(1)[:, :NUM_COMPONENTS].contiguous()
    components = centred @ projection
    if start is None:
        centroids = _fitted_in_stages(components)
    else:
        centroids = start.centroids @ (start.projection.T @ projection)
        centroids[0] += (start.mean - mean) @ projection
    variance = centred.pow(2).sum(1).mean()
    dropped = variance - components.pow(2).sum(1).mean()
    for index in range(rounds):
        codes = chosen_codes(components, centroids)
        residual = move_centroids(components, codes, centroids)
        left = residual.pow(2).sum(1).mean() + dropped
        print(f"round {index}: {left / variance:.4f} of the variance left", flush=True)
    codec = Codec(mean, projection, centroids)
    wrong = (codec.decode(codec.encode(sample)) - sample).view(-1, NUM_MELS + NUM_BANDS)
    error_db = float(wrong[:, :NUM_MELS].pow(2).mean().sqrt()) * DECIBELS
    voicing = float(wrong[:, NUM_MELS:].pow(2).mean().sqrt()) / VOICING_WEIGHT
    print(f"mels wrong by {error_db:.2f} dB, voicing by {voicing:.3f}", flush=True)
    return codec


def _fitted_in_stages(components: torch.Tensor) -> torch.Tensor:
    """Centroids [15, 256, d]: each stage fits what the one before it left of [frames, d]."""
    stages = []
    for stage in range(NUM_STAGES):
        some = components[torch.randperm(len(components))[:CODEBOOK_SIZE]]
        centroids, nearest = k_means(components, some, rounds=30 if stage == 0 else 15)
        components = components - centroids[nearest]
        stages.append(centroids)
    return torch.stack(stages)


def chosen_codes(components: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Codes int64 [frames, 15] whose centroids [15, 256, d] sum to nearly [frames, d].

    A beam search, except that code 0 is the nearest: the Talker is to find one name for a sound.
    """
    starts = range(0, len(components), _BLOCK_FRAMES)
    blocks = [components[start : start + _BLOCK_FRAMES] for start in starts]
    return torch.cat([_block_codes(block, centroids) for block in blocks])


def _block_codes(components: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    nearest = _nearest(components, centroids[0])
    codes = nearest[:, None, None]
    residual = (components - centroids[0][nearest])[:, None]
    for stage in centroids[1:]:
        # Squared distances [frames, beginnings, 256].
        costs = residual.pow(2).sum(-1, keepdim=True) - 2 * residual @ stage.T + stage.pow(2).sum(1)
        best = costs.flatten(1).topk(_BEGINNINGS, largest=False).indices
        beginning, code = best // CODEBOOK_SIZE, best % CODEBOOK_SIZE
        row = torch.arange(len(components))[:, None]
        codes = torch.cat([codes[row, beginning], code[..., None]], -1)
        residual = residual[row, beginning] - stage[code]
    # The best comes first.
    return codes[:, 0]


def move_centroids(
    components: torch.Tensor, codes: torch.Tensor, centroids: torch.Tensor, *, sweeps: int = 5
) -> torch.Tensor:
    """Moves centroids [15, 256, d] towards least squares for [frames, d] with codes [frames, 15].

    Returns what is left of the components [frames, d].
    """
    residual = components.clone()
    for stage, code in zip(centroids, codes.T, strict=True):
        residual -= stage[code]
    for _ in range(sweeps):
        for stage, code in zip(centroids, codes.T, strict=True):
            residual += stage[code]
            counts = torch.bincount(code, minlength=CODEBOOK_SIZE)[:, None]
            sums = torch.zeros_like(stage).index_add_(0, code, residual)
            stage.copy_((sums + _INERTIA_FRAMES * stage) / (counts + _INERTIA_FRAMES))
            residual -= stage[code]
    return residual


def k_means(
    points: torch.Tensor, centroids: torch.Tensor, *, rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centroids [256, d] after `rounds` from `centroids`, and each point's nearest [n].

    Starved ones start again far out.
    """
    for round_index in range(rounds):
        nearest = _nearest(points, centroids)
        counts = torch.bincount(nearest, minlength=CODEBOOK_SIZE).float()
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        means = sums / counts[:, None].clamp(min=1)
        centroids = torch.where(counts[:, None] > 0, means, centroids)
        starved = (counts < 3).nonzero().flatten()
        if len(starved) and round_index < rounds - 3:
            distance = ((points - centroids[nearest]) ** 2).sum(1)
            centroids[starved] = points[torch.multinomial(distance, len(starved))]
    return centroids, _nearest(points, centroids)


def _nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    return (-2 * points @ centroids.T + (centroids * centroids).sum(1)).argmin(1)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--lines", type=int, default=4500, help="corpus lines it is fitted on")
    parser.add_argument(
        "--start", type=Path, default=None, help="a codec whose codes keep their meaning"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workspace = open_workspace(options)
    torch.manual_seed(options.seed)
    espeak = Espeak()
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    lines = workspace.corpus.read_text().splitlines()[: options.lines]
    spoken = [speak_on_grid(espeak, tokenizer, line) for line in lines]
    features = [torch.from_numpy(s.features) for s in spoken if s is not None]
    print(f"{len(features)} of {len(lines)} lines, {sum(map(len, features))} frames", flush=True)
    start = None if options.start is None else load_codec(options.start)
    codec = fit_codec(torch.cat(features), start=start)
    save_codec(workspace.codec, codec)


if __name__ == "__main__":
    main()
