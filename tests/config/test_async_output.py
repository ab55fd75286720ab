"""Outputs are built behind the next step exactly where that is safe."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config.async_output import choose_async_output
from stretto.config.deployment import StageConfig


def a_stage(**settings: Any) -> StageConfig:
    return StageConfig(
        **{"name": "talker", "worker_type": "ar", "model": "qwen3_omni.talker", **settings}
    )


def test_an_autoregressive_stage_that_streams_does_so_by_itself() -> None:
    assert choose_async_output(a_stage(), async_chunk=True).enabled


@pytest.mark.parametrize(
    ("settings", "async_chunk", "reason"),
    [
        ({"async_output": "off"}, True, "async_output is off"),
        ({"worker_type": "generation"}, True, "not an autoregressive stage"),
        ({}, False, "async_chunk is off"),
        ({"model": "own.model"}, True, "own.model has not opted in"),
    ],
)
def test_otherwise_it_says_why_not(
    settings: dict[str, Any], async_chunk: bool, reason: str
) -> None:
    choice = choose_async_output(a_stage(**settings), async_chunk=async_chunk)
    assert not choice.enabled
    assert reason in choice.reason
