"""What an ablation comes to: one cell per mode and concurrency, ratios of medians, tables.

Times of requests are those their client saw; what stages did is read from the traces, in the
windows in which the runs took place.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from stretto.bench.ablation import LONG, Measured, Mode, Plan, Run
from stretto.bench.offline import Asked, Workload
from stretto.bench.tables import Table, number
from stretto.bench.traces import Hop, Trace, busy_s, step_gaps_ms
from stretto.metrics import CONTINUITY_THRESHOLD_S, spread
from stretto.trace import Span

FRAME_MS = 80.0
TALKER = "talker"
MODE_COLUMNS = ("async_chunk", "Code2Wav batch", "Concurrency")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One mode at one concurrency. Means and medians are over all requests of all repeats.

    `step_ms`, `step_gap_ms`, `busy_fraction` and `cpu_s_per_request` are by stage; None where a
    stage never ran on without waiting. `talker_rtf` is its median step over a frame's 80 ms.
    """

    mode: Mode
    concurrency: int
    num_requests: int
    mean: dict[str, float]
    median: dict[str, float]
    request_throughput: float
    output_throughput: float
    audio_throughput: float
    underrun_ms_max: float
    num_gaps: int
    continuity_ok_rate: float
    step_ms: dict[str, float | None]
    step_gap_ms: dict[str, float | None]
    busy_fraction: dict[str, float]
    cpu_s_per_request: dict[str, float]
    e2e_over_busiest_stage: float
    talker_rtf: float | None


class EdgeCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one edge costs: per decode step of the sending stage, and per hop (medians)."""

    num_hops: int
    bytes_per_step: float
    us_per_step: float
    put_us: float
    get_us: float
    hop_us: float


class LongContext(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt length at concurrency 1: times of the request, and the edges while it decodes."""

    input_len: int
    mean: dict[str, float]
    edges: dict[str, EdgeCost]


class AblationResult(msgspec.Struct, frozen=True, kw_only=True, tag="ablation", tag_field="kind"):
    """The last line of `stretto bench ablation`. Ratios are of medians, by concurrency.

    Ratios of async_chunk are taken at the deployed Code2Wav batch (the last of the list);
    `e2e_batch64_over_1` is the last batch over the first with async_chunk off, as published, and
    with it on in `e2e_batch64_over_1_async`. Figures by stage are those of the deployed mode at the
    lowest concurrency; every cell has its own.
    """

    model: str
    machine: str
    workload: Workload
    repeats: int
    ttfp_async_over_sync: dict[str, float]
    e2e_async_over_sync: dict[str, float]
    ttft_async_over_sync: dict[str, float]
    rtf_async_over_sync: dict[str, float]
    e2e_batch64_over_1: dict[str, float]
    e2e_batch64_over_1_async: dict[str, float]
    # CPU time of all stages per request: other work on the machine does not change it much. Empty
    # where stages have no processes of their own.
    cpu_async_over_sync: dict[str, float]
    e2e_async_output_over_off: dict[str, float]
    talker_step_gap_async_output_over_off: dict[str, float]
    step_ms: dict[str, float | None]
    step_gap_ms: dict[str, float | None]
    busy_fraction: dict[str, float]
    e2e_over_busiest_stage: float
    # By edge: the longest prompt over the shortest, bytes and microseconds per decode step.
    long_bytes_ratio: dict[str, float]
    long_us_ratio: dict[str, float]
    # Median from put to arrival on each edge, in the deployed mode.
    hop_us: dict[str, float]
    # From a cold start to ready, by mode.
    ready_s: dict[str, float]
    cells: list[Cell]
    long_context: list[LongContext]


