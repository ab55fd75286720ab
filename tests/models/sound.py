"""Vocoders over portions of frames, and what their sound is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.models.code2wav import Code2Wav, Code2WavConfig

TOLERANCE = 1e-4
# Between two ways to decode with the small vocoders, which run in double precision.
EXACT = 1e-6


def some_codes(config: Code2WavConfig, num_frames: int, seed: int = 0) -> Tensor:
    """[frames, codebooks]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_frames, config.num_codebooks)
    return torch.randint(0, config.codebook_size, shape, generator=generator)


def one_shot(reference: Any, codes: Tensor) -> Tensor:
    waveform: Tensor = reference(codes.T[None])[0, 0]
    return waveform


def streamed(model: Code2Wav, codes: Tensor, portions: list[int]) -> Tensor:
    assert sum(portions) == len(codes)
    state = model.open()
    return torch.cat([model.feed([part], [state])[0] for part in torch.split(codes, portions)])


def portions_of(num_frames: int, size: int) -> list[int]:
    full, rest = divmod(num_frames, size)
    return [size] * full + [rest] * (rest > 0)


def assert_same_sound(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert float((got - expected).abs().max()) <= TOLERANCE


def assert_exact(model: Code2Wav, reference: Any, codes: Tensor, got: Tensor) -> None:
    """As the reference's decode, whose norms are single precision; closer to our own."""
    assert_same_sound(got, one_shot(reference, codes))
    (whole,) = model.feed([codes], [model.open()])
    assert float((got - whole).abs().max()) <= EXACT
