"""Tensors of a checkpoint directory by name, and the check that none is missing or mis-shaped.

A model's loader is one function over a `ParameterSource`. Run over a `Checkpoint` it gets its
tensors; run over `DeclaredParameters` it says which ones it wants, without reading any (and slowly:
meta tensors import half of torch). So the list that is checked and the code that loads cannot
differ. Knows names and shapes; no model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.errors import CheckpointError

Shape = tuple[int, ...]
T = TypeVar("T")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# A wrong directory lacks thousands of tensors; a person reads the first few.
SHOWN_PROBLEMS = 8


class _Index(msgspec.Struct):
    """A safetensors index, as far as it is read."""

    weight_map: dict[str, str]


class ParameterSource(Protocol):
    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`, which must have `shape`."""

    def take_experts(
        self, prefix: str, *, num_experts: int, intermediate: int, hidden: int
    ) -> tuple[Tensor, Tensor]:
        """Gate and up projections [E, 2 I, H] and down projections [E, H, I] of all experts."""


class DeclaredParameters:
    """A source without data: records what a loader asks for and hands out meta tensors."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        # Experts by prefix: their number, intermediate and hidden size.
        self.experts: dict[str, tuple[int, int, int]] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")

    def take_experts(
        self, prefix: str, *, num_experts: int, intermediate: int, hidden: int
    ) -> tuple[Tensor, Tensor]:
        self.experts[prefix] = (num_experts, intermediate, hidden)
        return _stack_experts(self, prefix, num_experts, intermediate, hidden)


class _Unfit(Exception):
    """A tensor is missing or mis-shaped: reason to look which ones are."""


class Checkpoint:
    """The safetensors files of a directory, one file or sharded; nothing is read before `take`."""

    def __init__(self, directory: Path, *, dtype: torch.dtype | None, device: torch.device) -> None:
        """`dtype` None keeps each tensor's own.

        Raises:
            CheckpointError: no safetensors there, or a shard is missing or unreadable.
        """
        self.directory = directory
        self._dtype = dtype
        self._device = device
        # safetensors has no types for its reader.
        self._files: dict[str, Any] = {
            file: _open(directory / file) for file in sorted(set(_shards(directory).values()))
        }
        self._file_of = {
            name: file for file, opened in self._files.items() for name in list(opened.keys())
        }

    def shape(self, name: str) -> Shape | None:
        if name not in self._file_of:
            return None
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def load(self, loader: Callable[[ParameterSource], T]) -> T:
        """What `loader` makes of this checkpoint.

        Raises:
            CheckpointError: names all tensors that are missing or of another shape.
        """
        try:
            return loader(self)
        except _Unfit:
            raise CheckpointError(self._all_problems(loader)) from None

    def _all_problems(self, loader: Callable[[ParameterSource], object]) -> str:
        declared = DeclaredParameters()
        loader(declared)
        shapes = declared.shapes
        for prefix, (number, intermediate, hidden) in declared.experts.items():
            if f"{prefix}.gate_up_proj" in self._file_of:
                shapes = {n: s for n, s in shapes.items() if not n.startswith(f"{prefix}.")}
                shapes[f"{prefix}.gate_up_proj"] = (number, 2 * intermediate, hidden)
                shapes[f"{prefix}.down_proj"] = (number, hidden, intermediate)
        problems = [
            problem
            for name, shape in shapes.items()
            if (problem := self._problem(name, shape)) is not None
        ]
        shown = "\n  ".join(problems[:SHOWN_PROBLEMS])
        more = len(problems) - SHOWN_PROBLEMS
        rest = f"\n  and {more} more" if more > 0 else ""
        return (
            f"{self.directory}: {len(problems)} of {len(shapes)} tensors do not fit the "
            f"model:\n  {shown}{rest}"
        )

    def take(self, name: str, *shape: int) -> Tensor:
        if self.shape(name) != shape:
            raise _Unfit
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype or tensor.dtype)

    def take_experts(
        self, prefix: str, *, num_experts: int, intermediate: int, hidden: int
    ) -> tuple[Tensor, Tensor]:
        if f"{prefix}.gate_up_proj" in self._file_of:
            return (
                self.take(f"{prefix}.gate_up_proj", num_experts, 2 * intermediate, hidden),
                self.take(f"{prefix}.down_proj", num_experts, hidden, intermediate),
            )
        return _stack_experts(self, prefix, num_experts, intermediate, hidden)

    def _problem(self, name: str, shape: Shape) -> str | None:
        found = self.shape(name)
        if found is None:
            return f"{name} {list(shape)} is missing"
        if found != shape:
            return f"{name} is {list(found)}, expected {list(shape)}"
        return None


def _stack_experts(
    source: ParameterSource, prefix: str, num_experts: int, intermediate: int, hidden: int
) -> tuple[Tensor, Tensor]:
    gate_up, down = [], []
    for index in range(num_experts):
        expert = f"{prefix}.{index}"
        gate = source.take(f"{expert}.gate_proj.weight", intermediate, hidden)
        up = source.take(f"{expert}.up_proj.weight", intermediate, hidden)
        gate_up.append(torch.cat((gate, up)))
        down.append(source.take(f"{expert}.down_proj.weight", hidden, intermediate))
    return torch.stack(gate_up), torch.stack(down)


def _shards(directory: Path) -> dict[str, str]:
    """Tensor name (or the file's own, for a single file) to file name."""
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{index}: not a safetensors index: {error}") from error
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: SINGLE_FILE}
    raise CheckpointError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}")


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: a shard that the index names is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error
