"""From a model's name to the directory and the settings that it is to be served with.

    name ─> checkpoint directory ─> profile, generation_config.json, deployment file, flags ─> Model

No weight is read here, and nothing heavy imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.config.deployment import PipelineConfig
from stretto.config.resolve import Layer, Resolved, bundled_profile, deployment_file, resolve
from stretto.errors import CheckpointError
from stretto.models.tiny import CACHED_CHECKPOINTS, cached_checkpoint

PARROT = "parrot"

# Names in generation_config.json and ours.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class _Settings(msgspec.Struct, frozen=True):
    """Where settings of one stage stand in generation_config.json, and where they go."""

    stage: str
    prefixes: tuple[str, ...]
    # The name of the switch between greedy and drawn, behind the prefix.
    switch: str = "do_sample"
    target: str = "default_sampling"


GENERATION_SETTINGS = {
    "qwen3_omni_moe": (
        _Settings("thinker", ("", "thinker_")),
        _Settings("talker", ("talker_",)),
    ),
    "qwen3_tts": (
        _Settings("talker", ("",)),
        _Settings("talker", ("subtalker_",), switch="dosample", target="residual_sampling"),
    ),
}


def model_directory(model: str, cache_dir: Path) -> Path:
    """The checkpoint directory behind a name.

    `parrot` ships with the package, `tiny` and `small` are made on first use in `cache_dir`,
    anything else is a path.

    Raises:
        CheckpointError: there is no such directory, or it is no checkpoint.
    """
    if model == PARROT:
        from stretto import models

        return Path(models.__path__[0]) / PARROT
    if model in CACHED_CHECKPOINTS:
        return cached_checkpoint(model, cache_dir=cache_dir)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{model}: not a directory with a config.json; a model is a checkpoint directory, or "
            f"one of {', '.join((PARROT, *CACHED_CHECKPOINTS))} (models are never downloaded)"
        )
    return directory


class Model(msgspec.Struct, frozen=True):
    """A checkpoint directory as far as it is read before any weight: files, config, defaults."""

    name: str
    model_type: str
    directory: Path
    resolved: Resolved

    @property
    def config(self) -> PipelineConfig:
        return self.resolved.config


def open_model(
    model: str, *, cache_dir: Path, deploy_config: Path | None, flags: Mapping[str, Any]
) -> Model:
    """The model and the settings it is to be served with.

    Raises:
        CheckpointError, ConfigError: see there.
    """
    directory = model_directory(model, cache_dir)
    config_file = directory / "config.json"
    model_type = read_json(config_file).get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{config_file}: no model_type")
    layers = [bundled_profile(model_type), _generation_defaults(model_type, directory)]
    if deploy_config is not None:
        layers.append(deployment_file(deploy_config))
    layers.append(Layer("flags", dict(flags)))
    return Model(Path(model).name, model_type, directory, resolve(*layers))


def _generation_defaults(model_type: str, directory: Path) -> Layer:
    """generation_config.json as settings of the stages."""
    path = directory / "generation_config.json"
    given = read_json(path)
    stages: dict[str, Any] = {}
    for settings in GENERATION_SETTINGS[model_type]:
        sampling: dict[str, Any] = {}
        for prefix in settings.prefixes:
            for theirs, ours in GENERATION_FIELDS.items():
                if given.get(prefix + theirs) is not None:
                    sampling[ours] = given[prefix + theirs]
            drawn = given.get(f"{prefix}{settings.switch}")
            if drawn is False:
                sampling["temperature"] = 0.0
            elif drawn is True:
                sampling.setdefault("temperature", 1.0)
        if sampling:
            stages.setdefault(settings.stage, {})[settings.target] = sampling
    return Layer(f"{directory.name}/{path.name}", {"stages": stages} if stages else {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object")
    return content