class _Figures:
    """Works out cells and ratios from what was measured."""

    def __init__(self, plan: Plan, measured: Measured) -> None:
        self._plan = plan
        self._runs = measured.runs
        self._config = measured.config
        self._traces = dict(zip(plan.modes, measured.traces, strict=True))
        self._stages = [stage.name for stage in measured.config.stages]
        self._ar = [stage.name for stage in measured.config.stages if stage.worker_type == "ar"]
        self.cells = {
            (mode, concurrency): self._cell(mode, concurrency)
            for mode in plan.modes
            for concurrency in plan.concurrency
        }

    def ratio(self, name: str, over: Mode, under: Mode) -> dict[str, float]:
        """Medians of one figure in one mode over those in another, by concurrency."""
        return {
            str(concurrency): round(
                self.cells[over, concurrency].median[name]
                / self.cells[under, concurrency].median[name],
                4,
            )
            for concurrency in self._plan.concurrency
        }

    def cpu_ratio(self, over: Mode, under: Mode) -> dict[str, float]:
        """CPU time of all stages per request."""
        ratios = {}
        for concurrency in self._plan.concurrency:
            used = sum(self.cells[over, concurrency].cpu_s_per_request.values())
            base = sum(self.cells[under, concurrency].cpu_s_per_request.values())
            if base:
                ratios[str(concurrency)] = round(used / base, 4)
        return ratios

    def gap_ratio(self, over: Mode, under: Mode) -> dict[str, float]:
        """The Talker's step gaps in one mode over those in another."""
        ratios = {}
        for concurrency in self._plan.concurrency:
            gap = self.cells[over, concurrency].step_gap_ms[TALKER]
            base = self.cells[under, concurrency].step_gap_ms[TALKER]
            if gap is not None and base:
                ratios[str(concurrency)] = round(gap / base, 4)
        return ratios

    def long_context(self) -> list[LongContext]:
        rows = []
        for input_len in self._plan.long_inputs:
            runs = [r for r in self._runs if r.concurrency == LONG and r.input_len == input_len]
            asked = [one for run in runs for one in run.asked]
            rows.append(
                LongContext(
                    input_len=input_len,
                    mean={name: spread(of(asked)).mean for name, of in TIMES.items()},
                    edges=self._edges(asked, input_len),
                )
            )
        return rows

    def hop_us(self) -> dict[str, float]:
        trace = self._traces[self._plan.deployed]
        ids = {a.request_id for r in self._runs if r.mode == self._plan.deployed for a in r.asked}
        hops = {edge.label: trace.hops_of(edge.label, ids) for edge in self._config.connectors}
        return {edge: _median_us(some, lambda h: h.flight_ns) for edge, some in hops.items()}

    def _cell(self, mode: Mode, concurrency: int) -> Cell:
        runs = [r for r in self._runs if r.mode == mode and r.concurrency == concurrency]
        asked = [one for run in runs for one in run.asked]
        walls_s = [(run.ended_ns - run.began_ns) / 1e9 for run in runs]
        wall_s = sum(walls_s)
        sounds = [one.timeline.sound for one in asked]
        steps = {stage: [self._steps(run, stage) for run in runs] for stage in self._stages}
        busy = {stage: [busy_s(some) for some in steps[stage]] for stage in self._stages}
        times = {
            stage: [s.duration_ms for some in steps[stage] for s in some] for stage in self._ar
        }
        gaps = {
            stage: [g for some in steps[stage] for g in step_gaps_ms(some)] for stage in self._ar
        }
        talker_ms = _median(times.get(TALKER, []))
        spreads = {name: spread(of(asked)) for name, of in TIMES.items()}
        return Cell(
            mode=mode,
            concurrency=concurrency,
            num_requests=len(asked),
            mean={name: lies.mean for name, lies in spreads.items()},
            median={name: lies.median for name, lies in spreads.items()},
            request_throughput=len(asked) / wall_s,
            output_throughput=sum(len(one.token_ids) for one in asked) / wall_s,
            audio_throughput=sum(sound.duration_s for sound in sounds) / wall_s,
            underrun_ms_max=max(sound.underrun_s for sound in sounds) * 1e3,
            num_gaps=sum(sound.num_gaps for sound in sounds),
            continuity_ok_rate=sum(s.underrun_s <= CONTINUITY_THRESHOLD_S for s in sounds)
            / len(sounds),
            step_ms={stage: _median(some) for stage, some in times.items()},
            step_gap_ms={stage: _median(some) for stage, some in gaps.items()},
            busy_fraction={stage: sum(some) / wall_s for stage, some in busy.items()},
            cpu_s_per_request={
                stage: sum(run.cpu_s[stage] for run in runs) / len(asked) for stage in runs[0].cpu_s
            },
            e2e_over_busiest_stage=statistics.median(
                whole_s / max(busy[stage][index] for stage in self._stages)
                for index, whole_s in enumerate(walls_s)
            ),
            talker_rtf=None if talker_ms is None else talker_ms / FRAME_MS,
        )

    def _steps(self, run: Run, stage: str) -> list[Span]:
        return self._traces[run.mode].steps_within(stage, run.began_ns, run.ended_ns)

    def _edges(self, asked: Sequence[Asked], input_len: int) -> dict[str, EdgeCost]:
        trace: Trace = self._traces[self._plan.deployed]
        ids = {one.request_id for one in asked}
        entry = self._config.stages[0]
        # These chunks bring the prompt; those behind them one decode step each.
        num_prompt_chunks = math.ceil(input_len / entry.prefill_chunk_tokens)
        costs = {}
        for edge in self._config.connectors:
            hops = trace.hops_of(edge.label, ids)
            num_steps = sum(one.num_frames for one in asked)
            if edge.from_stage == entry.name:
                hops = [hop for hop in hops if hop.index >= num_prompt_chunks]
                num_steps = len(hops)
            if hops:
                costs[edge.label] = _edge_cost(hops, num_steps)
        return costs


