"""`stretto bench kernels` on a few small steps, and what it makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.bench.kernels import Step
from stretto.cli import main


def test_every_step_is_measured_beside_its_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "kernels.md"
    command = ["bench", "kernels", "--rows", "1,2", "--chunks", "1,3", "--repeats", "2"]
    assert main([*command, "--markdown", str(document)]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["kind"] == "kernels"
    steps = {(step["name"], step["rows"], step["frames"]): step for step in result["steps"]}
    names = ("code predictor", "code predictor, step by step", "talker", "thinker")
    assert set(steps) == {(name, rows, 0) for name in names for rows in (1, 2)} | {
        ("code2wav", rows, frames) for rows in (1, 2) for frames in (1, 3)
    }
    for step in steps.values():
        assert step["ms"] > 0 and step["weight_bytes"] > 0
    for name, rows, frames in steps:
        one = steps[name, 1, frames]
        # Products go with the rows, weights are read once for all of them.
        assert steps[name, rows, frames]["flops"] == pytest.approx(rows * one["flops"], rel=0.05)
    predictor = steps["code predictor", 1, 0]
    assert steps["code predictor, step by step", 1, 0]["flops"] == predictor["flops"] > 0
    assert steps["code predictor", 2, 0]["weight_bytes"] == predictor["weight_bytes"]
    assert set(result["vocoder_small_over_large"]) == {"1", "2"}
    assert set(result["vocoder_one_call_over_single"]) == {"1", "3"}
    assert "over the floor" in document.read_text()


def test_a_floor_is_the_larger_of_reading_and_computing() -> None:
    step = Step(
        name="code2wav", rows=4, frames=5, ms=100.0, weight_bytes=1, flops=1,
        read_ms=7.0, product_ms=9.0,
    )  # fmt: skip
    assert (step.floor_ms, step.ms_per_frame) == (9.0, 5.0)


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--chunks", "0,4"], ["--repeats", "0"]])
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *arguments]) == 1
    assert "numbers from 1 on" in capsys.readouterr().err
