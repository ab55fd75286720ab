"""What a run against a server comes to: figures, the field's printed layout, a JSON result.

Only successes count, in every figure but the number of failures. Definitions of single requests
are in `stretto.metrics`; here they are spread over the run. Where a server sends its words in
bursts and no gap between tokens was seen, its own first stage's figures stand in for ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.bench.load import Load, Outcome, peak_concurrency
from stretto.errors import ConfigError
from stretto.metrics import spread

WIDTH = 50
# Metrics by their names on the command line, with the key of the result and the section's title.
TEXT_METRICS = {
    "ttft": ("ttft_ms", "Time to First Token"),
    "tpot": ("tpot_ms", "Time per Output Token (excl. 1st token)"),
    "itl": ("itl_ms", "Inter-token Latency"),
}
WHOLE_METRICS = {"e2el": ("e2el_ms", "End-to-end Latency")}
SOUND_METRICS = {
    "audio_ttfp": ("audio_ttfp_ms", "Time to First Packet"),
    "audio_rtf": ("audio_rtf", "Real Time Factor"),
    "audio_duration": ("audio_duration_s", "Audio Duration"),
    "audio_underrun": ("audio_underrun_s", "Playback Underrun"),
}
METRICS = {**WHOLE_METRICS, **TEXT_METRICS, **SOUND_METRICS}
UNITS = {"ms": " (ms)", "s": " (s)", "rtf": ""}
# `audio_ttft` is what the field's client calls TTFP here, and here only.
GOALS = ("ttft", "tpot", "e2el", "audio_ttfp", "audio_ttft")


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures are told of the run, and which of them are wanted."""

    backend: str
    model: str
    label: str
    max_concurrency: int | None = None
    request_rate: float = math.inf
    metrics: tuple[str, ...] = tuple(name for name in METRICS if name != "audio_duration")
    percentiles: tuple[float, ...] = (99.0,)
    goals_ms: dict[str, float] = {}
    continuity_threshold_s: float = 0.1

    def __post_init__(self) -> None:
        known = {"--percentile-metrics": METRICS, "--goodput": GOALS}
        given = {"--percentile-metrics": self.metrics, "--goodput": self.goals_ms}
        for option, names in given.items():
            for name in names:
                if name not in known[option]:
                    raise ConfigError(
                        f"{option}: {name!r} is not known; there are {', '.join(known[option])}"
                    )


def _figures_of(outcome: Outcome) -> dict[str, float | None]:
    """One success by the names of goals and metrics; what there was none of counts 0, as in the
    field's client, but for TPOT: a single token has none."""
    timeline = outcome.timeline
    ttfp_ms = (timeline.ttfp_s or 0.0) * 1e3
    return {
        "ttft": (timeline.ttft_s or 0.0) * 1e3,
        "tpot": _token_times_ms(outcome)[0],
        "e2el": timeline.e2el_s * 1e3,
        "audio_ttfp": ttfp_ms,
        "audio_ttft": ttfp_ms,
        "audio_rtf": timeline.rtf or 0.0,
        "audio_duration": timeline.sound.duration_s,
        "audio_underrun": timeline.sound.underrun_s,
    }


def _token_times_ms(outcome: Outcome) -> tuple[float | None, list[float]]:
    """TPOT and the ITL samples."""
    timeline, entry = outcome.timeline, outcome.stages.get("0")
    if entry is not None and not any(timeline.inter_token_s):
        return entry.vllm_tpot_ms, entry.vllm_itls_ms or []
    tpot_ms = None if timeline.tpot_s is None else timeline.tpot_s * 1e3
    return tpot_ms, [gap_s * 1e3 for gap_s in timeline.inter_token_s]


def _output_tokens(outcome: Outcome) -> int:
    """What the server says, else what was counted."""
    entry = outcome.stages.get("0")
    told = 0 if entry is None else entry.num_tokens_out or 0
    return max(told, outcome.timeline.num_text_tokens) or outcome.timeline.text.num_tokens


def figures(load: Load, settings: RunSettings) -> dict[str, Any]:
    """The result of a run; its keys are those of the field's client, and some more."""
    good = [outcome for outcome in load.outcomes if outcome.error is None]
    requests = [_figures_of(outcome) for outcome in good]
    sounds = [outcome.timeline.sound for outcome in good]
    # No wall is so short; but nothing may have been asked at all.
    wall_s = load.wall_s or math.inf
    duration_s = math.fsum(sound.duration_s for sound in sounds)
    output_tokens = sum(_output_tokens(outcome) for outcome in good)
    input_tokens = sum(o.timeline.num_prompt_tokens or o.prompt.num_tokens or 0 for o in good)
    continuous = [sound.underrun_s <= settings.continuity_threshold_s for sound in sounds]
    result: dict[str, Any] = {
        "kind": "serve",
        "label": settings.label,
        "backend": settings.backend,
        "model": settings.model,
        "max_concurrency": settings.max_concurrency,
        # JSON has no infinity.
        "request_rate": None if math.isinf(settings.request_rate) else settings.request_rate,
        "duration": load.wall_s,
        "completed": len(good),
        "failed": len(load.outcomes) - len(good),
        "request_throughput": len(good) / wall_s,
        "request_goodput": None,
        "peak_concurrent_requests": float(peak_concurrency([o.timeline for o in good])),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "output_throughput": output_tokens / wall_s,
        "peak_output_throughput": _peak_tokens_per_s(good),
        "total_token_throughput": (input_tokens + output_tokens) / wall_s,
        "total_audio_duration_s": duration_s,
        "total_audio_frames": sum(outcome.timeline.num_samples for outcome in good),
        "audio_throughput": duration_s / wall_s,
        "audio_gaps": sum(sound.num_gaps for sound in sounds),
        "audio_continuity_ok_rate": sum(continuous) / max(len(sounds), 1),
        "mean_first_packet_s": spread([sound.first_duration_s for sound in sounds]).mean,
        "errors": sorted({outcome.error for outcome in load.outcomes if outcome.error}),
    }
    if settings.goals_ms:
        reached = sum(
            all((own[name] or 0.0) <= limit for name, limit in settings.goals_ms.items())
            for own in requests
        )
        result["request_goodput"] = reached / wall_s
    for name, (key, _) in METRICS.items():
        some = [value for own in requests if (value := own.get(name)) is not None]
        if name == "itl":
            some = [gap_ms for outcome in good for gap_ms in _token_times_ms(outcome)[1]]
        lies = spread(some, settings.percentiles)
        result |= {f"mean_{key}": lies.mean, f"median_{key}": lies.median}
        result |= {f"{name}_{key}": value for name, value in lies.percentiles.items()}
    return result


