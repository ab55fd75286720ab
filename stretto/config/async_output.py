"""Whether a stage builds its outputs behind the next step, and why not where it does not.

On the step's path stays only what the next step needs; copies, payloads, wire bytes and reports
are the materializer thread's (`materializer.py`). That is safe where a stage's next step depends
on its sampled ids and its own device state alone, and pays where outputs leave at every step.
Elsewhere the same code runs inline, and gives the same outputs.
"""

from __future__ import annotations

import msgspec

from stretto.config.deployment import StageConfig

# Models whose runner keeps what the next step needs on the device before it returns: the Thinker
# its last ids, the Talker its last frame's summed embedding.
OPTED_IN = frozenset({"qwen3_omni.thinker", "qwen3_omni.talker", "qwen3_tts.talker"})


class AsyncOutput(msgspec.Struct, frozen=True):
    enabled: bool
    # For people: `stretto check`, `/health`.
    reason: str


def choose_async_output(stage: StageConfig, *, async_chunk: bool) -> AsyncOutput:
    """What holds for a stage; the conditions are checked in the order in which they are likely."""
    refusals = (
        (stage.async_output == "off", "async_output is off"),
        (stage.worker_type != "ar", "not an autoregressive stage"),
        (not async_chunk, "async_chunk is off: outputs leave once, at the end"),
        (stage.model not in OPTED_IN, f"{stage.model} has not opted in"),
    )
    for refused, reason in refusals:
        if refused:
            return AsyncOutput(False, reason)
    return AsyncOutput(True, "outputs leave at every step, and no step waits for them")
