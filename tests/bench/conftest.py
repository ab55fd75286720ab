"""A result as an ablation gives it, made by hand."""

from __future__ import annotations

import pytest

from stretto.bench.ablation import modes_of
from stretto.bench.figures import AblationResult, Cell, EdgeCost, LongContext
from stretto.bench.offline import Workload

FIGURES = {
    "e2e_ms": 900.0,
    "ttft_ms": 9.0,
    "tpot_ms": 2.0,
    "ttfp_ms": 90.0,
    "rtf": 0.4,
    "itl_ms": 2.0,
}


def cell(mode, concurrency: int) -> Cell:  # type: ignore[no-untyped-def]
    scale = concurrency * (0.9 if mode.async_chunk else 1.0)
    figures = {name: value * scale for name, value in FIGURES.items()}
    figures["ttfp_ms"] *= 1.0 if mode.async_chunk else 9.0
    return Cell(
        mode=mode,
        concurrency=concurrency,
        num_requests=concurrency,
        mean=figures,
        median=figures,
        request_throughput=1.0,
        output_throughput=10.0,
        audio_throughput=2.0,
        underrun_ms_max=0.0,
        num_gaps=0,
        continuity_ok_rate=1.0,
        step_ms={"thinker": 2.0, "talker": 20.0},
        step_gap_ms={"thinker": 0.1, "talker": None},
        busy_fraction={"thinker": 0.1, "talker": 0.9, "code2wav": 0.2},
        cpu_s_per_request={},
        e2e_over_busiest_stage=1.1,
        talker_rtf=0.25,
    )


@pytest.fixture
def ablation_result() -> AblationResult:
    edge = EdgeCost(
        num_hops=9, bytes_per_step=180.0, us_per_step=100.0, put_us=60.0, get_us=40.0, hop_us=200.0
    )
    ratio = {"1": 0.1, "4": 0.2}
    return AblationResult(
        model="tiny",
        machine="a machine",
        workload=Workload(input_len=100, output_len=100, frames=340),
        repeats=1,
        ttfp_async_over_sync=ratio,
        e2e_async_over_sync=ratio,
        ttft_async_over_sync=ratio,
        rtf_async_over_sync=ratio,
        e2e_batch64_over_1=ratio,
        e2e_batch64_over_1_async=ratio,
        cpu_async_over_sync={},
        e2e_async_output_over_off={},
        talker_step_gap_async_output_over_off={},
        step_ms={},
        step_gap_ms={},
        busy_fraction={"thinker": 0.1, "talker": 0.9, "code2wav": 0.2},
        e2e_over_busiest_stage=1.1,
        long_bytes_ratio={},
        long_us_ratio={},
        hop_us={},
        ready_s={},
        cells=[cell(mode, concurrency) for mode in modes_of((1, 64)) for concurrency in (1, 4)],
        long_context=[LongContext(input_len=100, mean=FIGURES, edges={"thinker->talker": edge})],
    )
