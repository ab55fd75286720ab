"""A page of plots from results and traces, and the plots as PNG beside it.

    over concurrency   TTFP, RTF and E2E: a line for each mode of an ablation, each label of runs
    waterfall          one request, stage by stage: the first sound close up, and the whole of it
    tables             as the commands printed them

The page is one file: plots stand in it as SVG, and it loads nothing.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from stretto.bench import figures, peers
from stretto.bench.tables import Table
from stretto.bench.traces import Trace, load_trace
from stretto.errors import ConfigError
from stretto.trace import Span

FRAME_NS = 80_000_000
# How many times the wait for the first sound a close-up shows.
CLOSE_UP = 3
# Colour-blind safe (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PREFILL, DECODE, FLIGHT, PLAY, GAP = COLOURS[1], COLOURS[0], COLOURS[3], COLOURS[2], "#DD2222"
# Names and units by the key of a point.
MEASURES = {
    "ttfp": ("Time to first packet", "s"),
    "rtf": ("Real time factor", ""),
    "e2e": ("End-to-end latency", "s"),
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
figure { margin: 1rem 0 } figure svg { width: 100%; height: auto }
figcaption, .about { color: #555 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th { border-bottom: 2px solid #999; text-align: right; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
"""


class Point(msgspec.Struct, frozen=True):
    """Means of one line at one concurrency."""

    concurrency: int
    ttfp: float
    rtf: float
    e2e: float


class Plot(msgspec.Struct, frozen=True):
    name: str
    caption: str
    figure: Figure


class _Served(msgspec.Struct, frozen=True, tag="serve", tag_field="kind"):
    """Of a `bench serve` result what the plots need."""

    label: str
    max_concurrency: int | None
    peak_concurrent_requests: int
    mean_audio_ttfp_ms: float
    mean_audio_rtf: float
    mean_e2el_ms: float


Result = figures.AblationResult | peers.PeersResult | _Served


def write_report(files: Sequence[Path], output: Path) -> list[Path]:
    """Writes the page and its PNGs; the files written.

    Raises:
        ConfigError: a file is neither a result nor a trace.
    """
    lines: dict[str, list[Point]] = {}
    tables: list[tuple[str, Table]] = []
    plots: list[Plot] = []
    for file in files:
        read = _read(file)
        match read:
            case Trace():
                plots += _waterfalls(read, file.stem)
            case figures.AblationResult():
                for cell in read.cells:
                    mean = cell.mean
                    point = Point(
                        cell.concurrency, mean["ttfp_ms"] / 1e3, mean["rtf"], mean["e2e_ms"] / 1e3
                    )
                    lines.setdefault(f"{read.model}: {cell.mode.label}", []).append(point)
                tables += [(read.machine, table) for table in figures.tables_of(read)]
            case peers.PeersResult():
                tables += [(read.machine, table) for table in peers.tables_of(read)]
            case _Served():
                point = Point(
                    read.max_concurrency or read.peak_concurrent_requests,
                    read.mean_audio_ttfp_ms / 1e3,
                    read.mean_audio_rtf,
                    read.mean_e2el_ms / 1e3,
                )
                lines.setdefault(read.label, []).append(point)
    if lines:
        plots = [_over_concurrency(lines, name) for name in MEASURES] + plots
    output.parent.mkdir(parents=True, exist_ok=True)
    written = [output]
    for plot in plots:
        png = output.with_name(f"{output.stem}-{plot.name}.png")
        plot.figure.savefig(png, dpi=150)
        written.append(png)
    output.write_text(_page([file.name for file in files], plots, tables), encoding="utf-8")
    return written


def _read(file: Path) -> Result | Trace:
    try:
        content = file.read_bytes()
        if b'"traceEvents"' in content[:100]:
            return load_trace(file)
        return msgspec.json.decode(content, type=Result)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{file}: neither a result of stretto bench nor a trace: {error}"
        ) from error


# ---- plots ---------------------------------------------------------------------------------------


def _over_concurrency(lines: dict[str, list[Point]], name: str) -> Plot:
    title, unit = MEASURES[name]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    ticks = sorted({point.concurrency for points in lines.values() for point in points})
    for index, (label, points) in enumerate(lines.items()):
        ordered = sorted(points, key=lambda point: point.concurrency)
        axes.plot(
            [point.concurrency for point in ordered],
            [msgspec.structs.asdict(point)[name] for point in ordered],
            marker="o",
            label=label,
            color=COLOURS[index % len(COLOURS)],
            linestyle="-" if index < len(COLOURS) else "--",
        )
    axes.set_xlabel("requests at once")
    axes.set_ylabel(f"{title}, mean{f' ({unit})' if unit else ''}")
    axes.set_xticks(ticks)
    axes.grid(alpha=0.3)
    if name == "ttfp":
        # Chunking off is tens of times later: both can be read on a logarithmic scale only.
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    if name == "rtf":
        axes.axhline(1.0, color=GAP, linewidth=1, linestyle=":")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    captions = {
        "ttfp": "From sending to the first sound.",
        "rtf": "Time to the last sound over its duration; above the dotted line it cannot stream.",
        "e2e": "From sending to the end.",
    }
    return Plot(name, f"{title}. {captions[name]}", figure)


