"""Every row of the field's table of definitions (api.md 4.9), against events made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench.datasets import Prompt
from stretto.bench.load import Load, Outcome, StageMetrics, peak_concurrency
from stretto.bench.serve import RunSettings, figures, layout
from stretto.errors import ConfigError
from stretto.metrics import SoundClock, Timeline, spread

RATE = 24000
SETTINGS = RunSettings(backend="openai-chat-omni", model="m", label="m", percentiles=(50.0, 90.0))


def timeline(
    text: list[tuple[float, int]], sound: list[tuple[float, float]], *, sent_s: float = 100.0
) -> Timeline:
    """Text as (time, tokens), sound as (time, seconds of it); times since sending."""
    made = Timeline(sent_s)
    events = [(at, 0, tokens) for at, tokens in text] + [(at, 1, length) for at, length in sound]
    for at, is_sound, size in sorted(events):
        if is_sound:
            made.sound_arrived(sent_s + at, round(size * RATE), RATE)
        else:
            made.text_arrived(sent_s + at, int(size))
    return made


def outcome(made: Timeline, *, stages: dict[str, StageMetrics] | None = None) -> Outcome:
    prompt = Prompt(text="", num_tokens=7)
    return Outcome(prompt, made, stages=stages or {})


def result(*outcomes: Outcome, wall_s: float = 4.0, settings: RunSettings = SETTINGS):  # type: ignore[no-untyped-def]
    return figures(Load(list(outcomes), wall_s), settings)


def test_ttft_is_the_first_text_with_tokens() -> None:
    assert timeline([(0.1, 0), (0.3, 1)], []).ttft_s == pytest.approx(0.3)
    assert timeline([], []).ttft_s is None


def test_an_event_with_k_tokens_gives_k_samples_of_a_kth_and_the_first_event_gives_zeros() -> None:
    made = timeline([(0.2, 3), (0.5, 1), (0.9, 2)], [])
    assert made.inter_token_s == pytest.approx([0, 0, 0.3, 0.2, 0.2])


def test_tpot_is_the_mean_itl_and_a_single_token_has_none() -> None:
    made = timeline([(0.2, 3), (0.5, 1), (0.9, 2)], [])
    assert made.tpot_s == pytest.approx(sum(made.inter_token_s) / 5)
    # The other formula of the table: what came after the first token, per token.
    assert made.tpot_s == pytest.approx((0.9 - 0.2) / 5)
    assert timeline([(0.2, 1)], []).tpot_s is None


def test_where_no_gap_was_seen_the_servers_own_first_stage_stands_in() -> None:
    burst = timeline([(0.5, 4)], [])
    told = {"0": StageMetrics(vllm_itls_ms=[10.0, 20.0, 30.0], vllm_tpot_ms=20.0)}
    figured = result(outcome(burst, stages=told))
    assert figured["mean_itl_ms"] == pytest.approx(20.0)
    assert figured["mean_tpot_ms"] == pytest.approx(20.0)
    seen = timeline([(0.5, 1), (0.6, 1)], [])
    assert result(outcome(seen, stages=told))["mean_itl_ms"] == pytest.approx(100.0)


def test_e2el_is_the_last_event() -> None:
    made = timeline([(0.2, 1)], [(0.4, 1.0), (1.5, 1.0)])
    assert made.e2el_s == pytest.approx(1.5)


def test_ttfp_is_the_first_sound_even_if_it_is_empty() -> None:
    assert timeline([], [(0.3, 0.0), (0.6, 1.0)]).ttfp_s == pytest.approx(0.3)


def test_rtf_is_the_last_sound_over_the_duration_or_the_end_where_all_is_sound() -> None:
    made = timeline([(3.0, 1)], [(0.5, 1.0), (1.5, 1.0)])
    assert made.rtf == pytest.approx(1.5 / 2)
    made.is_sound_alone = True
    assert made.rtf == pytest.approx(3.0 / 2)
    assert timeline([(1.0, 1)], []).rtf is None


def test_underrun_is_what_a_player_from_the_first_packet_on_lacks() -> None:
    made = timeline([], [(1.0, 0.5), (2.0, 0.2), (2.1, 0.5), (3.0, 1.0)]).sound
    # Played 1.0-1.5, still until 2.0, played 2.0-2.7, still until 3.0.
    assert made.underrun_s == pytest.approx(0.8)
    assert made.num_gaps == 2
    assert made.first_duration_s == pytest.approx(0.5)
    assert timeline([], [(1.0, 0.5), (1.4, 0.5)]).sound.num_gaps == 0


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), min_size=1, max_size=12))
def test_underrun_is_what_a_simulated_player_stands_still(
    pieces: list[tuple[float, float]],
) -> None:
    clock = SoundClock()
    at_s, played_until_s, still_s = 0.0, None, 0.0
    for wait_s, length_s in pieces:
        at_s += wait_s
        clock.arrived(at_s, length_s)
        if played_until_s is not None and at_s > played_until_s:
            still_s += at_s - played_until_s
        played_until_s = max(at_s, played_until_s or at_s) + length_s
    assert clock.underrun_s == pytest.approx(still_s, abs=1e-9)


def test_continuity_is_the_share_of_requests_with_little_underrun() -> None:
    fine = timeline([(0.1, 1)], [(0.2, 1.0), (1.25, 1.0)])
    torn = timeline([(0.1, 1)], [(0.2, 1.0), (1.35, 1.0)])
    assert result(outcome(fine), outcome(torn))["audio_continuity_ok_rate"] == 0.5


def test_throughputs_are_sums_over_the_wall_time() -> None:
    made = timeline([(0.1, 2), (0.2, 3)], [(0.2, 1.0), (0.3, 2.0)])
    made.num_text_tokens = 6
    figured = result(outcome(made), outcome(made), wall_s=4.0)
    assert figured["request_throughput"] == 0.5
    # What usage says goes before what was counted.
    assert figured["output_throughput"] == 12 / 4
    assert figured["total_token_throughput"] == (12 + 14) / 4
    assert figured["audio_throughput"] == pytest.approx(6 / 4)
    assert figured["total_audio_frames"] == 6 * RATE


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    quick = timeline([(0.1, 1), (0.2, 1)], [(0.2, 1.0)])
    slow = timeline([(0.1, 1), (0.2, 1)], [(0.9, 1.0)])
    for name in ("audio_ttfp", "audio_ttft"):
        settings = RunSettings(
            backend="b", model="m", label="m", goals_ms={name: 500.0, "ttft": 500.0, "tpot": 150.0}
        )
        figured = result(outcome(quick), outcome(slow), wall_s=2.0, settings=settings)
        assert figured["request_goodput"] == 0.5
    missed = RunSettings(backend="b", model="m", label="m", goals_ms={"audio_ttfp": 0.001})
    assert result(outcome(quick), settings=missed)["request_goodput"] == 0.0


@pytest.mark.parametrize("settings", [{"goals_ms": {"ttfp": 1.0}}, {"metrics": ("ttfp",)}])
def test_unknown_names_are_refused_and_the_known_ones_named(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"'ttfp' is not known; there are .*audio_ttfp"):
        RunSettings(backend="b", model="m", label="m", **settings)  # type: ignore[arg-type]


def test_percentiles_are_interpolated_linearly() -> None:
    lies = spread([1.0, 2.0, 3.0, 4.0], (25.0, 99.0))
    assert (lies.mean, lies.median) == (2.5, 2.5)
    assert lies.percentiles == pytest.approx({"p25": 1.75, "p99": 3.97})
    assert spread([]).mean == 0.0


def test_peaks_are_those_of_the_run() -> None:
    made = [timeline([(0.1, 1), (0.9, 5), (1.5, 1)], [], sent_s=at) for at in (0.0, 1.0, 1.2)]
    assert peak_concurrency(made) == 3
    assert peak_concurrency(made[:1]) == 1
    assert result(*(outcome(one) for one in made))["peak_output_throughput"] == 8


def test_failures_are_counted_and_left_out_of_every_other_figure() -> None:
    good = outcome(timeline([(0.1, 1), (0.3, 1)], [(0.2, 1.0)]))
    bad = Outcome(Prompt(text=""), timeline([(9.0, 1)], [(9.0, 1.0)]), error="cut off")
    alone, both = result(good), result(good, bad)
    assert (both["completed"], both["failed"], both["errors"]) == (1, 1, ["cut off"])
    same = {key for key in alone if key not in ("failed", "errors")}
    assert {key: alone[key] for key in same} == {key: both[key] for key in same}


def test_the_printed_layout_is_the_fields() -> None:
    figured = result(outcome(timeline([(0.1, 1), (0.3, 1)], [(0.2, 1.0)])))
    lines = layout(figured, SETTINGS).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     1         "
    assert "---------------Time to First Token----------------" in lines
    assert "Median AUDIO_TTFP (ms):                  200.00    " in lines
    assert "Mean AUDIO_RTF:                          0.20      " in lines
    assert "P90 ITL (ms):                            200.00    " in lines
    assert lines[-1] == "=" * 50
