"""The reference implementation of Qwen3-TTS as tests use it: see `stretto/verify/qwen_tts.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.verify import qwen_tts
from stretto.verify.qwen_tts import PACKAGE, one_shot, plain_rotary, reference_codes

__all__ = ["load_reference", "one_shot", "plain_rotary", "reference_codes", "reference_module"]


def reference_directory() -> Path:
    """Where the package lies: named by STRETTO_QWEN_TTS, or `.reference` beside the tests."""
    named = os.environ.get("STRETTO_QWEN_TTS")
    return Path(named) if named else Path(__file__).parent.parent / ".reference"


def reference_module(name: str) -> ModuleType:
    """A module of the package: "core.models.modeling_qwen3_tts", say."""
    qwen_tts.reference_package(reference_directory())
    return sys.modules[f"{PACKAGE}.{name}"]


def load_reference(model_dir: Path) -> Any:
    return qwen_tts.load_reference(model_dir, reference_directory())
