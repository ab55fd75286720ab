"""The report is one page that a browser shows without a word of complaint and without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.bench.figures import AblationResult
from stretto.bench.report import write_report
from stretto.cli import main
from stretto.errors import ConfigError

CHROMIUM = shutil.which("chromium")
MS = 1000.0


def trace_of_one_request() -> dict[str, Any]:
    """As the tracer writes it: two thinker steps, three talker steps, two pieces with a gap."""
    names = {1: "front", 2: "thinker", 3: "talker", 4: "code2wav"}
    events: list[dict[str, Any]] = []
    for pid, name in names.items():
        for kind in ("process_name", "thread_name"):
            events.append({"name": kind, "ph": "M", "pid": pid, "tid": pid, "args": {"name": name}})

    def span(pid: int, name: str, began_ms: float, length_ms: float, **args: Any) -> None:
        ts, dur = began_ms * MS, length_ms * MS
        events.append(
            {"name": name, "ph": "X", "pid": pid, "tid": pid, "ts": ts, "dur": dur, "args": args}
        )

    span(1, "request", 10, 490, request="r")
    for index, (began, rows) in enumerate([(11, 20), (31, 0)]):
        span(2, "step", began, 18, after_wait=False, requests=1, prompt_rows=rows)
        span(2, "put", began + 18, 0.1, key=f"r_0_{index}", bytes=180, cpu_us=9.0)
        span(3, "get", began + 18.1, 0.1, key=f"r_0_{index}", bytes=180, cpu_us=9.0)
        span(1, "text", began + 19, 0, request="r")
    for began, rows in ((50, 12), (80, 0), (110, 0)):
        span(3, "step", began, 28, after_wait=False, requests=1, prompt_rows=rows)
    for index, began in enumerate((120, 400)):
        span(3, "put", began, 0.1, key=f"r_1_{index}", bytes=170, cpu_us=9.0)
        span(4, "get", began + 0.1, 0.1, key=f"r_1_{index}", bytes=170, cpu_us=9.0)
        span(4, "step", began + 1, 20, after_wait=True, requests=1, frames=2)
        span(1, "audio", began + 25, 0, request="r", frames=2)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@pytest.fixture
def files(ablation_result: AblationResult, tmp_path: Path) -> list[Path]:
    result, trace, served = (tmp_path / f"{name}.json" for name in ("ablation", "trace", "served"))
    result.write_bytes(msgspec.json.encode(ablation_result))
    trace.write_text(json.dumps(trace_of_one_request()))
    served.write_text(
        json.dumps(
            {
                "kind": "serve",
                "label": "another server <beta>",
                "max_concurrency": 4,
                "peak_concurrent_requests": 4,
                "mean_audio_ttfp_ms": 800.0,
                "mean_audio_rtf": 0.9,
                "mean_e2el_ms": 7000.0,
                "anything": "else",
            }
        )
    )
    return [result, trace, served]


def browse(page: Path) -> tuple[str, str]:
    """The page's DOM after loading, and what the browser's console said."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom",
                "--virtual-time-budget=2000", page.as_uri(),
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    return done.stdout, "\n".join(re.findall(r".*CONSOLE.*", done.stderr))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_the_page_without_console_errors(files: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "out" / "report.html"
    assert main(["bench", "report", *map(str, files), "-o", str(page)]) == 0
    dom, said = browse(page)
    assert said == ""
    # Three measures over concurrency, and the request close up and whole.
    assert dom.count("<svg") == 5
    assert dom.count("<table") == 4
    assert "another server &lt;beta&gt;" in dom or "another server" in dom
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</body>", "<script>missing()</script></body>"))
    assert "missing is not defined" in browse(broken)[1], "console errors are not heard"


def test_the_page_loads_nothing_and_the_plots_stand_beside_it(
    files: list[Path], tmp_path: Path
) -> None:
    written = write_report(files, tmp_path / "report.html")
    assert [path.name for path in written] == [
        "report.html",
        "report-ttfp.png",
        "report-rtf.png",
        "report-e2e.png",
        "report-waterfall-trace-first.png",
        "report-waterfall-trace-whole.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])
    page = written[0].read_text()
    # Namespaces are names, not places.
    places = re.findall(r"(?:src|href)=[\"']([^\"'#]+)", page)
    assert set(places) <= {"data:,"}
    assert "url(http" not in page and "@import" not in page


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.json"
    stranger.write_text('{"kind": "unknown"}')
    with pytest.raises(ConfigError, match=r"stranger.json: neither a result"):
        write_report([stranger], tmp_path / "report.html")
    with pytest.raises(ConfigError, match=r"gone.json: No such file"):
        write_report([tmp_path / "gone.json"], tmp_path / "report.html")
