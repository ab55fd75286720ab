"""Random-weight checkpoints of the real architectures, small enough for a laptop and a test.

Such a checkpoint is complete: weights, configs and tokenizer in the published Hugging Face layout.
Whatever can load the real model can load it. It says nothing sensible, but it says it decisively
and for ever: greedy text depends on the prompt, speech on the text, the waveform is audible and not
clipped, and the end tokens are as good as never drawn, so that `max_tokens` decides the length.

This package decides the sizes, the token ids and the spread of the weights. This module is its
door, and keeps what was made:

    cache_dir/
      qwen3-omni-tiny-v2/            published by a rename: whole, or not there
      qwen3-omni-tiny-v2.x7c2/       a process at work on the same
        checkpoint/
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import CheckpointError
from stretto.models.tiny.omni import OMNI_SIZES, write_omni
from stretto.models.tiny.tts import DEFAULT_KIND, KINDS, TTS_SIZES, write_tts

# Part of a cached folder's name: raise it with any change that makes other files than before.
RECIPE_VERSIONS = {"qwen3-omni": 2, "qwen3-tts": 1}


@dataclass(frozen=True)
class Recipe:
    arch: str
    size: str
    # What a Qwen3-TTS checkpoint can do; other architectures have one kind only.
    kind: str | None = None

    @property
    def folder(self) -> str:
        parts = (self.arch, self.size, self.kind, f"v{RECIPE_VERSIONS[self.arch]}")
        return "-".join(part for part in parts if part is not None)


# What `cached_checkpoint` can make, by name.
CACHED_CHECKPOINTS: dict[str, Recipe] = {
    "tiny": Recipe("qwen3-omni", "tiny"),
    "small": Recipe("qwen3-omni", "small"),
    "tiny-tts": Recipe("qwen3-tts", "tiny", "custom_voice"),
    "tiny-tts-design": Recipe("qwen3-tts", "tiny", "voice_design"),
    "tiny-tts-base": Recipe("qwen3-tts", "tiny", "base"),
}


def make_checkpoint(
    directory: Path, *, arch: str, size: str, seed: int, kind: str | None = None
) -> None:
    """Write a checkpoint with weights drawn from `seed` into a new or an empty directory."""
    _check(arch, size, kind)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty; name a new directory or empty this one")
    directory.mkdir(parents=True, exist_ok=True)
    if arch == "qwen3-tts":
        write_tts(directory, size=size, kind=kind or DEFAULT_KIND, seed=seed)
    else:
        write_omni(directory, size=size, seed=seed)


def _check(arch: str, size: str, kind: str | None) -> None:
    if arch not in RECIPE_VERSIONS:
        raise CheckpointError(
            f"unknown architecture {arch!r}; there are: {', '.join(RECIPE_VERSIONS)}"
        )
    is_tts = arch == "qwen3-tts"
    sizes = list(TTS_SIZES if is_tts else OMNI_SIZES)
    if size not in sizes:
        raise CheckpointError(f"unknown size {size!r} of {arch}; there are: {', '.join(sizes)}")
    if kind is not None and kind not in (KINDS if is_tts else ()):
        there = f"there are: {', '.join(KINDS)}" if is_tts else "it has one kind only"
        raise CheckpointError(f"unknown kind {kind!r} of {arch}; {there}")


def cached_checkpoint(name: str, *, cache_dir: Path) -> Path:
    """The checkpoint of this name, made on first use; several processes may ask at once."""
    if name not in CACHED_CHECKPOINTS:
        raise CheckpointError(
            f"unknown checkpoint {name!r}; there are: {', '.join(CACHED_CHECKPOINTS)}"
        )
    recipe = CACHED_CHECKPOINTS[name]
    published = cache_dir / recipe.folder
    if published.is_dir():
        return published
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f"{published.name}.") as scratch:
        unpublished = Path(scratch) / "checkpoint"
        make_checkpoint(unpublished, arch=recipe.arch, size=recipe.size, seed=0, kind=recipe.kind)
        try:
            # The rename publishes: a reader sees the whole checkpoint or none.
            unpublished.rename(published)
        except OSError:
            # A folder with content is never replaced: another process was first with the same.
            if not published.is_dir():
                raise
    return published
