"""What any served checkpoint is described by: the specs of all architectures."""

from __future__ import annotations

from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.qwen3_tts.spec import TtsSpec

ModelSpec = OmniSpec | TtsSpec
