"""Which settings are in force, and where each of them came from.

    bundled profile (by model_type) < checkpoint's generation_config.json < deployment file < flags

Each layer is a tree of plain values; stages and connectors are merged by name. The merged tree is
then read strictly: an unknown key is refused with its path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from stretto.config.deployment import PipelineConfig
from stretto.errors import ConfigError

Tree = dict[str, Any]


class Layer(msgspec.Struct, frozen=True):
    """Settings from one place; `source` is how that place is shown to a person."""

    source: str
    tree: Tree


class Resolved(msgspec.Struct, frozen=True):
    config: PipelineConfig
    # Dotted path of each value that a layer set, and the layer it came from.
    sources: dict[str, str]


def bundled_profile(model_type: str) -> Layer:
    """The profile that ships for a kind of model.

    Raises:
        ConfigError: there is none for `model_type`.
    """
    profiles = resources.files("stretto.config") / "profiles"
    known = sorted(
        item.name.removesuffix(".yaml")
        for item in profiles.iterdir()
        if item.name.endswith(".yaml")
    )
    if model_type not in known:
        raise ConfigError(
            f"no profile for model_type {model_type!r}; supported are {', '.join(known)}"
        )
    return _parse((profiles / f"{model_type}.yaml").read_bytes(), f"profile {model_type}")


def deployment_file(path: Path) -> Layer:
    """A deployment file as a layer.

    Raises:
        ConfigError: it cannot be read, or is not a YAML mapping.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return _parse(text, str(path))


def resolve(*layers: Layer) -> Resolved:
    """The layers merged, later ones first in rank, and read strictly.

    Raises:
        ConfigError: names the file, the path and what is allowed there.
    """
    merged: Tree = {}
    sources: dict[str, str] = {}
    for layer in layers:
        tree = _normalized(layer.tree, layer.source)
        _merge(merged, tree, path="", source=layer.source, sources=sources)
    tree = {**merged}
    for key in ("stages", "connectors"):
        if key in tree:
            tree[key] = list(tree[key].values())
    try:
        return Resolved(msgspec.convert(tree, PipelineConfig), sources)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), merged, layers)) from error


def effective_values(resolved: Resolved) -> list[tuple[str, Any, str]]:
    """(dotted path, value, source) of every setting in force, in the order of the structs."""
    tree = msgspec.to_builtins(resolved.config)
    for key, identity in (("stages", _stage_name), ("connectors", _edge_name)):
        tree[key] = {identity(item): item for item in tree[key]}
    return [
        (path, value, resolved.sources.get(path, "default")) for path, value in _leaves(tree, "")
    ]


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for key, value in tree.items():
        if key not in ("from_stage", "to_stage"):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _parse(text: bytes, source: str) -> Layer:
    try:
        tree = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping of settings, found {type(tree).__name__}")
    for key in ("stages", "connectors"):
        if not isinstance(tree.get(key, []), list):
            raise ConfigError(f"{source}: {key}: expected a list of mappings")
    return Layer(source, _normalized(tree, source))


class _UniqueKeys(yaml.SafeLoader):
    """YAML's usual reader keeps the last of equal keys and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value} stands there twice", key_node.start_mark
                )
            seen.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _normalized(tree: Tree, source: str) -> Tree:
    """The tree with its lists of stages and connectors as mappings by name."""
    normal = {**tree}
    for key, identity in (("stages", _stage_name), ("connectors", _edge_name)):
        if key in normal:
            normal[key] = _keyed(normal[key], identity, f"{source}: {key}")
    return normal


def _keyed(items: Any, identity: Any, where: str) -> Tree:
    """A list of mappings as a mapping by identity, so that layers can be merged."""
    if isinstance(items, dict) and all(isinstance(item, dict) for item in items.values()):
        return items
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{where}: expected a list of mappings")
    keyed: Tree = {}
    for item in items:
        name = identity(item)
        if name is None:
            raise ConfigError(f"{where}: an entry does not say which one it is: {item}")
        if name in keyed:
            raise ConfigError(f"{where}: {name} stands there twice")
        keyed[name] = item
    return keyed


def _stage_name(item: Mapping[str, Any]) -> str | None:
    name = item.get("name")
    return None if name is None else str(name)


def _edge_name(item: Mapping[str, Any]) -> str | None:
    if "from_stage" not in item or "to_stage" not in item:
        return None
    return f"{item['from_stage']}->{item['to_stage']}"


def _merge(into: Tree, tree: Tree, *, path: str, source: str, sources: dict[str, str]) -> None:
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value, path=where, source=source, sources=sources)
        else:
            into[key] = value
            sources[where] = source


def _explain(message: str, merged: Tree, layers: tuple[Layer, ...]) -> str:
    """The strict reader's message, with the layer at fault and the nearest key that exists."""
    for key in ("stages", "connectors"):
        for index, name in enumerate(merged.get(key, {})):
            message = message.replace(f"$.{key}[{index}]", f"$.{key}[{name}]")
    head = layers[-1].source if len(layers) == 1 else " + ".join(layer.source for layer in layers)
    if "unknown field `" not in message:
        return f"{head}: {message}"
    unknown = message.split("unknown field `")[1].split("`")[0]
    for layer in layers:
        if _contains_key(layer.tree, unknown):
            head = layer.source
    near = difflib.get_close_matches(unknown, _known_keys(), n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"{head}: {message}{hint}"


def _contains_key(tree: Any, key: str) -> bool:
    if not isinstance(tree, dict):
        return False
    return key in tree or any(_contains_key(value, key) for value in tree.values())


def _known_keys() -> list[str]:
    from stretto.config import deployment

    structs = (
        deployment.PipelineConfig,
        deployment.StageConfig,
        deployment.EdgeConfig,
        deployment.ConnectorSpec,
        deployment.CodecChunkConfig,
    )
    return sorted({field for struct in structs for field in struct.__struct_fields__})
