"""Models of shapes that no checkpoint has, saved as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from stretto.models.weights import Checkpoint, ParameterSource

CPU = torch.device("cpu")
# Of the Talkers that tests load.
MAX_ROWS = 6
T = TypeVar("T")


def load(
    directory: Path, loader: Callable[[ParameterSource], T], dtype: torch.dtype = torch.float32
) -> T:
    return Checkpoint(directory, dtype=dtype, device=CPU).load(loader)


def scatter(model: nn.Module, seed: int) -> None:
    """Weights that keep activations at about one, so that every part of the model shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                mean = 0.0 if name.endswith(("bias", "alpha", "beta")) else 1.0
                parameter.normal_(mean, 0.2, generator=generator)
            else:
                fan_in = 1 if "embed" in name else parameter[0].numel()
                if parameter.ndim == 3 and "experts" in name:
                    fan_in = parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)


def save_as(directory: Path, model: nn.Module, prefix: str) -> None:
    """The model's tensors in a checkpoint, under a prefix."""
    state = model.state_dict()
    save_file(
        {f"{prefix}{name}": tensor.contiguous().clone() for name, tensor in state.items()},
        directory / "model.safetensors",
    )
