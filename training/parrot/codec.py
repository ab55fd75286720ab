"""Step 4: the codec, 16 codes of 256 per 80 ms frame.

A frame's features (8 columns of 64 log-mels and 3 voicings) are projected to 240 principal
components and quantised in 16 stages, each by k-means on what the stages before it left over.
Code 0 is the coarse sound, the last ones are detail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.parrot.espeak import Espeak
from training.parrot.speech import speak_on_grid
from training.parrot.workspace import argument_parser, load, open_workspace, save

CODEBOOK_SIZE = 256
NUM_CODEBOOKS = 16
# Fewer cost bursts: they are a small part of the variance, and differ in where they lie.
NUM_COMPONENTS = 240

# 10 log10 of a power, from its natural logarithm.
DECIBELS = 4.343


@dataclass(frozen=True)
class Codec:
    """`mean` [FRAME_FEATURES], `projection` [FRAME_FEATURES, 240], `centroids` [16, 256, 240]."""

    mean: torch.Tensor
    projection: torch.Tensor
    centroids: torch.Tensor

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Codes int64 [frames, 16] of features [frames, FRAME_FEATURES]."""
        residual = (features - self.mean) @ self.projection
        codes = []
        for centroids in self.centroids:
            nearest = _nearest(residual, centroids)
            residual = residual - centroids[nearest]
            codes.append(nearest)
        return torch.stack(codes, 1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Features [frames, FRAME_FEATURES] of codes [frames, up to 16]."""
        stages = enumerate(self.centroids[: codes.shape[1]])
        components = torch.stack([centroids[codes[:, stage]] for stage, centroids in stages])
        return components.sum(0) @ self.projection.T + self.mean


def load_codec(path: Path) -> Codec:
    content = load(path)
    return Codec(*(content[name].float() for name in ("mean", "projection", "centroids")))


def fit_codec(
    features: torch.Tensor, *, max_frames: int = 70_000, start: Codec | None = None
) -> Codec:
    """A codec for features [frames, FRAME_FEATURES], fitted on a random sample of them.

    Its code 0 means what that of `start` means, by and large.
    """
    sample = features[torch.randperm(len(features))[:max_frames]].float()
    mean = sample.mean(0)
    centred = sample - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred / len(sample))
    projection = vectors.flip(1)[:, :NUM_COMPONENTS].contiguous()
    residual = centred @ projection
    variance = centred.pow(2).sum(1).mean()
    dropped = variance - residual.pow(2).sum(1).mean()
    stages = []
    for stage in range(NUM_CODEBOOKS):
        if stage == 0 and start is not None:
            coarse = (start.centroids[0] @ start.projection.T + start.mean - mean) @ projection
            centroids, nearest = k_means(residual, coarse, rounds=3)
        else:
            some = residual[torch.randperm(len(residual))[:CODEBOOK_SIZE]]
            centroids, nearest = k_means(residual, some, rounds=30 if stage == 0 else 15)
        residual = residual - centroids[nearest]
        stages.append(centroids)
        left = residual.pow(2).sum(1).mean() + dropped
        error_db = float((left / sample.shape[1]).sqrt()) * DECIBELS
        print(f"stage {stage:2}: {left / variance:.4f} left, {error_db:.2f} dB", flush=True)
    return Codec(mean, projection, torch.stack(stages))


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
    parser.add_argument("--lines", type=int, default=3000, help="corpus lines it is fitted on")
    parser.add_argument(
        "--start", type=Path, default=None, help="a codec whose code 0 keeps its meaning"
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
    save(workspace.codec, mean=codec.mean, projection=codec.projection, centroids=codec.centroids)


if __name__ == "__main__":
    main()
