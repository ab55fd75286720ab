"""Whether stretto gives what the reference gives: every mode against it, on any checkpoint.

    reference   Qwen3-Omni: transformers' generate; Qwen3-TTS: the `qwen-tts` package; greedy, one
                request at a time, codes decoded in one shot
    compared    inline and process stages x async_chunk on and off x codec chunks 1, 3, 25
                x 1 and 4 requests at once

Text ids and all codebooks must be equal, samples equal in number and within `AUDIO_TOLERANCE`.
"""

from __future__ import annotations

from pathlib import Path

from stretto.pipeline.model import open_model
from stretto.verify.cases import CaseResult, OnResult, Summary, summarize
from stretto.verify.omni import verify_omni
from stretto.verify.tts import verify_tts

__all__ = ["CaseResult", "Summary", "summarize", "verify"]


def verify(
    model: str, *, cache_dir: Path, reference_dir: Path, on_result: OnResult
) -> list[CaseResult]:
    """All cases on one checkpoint, in float32 on the CPU; `on_result` hears of each as it ends.

    `reference_dir` holds the `qwen-tts` package, for checkpoints of that kind.

    Raises:
        CheckpointError: it is no checkpoint.
        ConfigError: the reference is not there.
    """
    kind = open_model(model, cache_dir=cache_dir, deploy_config=None, flags={}).model_type
    if kind == "qwen3_tts":
        return verify_tts(
            model, cache_dir=cache_dir, reference_dir=reference_dir, on_result=on_result
        )
    return verify_omni(model, cache_dir=cache_dir, on_result=on_result)
