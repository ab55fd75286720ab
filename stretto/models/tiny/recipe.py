"""What all made checkpoints share: sizes of the codec, and how far weights are spread."""

from __future__ import annotations

import hashlib

import torch

# As published.
CODEC_VOCABULARY = 3072
CODEBOOK = 2048
CODE_GROUPS = 16
HEAD_DIM = 64
# An 8,000-token prompt and its answer.
MAX_POSITIONS = 16384

# Logits with this standard deviation make a softmax over some thousand tokens as sharp as that of
# a trained model: about thirty candidates count, and greedy is not decided by rounding.
LOGIT_STD = 3.0
# Greater than 1, so that attention looks at some positions and not at the mean of all: a wrong
# key or position must show in the tokens.
QUERY_KEY_NORM = 2.0
# What a decoder layer adds to its input. With 1 a dozen layers drown the input, and greedy text
# runs in circles.
LAYER_GAIN = 0.5
# A Talker input is the sum of 16 code rows and a text row; the codes together weigh one.
CODEC_EMBEDDING_STD: float = CODE_GROUPS**-0.5
# Code2Wav takes the mean of 16 code rows.
CODE2WAV_EMBEDDING_STD: float = CODE_GROUPS**0.5
# With twelve residual units of this gain the waveform leaves the last but one layer at a standard
# deviation of 2 (1.9 to 2.4 over sizes and seeds) and peaks at four times that.
RESIDUAL_UNIT_GAIN = 0.5
WAVEFORM_GAIN = 0.05


def vector_mean_and_std(path: str, name: str) -> tuple[float, float]:
    """Of a parameter with one axis, called `name` in the module at `path`."""
    if name in ("alpha", "beta"):
        # The logarithms of SnakeBeta's frequency and magnitude.
        return 0.0, 0.3
    if name in ("scale", "gamma"):
        return 0.3, 0.1
    if name == "bias":
        return 0.0, 0.02
    if path.endswith(("q_norm", "k_norm")):
        return QUERY_KEY_NORM, 0.1
    return 1.0, 0.1


def generator(seed: int, name: str) -> torch.Generator:
    """Each parameter has its own, so that one more layer leaves all others as they were."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
