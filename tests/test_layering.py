"""Imports go one way, and each part knows no more than it says.

    cli, verify, server, bench
      └─> api ─> pipeline ─> engine ─> bridges, transfer, models ─> events, config, request
                                                                      └─> payloads, text, errors

The edges that there are stand below, one line a part. A new one is a decision, made here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stretto

ROOT = Path(stretto.__file__).parent

# Parts that know nothing of the others.
BASE = {"errors", "payloads", "text", "wire", "audio", "trace", "sentences", "_version"}
EDGES: dict[str, set[str]] = {
    **{part: set() for part in BASE},
    "request": {"errors", "payloads", "text"},
    "events": {"errors", "request"},
    # Defaults of a stage are checked where they are written: as sampling parameters.
    "config": {"errors", "request"},
    "models": {"errors"},
    "transfer": {"payloads", "wire", "trace"},
    "bridges": {"errors", "payloads", "request", "config", "models"},
    "engine": {
        "bridges", "transfer", "models", "events", "payloads", "request", "text", "trace",
    },
    "pipeline": {
        "engine", "bridges", "transfer", "models", "config", "events", "payloads", "request",
        "text", "wire", "errors", "trace",
    },
    "api": {"pipeline", "events", "request", "audio", "errors"},
}  # fmt: skip
# What stands on top may use all that is public below it, and nothing of a stage's inside.
TOP = {"cli", "verify", "server", "bench", "metrics"}
INSIDE_A_STAGE = {"engine", "bridges", "transfer"}

# Inside of a part not every module needs what the part may import.
ONLY = {
    # Bridges know the ids and sizes of a model, not the model.
    ("bridges", "models"): {
        "stretto.models.family",
        "stretto.models.qwen3_omni.spec",
        "stretto.models.qwen3_tts.spec",
        "stretto.models.spec",
    },
    # The engine meets models in its runners, bridges there and where steps are handed on.
    ("engine.ar_runner", "bridges"): {
        "stretto.bridges.prompt_inbox",
    },
    ("engine.materializer", "bridges"): {"stretto.bridges.bridge"},
}
RUNNERS = {
    "stretto.engine.ar_runner",
    "stretto.engine.generation_runner",
    "stretto.engine.recorded_frames",
}

# Libraries that a part does not know.
STRANGERS = {
    # No thread and no transport.
    "bridges": {"threading", "queue", "asyncio", "socket", "torch", "mmap"},
    "payloads": {"torch", "threading"},
    "wire": {"torch", "socket", "mmap"},
    # Bytes and chunks, no tensor.
    "transfer": {"torch", "transformers", "asyncio"},
    "models": {"threading", "queue", "asyncio", "socket"},
    "config": {"torch", "transformers", "threading"},
    "request": {"torch", "threading", "asyncio"},
    "engine": {"transformers", "asyncio", "socket"},
}
# Stage processes start without it: it takes seconds to import.
MAY_IMPORT_TRANSFORMERS = {
    "stretto.models.tiny.omni",
    "stretto.models.qwen3_tts.codec_encoder",
    "stretto.pipeline.frontend",
    "stretto.pipeline.omni_frontend",
    "stretto.pipeline.tts_frontend",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "stretto"


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Full names of all imported modules, also of those inside of functions."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    longer = f"{module}.{alias.name}"
                    yield longer if longer in MODULES else module
            case ast.ImportFrom():
                raise AssertionError("imports inside of stretto are written in full")


def own_imports(module: str) -> set[str]:
    own = {name for name in imports_of(MODULES[module]) if part_of(name) and name in MODULES}
    return own - {module}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"stretto"}))
def test_imports_go_one_way(module: str) -> None:
    part = part_of(module)
    used = {part_of(name) for name in own_imports(module)} - {part, "stretto"}
    if part in TOP:
        assert not used & INSIDE_A_STAGE, f"{module} looks inside of a stage"
        return
    assert used <= EDGES[part], f"{module} may not import {', '.join(sorted(used - EDGES[part]))}"


def test_the_edges_have_no_circle_and_lead_to_parts_that_there_are() -> None:
    parts = {part_of(module) for module in MODULES} | TOP
    assert set(EDGES) <= parts
    resolved: set[str] = set()
    while ready := {part for part in EDGES if part not in resolved and EDGES[part] <= resolved}:
        resolved |= ready
    assert resolved == set(EDGES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_part_meets_another_only_where_it_must(module: str) -> None:
    used = own_imports(module)
    for (who, whom), allowed in ONLY.items():
        if module.startswith(f"stretto.{who}"):
            met = {name for name in used if part_of(name) == whom}
            assert met <= allowed, f"{module} imports {', '.join(sorted(met - allowed))}"
    if part_of(module) == "engine" and any(part_of(name) == "models" for name in used):
        assert module in RUNNERS


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_part_does_not_know_what_is_none_of_its_business(module: str) -> None:
    libraries = {name.split(".")[0] for name in imports_of(MODULES[module])}
    assert not libraries & STRANGERS.get(part_of(module), set()) - (
        {"transformers"} if module in MAY_IMPORT_TRANSFORMERS else set()
    )
    if "transformers" in libraries and part_of(module) not in TOP:
        assert module in MAY_IMPORT_TRANSFORMERS


def reads_environment(tree: ast.Module) -> bool:
    names = {"environ", "environb", "getenv", "putenv", "expandvars"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr) if attr in names:
                return True
            case ast.ImportFrom(names=imported) if {a.name for a in imported} & names:
                return True
    return False


def test_only_the_command_line_reads_the_environment() -> None:
    readers = {module for module, tree in MODULES.items() if reads_environment(tree)}
    # A stage process sets what oneDNN reads there, and reads nothing itself.
    assert readers <= {"stretto.cli", "stretto.pipeline.worker"}