# A request's figures by name, of all of a cell's requests.
TIMES: dict[str, Callable[[Sequence[Asked]], list[float]]] = {
    "e2e_ms": lambda asked: [one.timeline.e2el_s * 1e3 for one in asked],
    "ttft_ms": lambda asked: [(one.timeline.ttft_s or 0.0) * 1e3 for one in asked],
    "tpot_ms": lambda asked: [one.timeline.tpot_s * 1e3 for one in asked if one.timeline.tpot_s],
    "ttfp_ms": lambda asked: [(one.timeline.ttfp_s or 0.0) * 1e3 for one in asked],
    "rtf": lambda asked: [one.timeline.rtf or 0.0 for one in asked],
    "itl_ms": lambda asked: [gap * 1e3 for one in asked for gap in one.timeline.inter_token_s],
}


def result_of(plan: Plan, measured: Measured, *, machine: str) -> AblationResult:
    figures = _Figures(plan, measured)
    first, batch = plan.modes[0].code2wav_batch, plan.deployed.code2wav_batch
    on, off = plan.deployed, Mode(async_chunk=False, code2wav_batch=batch)
    without_output = msgspec.structs.replace(on, async_output=False)
    shown = figures.cells[on, plan.concurrency[0]]
    long_context = figures.long_context()
    return AblationResult(
        model=plan.model,
        machine=machine,
        workload=plan.workload,
        repeats=plan.repeats,
        ttfp_async_over_sync=figures.ratio("ttfp_ms", on, off),
        e2e_async_over_sync=figures.ratio("e2e_ms", on, off),
        ttft_async_over_sync=figures.ratio("ttft_ms", on, off),
        rtf_async_over_sync=figures.ratio("rtf", on, off),
        e2e_batch64_over_1=figures.ratio(
            "e2e_ms", off, Mode(async_chunk=False, code2wav_batch=first)
        ),
        e2e_batch64_over_1_async=figures.ratio(
            "e2e_ms", on, Mode(async_chunk=True, code2wav_batch=first)
        ),
        cpu_async_over_sync=figures.cpu_ratio(on, off),
        e2e_async_output_over_off=figures.ratio("e2e_ms", on, without_output),
        talker_step_gap_async_output_over_off=figures.gap_ratio(on, without_output),
        step_ms=shown.step_ms,
        step_gap_ms=shown.step_gap_ms,
        busy_fraction=shown.busy_fraction,
        e2e_over_busiest_stage=shown.e2e_over_busiest_stage,
        long_bytes_ratio=_long_ratio(long_context, lambda cost: cost.bytes_per_step),
        long_us_ratio=_long_ratio(long_context, lambda cost: cost.us_per_step),
        hop_us=figures.hop_us(),
        ready_s={
            mode.label: seconds for mode, seconds in zip(plan.modes, measured.ready_s, strict=True)
        },
        cells=list(figures.cells.values()),
        long_context=long_context,
    )


def _edge_cost(hops: Sequence[Hop], num_steps: int) -> EdgeCost:
    cpu_us = _median([hop.cpu_us for hop in hops]) or 0.0
    return EdgeCost(
        num_hops=len(hops),
        bytes_per_step=sum(hop.num_bytes for hop in hops) / num_steps,
        us_per_step=cpu_us * len(hops) / num_steps,
        put_us=_median_us(hops, lambda hop: hop.put_ns),
        get_us=_median_us(hops, lambda hop: hop.get_ns),
        hop_us=_median_us(hops, lambda hop: hop.flight_ns),
    )