def _peak_tokens_per_s(good: Sequence[Outcome]) -> float:
    """The most text tokens that came within one second of the run."""
    began_s = min((outcome.timeline.sent_s for outcome in good), default=0.0)
    seconds: Counter[int] = Counter()
    for outcome in good:
        for at_s, num_tokens in outcome.timeline.token_arrivals:
            seconds[int(at_s - began_s)] += num_tokens
    return float(max(seconds.values(), default=0))


# ---- the printed layout --------------------------------------------------------------------------


def layout(result: Mapping[str, Any], settings: RunSettings) -> str:
    """The result as the field's client prints it, with what it does not measure at the end."""
    peak = ("Peak concurrent requests:", result["peak_concurrent_requests"])
    threshold_ms = settings.continuity_threshold_s * 1000
    rtf = result["mean_audio_rtf"]
    lines = [
        _head(" Serving Benchmark Result ", "="),
        *_rows(
            ("Successful requests:", result["completed"]),
            ("Failed requests:", result["failed"]),
            ("Maximum request concurrency:", settings.max_concurrency),
            ("Request rate configured (RPS):", result["request_rate"]),
            ("Benchmark duration (s):", result["duration"]),
            ("Request throughput (req/s):", result["request_throughput"]),
            ("Request goodput (req/s):", result["request_goodput"]),
            peak,
        ),
        *_spreads(result, settings, WHOLE_METRICS),
        _head(" Text Result ", "="),
        *_rows(
            ("Total input tokens:", result["total_input_tokens"]),
            ("Total generated tokens:", result["total_output_tokens"]),
            ("Output token throughput (tok/s):", result["output_throughput"]),
            ("Peak output token throughput (tok/s):", result["peak_output_throughput"]),
            peak,
            ("Total Token throughput (tok/s):", result["total_token_throughput"]),
        ),
        *_spreads(result, settings, TEXT_METRICS),
        _head(" Audio Result ", "="),
        *_rows(
            ("Total audio duration generated(s):", result["total_audio_duration_s"]),
            ("Total audio frames generated:", result["total_audio_frames"]),
            ("Audio throughput(audio duration/s):", result["audio_throughput"]),
        ),
        *_spreads(result, settings, SOUND_METRICS),
        _head("Playback from the first packet", "-"),
        *_rows(
            ("Gaps, all requests:", result["audio_gaps"]),
            (f"Continuity OK (gaps <= {threshold_ms:g} ms):", result["audio_continuity_ok_rate"]),
            ("Mean first packet (ms of sound):", result["mean_first_packet_s"] * 1000),
            ("Mean x realtime (1 / RTF):", 1 / rtf if rtf else None),
            ("Server CPU seconds per request:", result.get("server_cpu_s_per_request")),
            ("Server resident memory, PSS (MB):", result.get("server_pss_mb")),
        ),
        "=" * WIDTH,
    ]
    return "\n".join(lines)


def _spreads(
    result: Mapping[str, Any], settings: RunSettings, metrics: Mapping[str, tuple[str, str]]
) -> list[str]:
    lines: list[str] = []
    for name, (key, title) in metrics.items():
        if name not in settings.metrics:
            continue
        lines.append(_head(title, "-"))
        shown = f"{name.upper()}{UNITS[key.rsplit('_', 1)[1]]}:"
        for prefix in ("mean", "median", *(f"p{p:g}" for p in settings.percentiles)):
            lines.append(_row(f"{prefix.capitalize()} {shown}", result[f"{prefix}_{key}"]))
    return lines


def _head(title: str, fill: str) -> str:
    return title.center(WIDTH, fill)


def _rows(*rows: tuple[str, float | None]) -> list[str]:
    """What there is nothing of has no row."""
    return [_row(name, value) for name, value in rows if value is not None]


def _row(name: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}"


def stage_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Means of what the server said of its stages."""
    lines = []
    for number in sorted({number for outcome in outcomes for number in outcome.stages}):
        told = [outcome.stages[number] for outcome in outcomes if number in outcome.stages]
        out = spread([float(stage.num_tokens_out or 0) for stage in told]).mean
        busy_ms = spread([stage.stage_gen_time_ms or 0.0 for stage in told]).mean
        lines += _rows(
            (f"Stage {number}: mean units out:", out),
            (f"Stage {number}: mean generation time (ms):", busy_ms),
        )
    return lines
