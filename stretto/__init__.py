"""stretto: multi-stage speech-and-text models that speak while they still think.

All that is public is here; see `stretto.api` for what it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto._version import __version__

if TYPE_CHECKING:
    from stretto.api import Answer, AsyncOmni, Omni
    from stretto.errors import (
        CheckpointError,
        ConfigError,
        InvalidRequest,
        Overloaded,
        PipelineClosed,
        RequestFailed,
        StageFailed,
        StrettoError,
    )
    from stretto.events import AudioDelta, Failed, Finished, TextDelta, Timings, Usage
    from stretto.pipeline.tts_frontend import Voice
    from stretto.request import SamplingParams

_HOMES = {
    "stretto.api": ("Answer", "AsyncOmni", "Omni"),
    "stretto.errors": (
        "CheckpointError",
        "ConfigError",
        "InvalidRequest",
        "Overloaded",
        "PipelineClosed",
        "RequestFailed",
        "StageFailed",
        "StrettoError",
    ),
    "stretto.events": ("AudioDelta", "Failed", "Finished", "TextDelta", "Timings", "Usage"),
    "stretto.pipeline.tts_frontend": ("Voice",),
    "stretto.request": ("SamplingParams",),
}
__all__ = [
    "Answer",
    "AsyncOmni",
    "AudioDelta",
    "CheckpointError",
    "ConfigError",
    "Failed",
    "Finished",
    "InvalidRequest",
    "Omni",
    "Overloaded",
    "PipelineClosed",
    "RequestFailed",
    "SamplingParams",
    "StageFailed",
    "StrettoError",
    "TextDelta",
    "Timings",
    "Usage",
    "Voice",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: `stretto --help` needs no torch."""
    for home, names in _HOMES.items():
        if name in names:
            return vars(import_module(home))[name]
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")