def _long_ratio(
    rows: Sequence[LongContext], value: Callable[[EdgeCost], float]
) -> dict[str, float]:
    if not rows:
        return {}
    short = min(rows, key=lambda row: row.input_len)
    long = max(rows, key=lambda row: row.input_len)
    return {
        edge: round(value(cost) / value(short.edges[edge]), 4) for edge, cost in long.edges.items()
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _median_us(hops: Sequence[Hop], value: Callable[[Hop], int]) -> float:
    return statistics.median(value(hop) for hop in hops) / 1e3 if hops else 0.0


# ---- tables --------------------------------------------------------------------------------------


def tables_of(result: AblationResult) -> list[Table]:
    tables = [_modes_table(result), _ratios_table(result), _stages_table(result)]
    return [*tables, _long_table(result)] if result.long_context else tables


def _modes_table(result: AblationResult) -> Table:
    load = result.workload
    rows = []
    for cell in result.cells:
        mean = cell.mean
        rows.append(
            (
                *_mode_cells(cell),
                str(cell.num_requests),
                *(number(mean[name]) for name in ("e2e_ms", "ttft_ms")),
                number(mean["tpot_ms"], 2),
                number(mean["ttfp_ms"]),
                number(mean["rtf"], 3),
                number(mean["itl_ms"], 2),
                number(cell.request_throughput, 3),
                number(cell.output_throughput),
                number(cell.audio_throughput, 2),
                number(cell.underrun_ms_max),
            )
        )
    return Table(
        f"Modes, means: {load.input_len} prompt tokens, {load.output_len} text tokens, "
        f"{load.frames} frames ({load.frames * FRAME_MS / 1e3:.1f} s of sound); times in ms",
        (
            *MODE_COLUMNS, "Prompts", "E2E", "TTFT", "TPOT", "TTFP", "RTF", "ITL", "req/s",
            "tok/s", "audio s/s", "underrun max",
        ),
        tuple(rows),
    )  # fmt: skip


def _ratios_table(result: AblationResult) -> Table:
    batches = {cell.mode.code2wav_batch for cell in result.cells}
    pair = f"{max(batches)}/{min(batches)}"
    ratios = {
        "TTFP, async_chunk on/off": (result.ttfp_async_over_sync, "0.081, 0.108, 0.121"),
        "E2E, async_chunk on/off": (result.e2e_async_over_sync, "0.939, 1.040, 0.825"),
        "TTFT, async_chunk on/off": (result.ttft_async_over_sync, "1.03, 1.54, 5.20"),
        "RTF, async_chunk on/off": (result.rtf_async_over_sync, "0.92, 1.07, 0.84"),
        "CPU time per request, async_chunk on/off": (result.cpu_async_over_sync, "-"),
        f"E2E, Code2Wav batch {pair}, async_chunk off": (
            result.e2e_batch64_over_1,
            "0.988, 1.036, 0.704",
        ),
        f"E2E, Code2Wav batch {pair}, async_chunk on": (result.e2e_batch64_over_1_async, "-"),
        "E2E, async output on/off": (result.e2e_async_output_over_off, "-"),
        "Talker step gap, async output on/off": (
            result.talker_step_gap_async_output_over_off,
            "0.015 at 64",
        ),
    }
    keys = list(result.ttfp_async_over_sync)
    rows = tuple(
        (name, *(number(ours.get(key), 3) for key in keys), published)
        for name, (ours, published) in ratios.items()
    )
    columns = ("", *(f"at {key}" for key in keys), "published at 1, 4, 10 (H800)")
    return Table("Ratios of medians, by concurrency", columns, rows)


def _stages_table(result: AblationResult) -> Table:
    rows = []
    for cell in result.cells:
        stages, ar = list(cell.busy_fraction), list(cell.step_ms)
        rows.append(
            (
                *_mode_cells(cell),
                " / ".join(number(cell.step_ms[stage], 2) for stage in ar),
                " / ".join(number(cell.step_gap_ms[stage], 3) for stage in ar),
                " / ".join(number(cell.busy_fraction[stage], 3) for stage in stages),
                " / ".join(number(cell.cpu_s_per_request.get(stage), 2) for stage in stages),
                number(cell.e2e_over_busiest_stage, 3),
            )
        )
    columns = (
        *MODE_COLUMNS, "Step ms", "Gap ms", "Busy", "CPU s/request", "E2E over busiest stage",
    )  # fmt: skip
    order = " / ".join(result.busy_fraction)
    return Table(
        f"Stages ({order}): median step, median gap, share of time busy", columns, tuple(rows)
    )


def _mode_cells(cell: Cell) -> tuple[str, ...]:
    chunk = "on" if cell.mode.async_chunk else "off"
    output = "" if cell.mode.async_output else ", async output off"
    return chunk + output, str(cell.mode.code2wav_batch), str(cell.concurrency)


def _long_table(result: AblationResult) -> Table:
    rows = []
    for row in result.long_context:
        for edge, cost in row.edges.items():
            rows.append(
                (
                    str(row.input_len),
                    number(row.mean["e2e_ms"]),
                    number(row.mean["ttft_ms"]),
                    number(row.mean["ttfp_ms"]),
                    edge,
                    number(cost.bytes_per_step),
                    number(cost.us_per_step),
                    number(cost.put_us),
                    number(cost.get_us),
                    number(cost.hop_us),
                )
            )
    columns = (
        "Input", "E2E", "TTFT", "TTFP", "Edge", "bytes/step", "µs/step", "put µs", "get µs",
        "put to arrival µs",
    )  # fmt: skip
    return Table("Long context: what an edge costs per decode step", columns, tuple(rows))
