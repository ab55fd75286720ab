"""`stretto bench ablation` and `peers` on very small runs, and what is read from traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.bench.ablation import modes_of
from stretto.bench.figures import AblationResult, tables_of
from stretto.bench.tables import Section, Table
from stretto.bench.traces import Trace, busy_s, step_gaps_ms
from stretto.cli import main
from stretto.errors import ConfigError
from stretto.trace import Span

MS = 1_000_000
WORKLOAD = ("--model", "tiny", "--input-len", "24", "--output-len", "8", "--frames", "6")
# Its sound lacks the last samples.
SOUND_MS = 6 * 80 - 555 / 24


def span(name: str, began_ms: float, ended_ms: float, stage: str = "talker", **args: Any) -> Span:
    return Span(stage, "engine", name, round(began_ms * MS), round(ended_ms * MS), args)


def step(began_ms: float, ended_ms: float, *, after_wait: bool = False) -> Span:
    return span("step", began_ms, ended_ms, after_wait=after_wait, requests=1, prompt_rows=0)


def last_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


# ---- traces --------------------------------------------------------------------------------------


def test_a_gap_lies_between_steps_where_the_loop_had_not_to_wait() -> None:
    steps = [
        step(0, 10, after_wait=True),
        step(11, 20),
        step(50, 60, after_wait=True),
        step(63, 70),
    ]
    assert step_gaps_ms(steps) == [1.0, 3.0]
    # A step that is launched before the one before it has ended leaves no gap.
    assert step_gaps_ms([step(0, 10), step(8, 20)]) == [0.0]


def test_busy_time_counts_once_where_steps_overlap() -> None:
    assert busy_s([step(0, 10), step(8, 20), step(30, 31)]) == pytest.approx(0.021)


def test_a_hop_is_a_chunk_that_was_put_and_got() -> None:
    trace = Trace(
        [
            span("put", 1, 2, "talker", key="r_1_0", bytes=70, cpu_us=3.0),
            span("get", 1.5, 4, "code2wav", key="r_1_0", bytes=70, cpu_us=3.0),
            span("put", 5, 6, "talker", key="r_1_1", bytes=70, cpu_us=3.0),
        ]
    )
    (hop,) = trace.hops_of("talker->code2wav", {"r"})
    assert (hop.index, hop.num_bytes, hop.put_ns, hop.get_ns, hop.flight_ns) == (
        0, 70, 1 * MS, 2.5 * MS, 3 * MS,
    )  # fmt: skip
    assert hop.cpu_us == 6.0
    assert trace.hops_of("talker->code2wav", {"another"}) == []


def test_steps_are_counted_in_the_window_in_which_they_began() -> None:
    trace = Trace([step(0, 10), step(11, 20), step(21, 30)])
    assert trace.steps_within("talker", 11 * MS, 21 * MS) == [step(11, 20)]
    assert trace.steps_within("nobody", 0, 21 * MS) == []


# ---- modes ---------------------------------------------------------------------------------------


def test_modes_are_all_pairs_and_the_deployed_one_without_async_output() -> None:
    modes = modes_of((1, 64))
    assert [(mode.async_chunk, mode.code2wav_batch) for mode in modes] == [
        (False, 1), (False, 64), (True, 1), (True, 64), (True, 64),
    ]  # fmt: skip
    assert modes[-2].flags() == {"async_chunk": True, "stages": {"code2wav": {"max_num_seqs": 64}}}
    assert modes[-1].flags()["stages"]["talker"] == {"async_output": "off"}


# ---- documents -----------------------------------------------------------------------------------


def test_tables_take_the_place_of_the_old_ones_in_a_document(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- bench x -->\nold\n<!-- end -->\n\nafter\n")
    table = Table("Title", ("a", "b"), (("1", "2"),))
    for _ in range(2):
        Section(page, "bench x").write("stretto bench x", "A machine.", [table])
    assert page.read_text() == (
        "before\n\n<!-- bench x -->\n\n    stretto bench x\n\nA machine.\n\n"
        "Title\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n<!-- end -->\n\nafter\n"
    )
    with pytest.raises(ConfigError, match="there is no line '<!-- bench y -->'"):
        Section(page, "bench y")


# ---- runs ----------------------------------------------------------------------------------------


def test_an_ablation_ends_with_one_object_that_has_every_cell_and_ratio(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("STRETTO_CACHE", str(tiny_dir.parent))
    status = main(
        [
            *("bench", "ablation", *WORKLOAD, "--inline", "--concurrency", "1", "--repeats", "1"),
            *("--long-context", "24,520", "--json", str(tmp_path / "a.json")),
            *("--markdown", str(tmp_path / "a.md"), "--trace", str(tmp_path / "traces")),
        ]
    )
    assert status == 0
    printed = capsys.readouterr().out
    result = last_json(printed)
    assert result == json.loads((tmp_path / "a.json").read_text())
    for ratio in (
        "ttfp_async_over_sync",
        "e2e_async_over_sync",
        "ttft_async_over_sync",
        "rtf_async_over_sync",
        "e2e_batch64_over_1",
    ):
        assert list(result[ratio]) == ["1"] and result[ratio]["1"] > 0
    assert len(result["cells"]) == 5
    for cell in result["cells"]:
        assert cell["num_requests"] == cell["concurrency"] == 1
        assert set(cell["busy_fraction"]) == {"thinker", "talker", "code2wav"}
        assert all(0 < share <= 1 for share in cell["busy_fraction"].values())
        assert cell["step_gap_ms"]["talker"] < cell["step_ms"]["talker"]
        # One stage after the other in one thread: nothing overlaps.
        assert cell["e2e_over_busiest_stage"] >= 1
        assert cell["mean"]["ttft_ms"] <= cell["mean"]["e2e_ms"]
        last_sound_ms = cell["mean"]["rtf"] * SOUND_MS
        # To a rounding: with async_chunk off the last sound is the first.
        assert cell["mean"]["ttfp_ms"] - 1e-6 <= last_sound_ms <= cell["mean"]["e2e_ms"] + 1e-6
    assert set(result["step_gap_ms"]) == {"thinker", "talker"}
    assert [row["input_len"] for row in result["long_context"]] == [24, 520]
    for row in result["long_context"]:
        # Every decode step but the last hands on one token.
        assert row["edges"]["thinker->talker"]["num_hops"] == 7
        assert row["edges"]["talker->code2wav"]["num_hops"] >= 2
    assert result["long_bytes_ratio"]["thinker->talker"] == pytest.approx(1.0)
    assert "| on | 64 | 1 | 1 |" in (tmp_path / "a.md").read_text()
    assert len(list((tmp_path / "traces").glob("*.json"))) == len(result["cells"])


@pytest.mark.process
def test_peers_do_the_same_work_and_end_with_one_object(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tiny_dir.parent))
    status = main(["bench", "peers", *WORKLOAD, "--quick", "--prompts", "1"])
    assert status == 0
    printed = capsys.readouterr().out
    result = last_json(printed)
    assert result["equal"] is True
    assert result["batch16_ratio"] is None
    assert 0 < result["ttfp_ratio"] < result["e2e_ratio"]
    assert result["e2e_ratio"] == pytest.approx(
        result["stretto"]["e2e_s"] / result["transformers"]["e2e_s"], abs=1e-4
    )
    assert "ids and codes of both equal" in printed.replace("\n", " ")


def test_what_a_prompt_cannot_be_is_said(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tiny_dir.parent))
    status = main(["bench", "ablation", *WORKLOAD, "--frames", "0"])
    assert status == 1
    assert "frames must be 1 or more" in capsys.readouterr().err


def test_the_tables_have_a_row_for_each_cell(ablation_result: AblationResult) -> None:
    modes, ratios, stages, long = tables_of(ablation_result)
    assert len(modes.rows) == len(stages.rows) == len(ablation_result.cells)
    assert ratios.columns[1:3] == ("at 1", "at 4")
    assert ratios.rows[0][1:3] == ("0.100", "0.200")
    assert len(long.rows) == 1
    for table in (modes, ratios, stages, long):
        assert {len(row) for row in table.rows} == {len(table.columns)}
