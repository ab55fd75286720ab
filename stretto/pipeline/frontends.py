"""Which frontend stands before which kind of model."""

from __future__ import annotations

from pathlib import Path

from stretto.pipeline.frontend import Frontend
from stretto.pipeline.model import Model
from stretto.pipeline.omni_frontend import OmniFrontend
from stretto.pipeline.tts_frontend import TtsFrontend

FRONTENDS: dict[str, type[Frontend]] = {
    "qwen3_omni_moe": OmniFrontend,
    "qwen3_tts": TtsFrontend,
}


def load_frontend(model: Model, *, cache_dir: Path) -> Frontend:
    """The frontend of a model; every profile that ships has one. Raises CheckpointError."""
    return FRONTENDS[model.model_type](model, cache_dir=cache_dir)