def _waterfalls(trace: Trace, name: str) -> list[Plot]:
    """One request with its playback, and close up around its first sound if that comes early."""
    request = _shown_request(trace)
    if request is None:
        return []
    sounds = [s for s in trace.sounds if s.args["request"] == request.args["request"]]
    whole_ns = request.ended_ns - request.began_ns
    playing = _playback(request, sounds)
    end_ns = max([whole_ns, *(began + length for began, length, _ in playing)])
    plots = []
    first_ns = sounds[0].began_ns - request.began_ns if sounds else whole_ns
    parts = [("whole", end_ns, "to the end of its playback")]
    if CLOSE_UP * first_ns < end_ns:
        parts.insert(0, ("first", CLOSE_UP * first_ns, "until shortly after its first sound"))
    for part, until_ns, about in parts:
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        _draw_waterfall(figure.add_subplot(), trace, request, playing, until_ns)
        caption = (
            f"{name}: one request, {about}. Prefill orange, decode and vocoder blue, chunks under "
            "way purple, playback green, gaps in it red."
        )
        plots.append(Plot(f"waterfall-{name}-{part}", caption, figure))
    return plots


def _shown_request(trace: Trace) -> Span | None:
    """A typical one, by how long it took, of those that ran alone; of all, when none did."""

    def is_alone(span: Span) -> bool:
        return not any(
            other is not span and other.began_ns < span.ended_ns and other.ended_ns > span.began_ns
            for other in trace.requests
        )

    alone = [span for span in trace.requests if is_alone(span)]
    some = sorted(alone or trace.requests, key=lambda span: span.duration_ms)
    return some[len(some) // 2] if some else None


def _playback(request: Span, sounds: Sequence[Span]) -> list[tuple[int, int, bool]]:
    """Begin and length in ns since sending, of what is played and, marked true, of what is not."""
    pieces: list[tuple[int, int, bool]] = []
    until = 0
    for sound in sounds:
        at = sound.began_ns - request.began_ns
        if pieces and at > until:
            pieces.append((until, at - until, True))
        began = max(at, until)
        until = began + sound.args["frames"] * FRAME_NS
        pieces.append((began, until - began, False))
    return pieces


def _draw_waterfall(
    axes: Axes,
    trace: Trace,
    request: Span,
    playing: Sequence[tuple[int, int, bool]],
    until_ns: int,
) -> None:
    began_ns, request_id = request.began_ns, request.args["request"]

    def bars(
        row: int, pieces: Sequence[tuple[int, int]], colour: str, edge: str | None = None
    ) -> None:
        seen = [(b / 1e9, n / 1e9) for b, n in pieces if b < until_ns]
        # An edge of its own colour keeps what is shorter than a pixel visible.
        axes.broken_barh(
            seen, (row - 0.36, 0.72), facecolors=colour, edgecolors=edge or colour, linewidth=0.5
        )

    names: list[str] = ["text"]
    ticks = [span for span in trace.texts if span.args["request"] == request_id]
    bars(0, [(span.began_ns - began_ns, 0) for span in ticks], DECODE)
    stages = _stages_in_order(trace)
    for index, stage in enumerate(stages):
        row = len(names)
        names.append(stage)
        steps = trace.steps_within(stage, began_ns, request.ended_ns)
        for colour, prefill in ((DECODE, False), (PREFILL, True)):
            pieces = [
                (step.began_ns - began_ns, step.ended_ns - step.began_ns)
                for step in steps
                if (step.args.get("prompt_rows", 0) > 0) is prefill
            ]
            bars(row, pieces, colour, "white" if until_ns < request.ended_ns - began_ns else None)
        if index + 1 < len(stages):
            edge = f"{stage}->{stages[index + 1]}"
            row = len(names)
            names.append("chunks")
            hops = trace.hops_of(edge, {request_id})
            bars(row, [(hop.began_ns - began_ns, hop.flight_ns) for hop in hops], FLIGHT)
    row = len(names)
    names.append("playback")
    bars(row, [(b, n) for b, n, is_gap in playing if not is_gap], PLAY)
    bars(row, [(b, n) for b, n, is_gap in playing if is_gap], GAP)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, until_ns / 1e9)
    axes.set_xlabel("s since sending")
    axes.grid(axis="x", alpha=0.3)


def _stages_in_order(trace: Trace) -> list[str]:
    """As the edges join them; a pipeline of one stage has none."""
    edges = dict(hop.edge.split("->") for hop in trace.hops)
    if not edges:
        return list(trace.steps)
    stage: str | None = next(name for name in edges if name not in edges.values())
    order = []
    while stage is not None:
        order.append(stage)
        stage = edges.get(stage)
    return order


# ---- the page ------------------------------------------------------------------------------------


def _page(
    sources: Sequence[str], plots: Sequence[Plot], tables: Sequence[tuple[str, Table]]
) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>stretto bench</title>',
        # Browsers ask for an icon otherwise, and there is no server to have one.
        '<link rel="icon" href="data:,">',
        f"<style>{STYLE}</style></head><body>",
        "<h1>stretto bench</h1>",
        f'<p class="about">From {html.escape(", ".join(sources))}.</p>',
    ]
    parts += [
        f"<figure>{_svg(plot.figure)}<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        for plot in plots
    ]
    parts += [_html_table(machine, table) for machine, table in tables]
    parts.append("</body></html>")
    return "\n".join(parts)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # Without metadata: it would name its maker's address and the hour.
    nothing: dict[str, Any] = {"Creator": None, "Date": None, "Format": None, "Type": None}
    figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _html_table(machine: str, table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2><p class='about'>{html.escape(machine)}</p>"
        f"<div class='scroll'><table><thead>{row(table.columns, 'th')}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
