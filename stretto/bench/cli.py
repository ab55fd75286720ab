"""The `stretto bench` commands: options in, tables and one JSON object out."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli import EXIT_FAILED, add_command, add_deployment, cache_dir
from stretto.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from stretto.bench.client import Target
    from stretto.bench.datasets import Prompt
    from stretto.bench.load import Load
    from stretto.bench.offline import Workload
    from stretto.bench.tables import Section

log = logging.getLogger(__name__)

WIDTH = 200
BACKENDS = ("openai-chat-omni", "openai-audio-speech")
DATASETS = ("random", "text", "jsonl", "seed-tts", "seed-tts-text", "seed-tts-design")


def add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="measure a server, the modes of a pipeline, stretto against transformers"
    )
    actions = bench.add_subparsers(required=True, metavar="BENCH")
    _add_serve(actions)
    _add_ablation(actions)
    _add_peers(actions)
    _add_kernels(actions)
    _add_report(actions)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in _names(text))


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(float(item) for item in _names(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    with Console(stderr=True).status("starting ...") as status:

        def note(text: str) -> None:
            # What a terminal shows; where there is none, -v tells it line by line.
            status.update(text)
            log.info(text)

        yield note


@contextmanager
def _bench_extra() -> Iterator[None]:
    """Around what needs aiohttp or matplotlib, which a plain installation does not have."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'stretto[bench]'") from error


def _command_line() -> str:
    return shlex.join(["stretto", *sys.argv[1:]])


# ---- serve ---------------------------------------------------------------------------------------


def _add_serve(actions: Any) -> None:
    command = add_command(
        actions,
        "serve",
        _serve,
        summary="put a load on a server and measure what its clients see",
        details=(
            "\nFor ours, vLLM-Omni and OpenAI; options, definitions and layout are those of the"
            "\nfield's own client. A request counts only with its end event, with sound where sound"
            "\nwas asked for, and without an error event."
        ),
    )
    add = command.add_argument
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=8091, help="default: %(default)s")
    add("--backend", choices=BACKENDS, default=BACKENDS[0], help="default: %(default)s")
    add("--endpoint", metavar="PATH", help="default: the backend's own")
    add("--model", help="default: the first that the server names")
    add("--tokenizer", metavar="MODEL", help="for random prompts; default: --model, then parrot")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--dataset-name", choices=DATASETS, default=DATASETS[0], help="default: %(default)s")
    add("--dataset-path", metavar="PATH", type=Path, help="a file, or the root of Seed-TTS")
    add("--seed-tts-locale", choices=("en", "zh"), default="en", help="default: %(default)s")
    add("--random-input-len", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--random-output-len", type=int, default=128, metavar="N",
        help="text tokens at most, of every dataset; default: %(default)s")  # fmt: skip
    add("--num-prompts", type=int, default=1000, metavar="N", help="default: %(default)s")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before, not counted")
    add("--max-concurrency", type=int, metavar="N", help="default: no limit")
    add("--request-rate", type=float, default=math.inf, metavar="R",
        help="arrivals per second, whatever the server does; default: all at once")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B", help="1 is Poisson, less is bursts")
    add("--seed", type=int, default=0, help="of prompts and arrivals; default: %(default)s")
    add("--ignore-eos", action="store_true", help="text goes on to its limit")
    add("--extra-body", "--extra_body", default="{}", metavar="JSON",
        help="put into every body; a null takes a field out")  # fmt: skip
    add("--percentile-metrics", type=_names, metavar="NAMES",
        help="of ttft,tpot,itl,e2el,audio_{ttfp,rtf,duration,underrun}")  # fmt: skip
    add("--metric-percentiles", type=_fractions, default=(99.0,), metavar="P,P", help="default: 99")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="limits that a good request keeps: ttft, tpot, e2el, audio_ttfp")  # fmt: skip
    add("--continuity-threshold-s", type=float, default=0.1, metavar="S", help="default: 0.1")
    add("--audio-sample-rate", type=int, default=24000, metavar="HZ", help="of sound as bare PCM")
    add("--audio-channels", type=int, default=1, metavar="N", help="of sound as bare PCM")
    add("--omni-request-timeout-s", type=float, default=900.0, metavar="S", help="default: 900")
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
        help="wait so long for the server; 0: do not")  # fmt: skip
    add("--print-stage", action="store_true", help="what the server says of its stages")
    add("--server-pid", type=int, metavar="PID",
        help="of a server on this machine: CPU time and memory of it and its children")  # fmt: skip
    add("--profile", action="store_true", help="bracket the run by /start_profile, /stop_profile")
    add("--label", help="the run's name in reports; default: the model")
    add("--save-result", action="store_true", help="write the JSON result")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="default: here")
    add("--result-filename", metavar="NAME", help="default: made of backend, model and time")


def _serve(options: argparse.Namespace) -> int:
    from stretto.bench.serve import RunSettings

    metrics = {} if options.percentile_metrics is None else {"metrics": options.percentile_metrics}
    # Settings that are wrong are refused before anything is sent.
    settings = RunSettings(
        backend=options.backend,
        model=options.model or "",
        label=options.label or "",
        max_concurrency=options.max_concurrency,
        request_rate=options.request_rate,
        percentiles=options.metric_percentiles,
        goals_ms=_goals(options.goodput),
        continuity_threshold_s=options.continuity_threshold_s,
        **metrics,
    )
    with _bench_extra():
        return asyncio.run(_serve_run(options, settings))


async def _serve_run(options: argparse.Namespace, settings: Any) -> int:
    import aiohttp
    import msgspec

    from stretto.bench.client import served_model, wait_until_ready
    from stretto.bench.serve import figures, layout, stage_lines

    base_url = (options.base_url or f"http://{options.host}:{options.port}").rstrip("/")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        if options.ready_check_timeout_sec > 0:
            await wait_until_ready(session, base_url, options.ready_check_timeout_sec)
        model = options.model or await served_model(session, base_url)
        settings = msgspec.structs.replace(
            settings, model=model, label=options.label or Path(model).name
        )
        target = _target(options, base_url, model)
        prompts = _prompts(options, model, options.num_prompts + options.num_warmups)
        load, used = await _serve_load(options, session, base_url, target, prompts)
    result = {**figures(load, settings), **used}
    print(layout(result, settings))
    if options.print_stage:
        print("\n".join(stage_lines(load.outcomes)))
    for error in result["errors"]:
        print(f"failed: {error}", file=sys.stderr)
    if options.save_result:
        name = options.result_filename or (
            f"{options.backend}-{Path(model).name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        )
        options.result_dir.mkdir(parents=True, exist_ok=True)
        (options.result_dir / name).write_bytes(msgspec.json.encode(result))
        print(f"wrote {options.result_dir / name}", file=sys.stderr)
    return 0 if result["completed"] else EXIT_FAILED


async def _serve_load(
    options: argparse.Namespace,
    session: aiohttp.ClientSession,
    base_url: str,
    target: Target,
    prompts: list[Prompt],
) -> tuple[Load, dict[str, float]]:
    """Runs the load; what it came to, and what the server's processes used for it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from stretto.bench.client import ask
    from stretto.bench.load import Outcome, arrival_times, run_load
    from stretto.bench.processes import cpu_s, pss_mb, tree

    # Others than those measured, which a server that keeps prefixes would then know.
    prompts, warm_ups = prompts[: options.num_prompts], prompts[options.num_prompts :]
    if warm_ups:
        await run_load(
            warm_ups,
            lambda prompt: ask(session, target, prompt),
            arrivals=[0.0] * len(warm_ups),
            max_concurrency=options.max_concurrency,
            on_done=lambda _: None,
        )
    if options.profile:
        (await session.post(f"{base_url}/start_profile")).raise_for_status()
    pids = [] if options.server_pid is None else tree(options.server_pid)
    before_s = sum(cpu_s(pid) for pid in pids)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=len(prompts))

        def done(_: Outcome) -> None:
            bar.advance(task)

        load = await run_load(
            prompts,
            lambda prompt: ask(session, target, prompt),
            arrivals=arrival_times(
                len(prompts),
                rate=options.request_rate,
                burstiness=options.burstiness,
                seed=options.seed,
            ),
            max_concurrency=options.max_concurrency,
            on_done=done,
        )
    if options.profile:
        (await session.post(f"{base_url}/stop_profile")).raise_for_status()
    if not pids:
        return load, {}
    used_s = sum(cpu_s(pid) for pid in pids) - before_s
    return load, {
        "server_cpu_s_per_request": used_s / len(prompts),
        "server_pss_mb": pss_mb(pids),
    }


def _target(options: argparse.Namespace, base_url: str, model: str) -> Target:
    import msgspec

    from stretto.bench.client import ENDPOINTS, Target

    try:
        extra = msgspec.json.decode(options.extra_body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body: {error}") from error
    key = options.api_key
    # The server's own figures stand in where words come in bursts.
    wanted = options.percentile_metrics or ("tpot",)
    return Target(
        backend=options.backend,
        url=base_url + (options.endpoint or ENDPOINTS[options.backend]),
        model=model,
        sample_rate=options.audio_sample_rate,
        channels=options.audio_channels,
        extra_body=extra,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        ignore_eos=options.ignore_eos,
        stage_metrics=options.print_stage or bool({"tpot", "itl"} & set(wanted)),
        timeout_s=options.omni_request_timeout_s,
    )


def _prompts(options: argparse.Namespace, model: str, count: int) -> list[Prompt]:
    from stretto.bench import datasets

    path, length = options.dataset_path, options.random_output_len
    if options.dataset_name == "random":
        return datasets.random_prompts(
            datasets.RandomWords(_tokenizer_file(options.tokenizer, model)),
            count=count,
            input_len=options.random_input_len,
            output_len=length,
            seed=options.seed,
        )
    if path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    if options.dataset_name == "text":
        prompts = datasets.text_prompts(path, length)
    elif options.dataset_name == "jsonl":
        prompts = datasets.jsonl_prompts(path, length)
    else:
        prompts = datasets.seed_tts_prompts(
            options.dataset_name,
            path,
            options.seed_tts_locale,
            chat=options.backend == BACKENDS[0],
            output_len=length,
        )
    return datasets.repeated(prompts, count)


def _tokenizer_file(name: str | None, model: str) -> Path:
    """The `tokenizer.json` to count tokens by; a server's model need not be a name we know."""
    from stretto.models.tiny import CACHED_CHECKPOINTS
    from stretto.pipeline.frontends import load_frontend
    from stretto.pipeline.model import PARROT, model_directory, open_model

    if name is None:
        known = model in (PARROT, *CACHED_CHECKPOINTS) or Path(model, "config.json").is_file()
        name = model if known else PARROT
    own = model_directory(name, cache_dir()) / "tokenizer.json"
    if own.is_file():
        return own
    opened = open_model(name, cache_dir=cache_dir(), deploy_config=None, flags={})
    return Path(load_frontend(opened, cache_dir=cache_dir()).tokenizer_file)


def _goals(given: list[str]) -> dict[str, float]:
    goals = {}
    for goal in given:
        name, _, limit = goal.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput: expected NAME:MS, not {goal!r}") from None
    return goals


# ---- ablation ------------------------------------------------------------------------------------


def _add_workload(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", default="tiny", help="default: %(default)s")
    add("--input-len", type=int, default=100, metavar="N",
        help="tokens of the prompt, chat template included; default: %(default)s")  # fmt: skip
    add("--output-len", type=int, default=100, metavar="N", help="text tokens; default: 100")
    add("--frames", type=int, default=340, metavar="N", help="frames of 80 ms; default: 340")
    add("--seed", type=int, default=0, help="of prompts and sampling; default: %(default)s")
    _add_results(command)


def _add_results(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--json", type=Path, metavar="FILE", help="write the last line's JSON there too")
    add("--markdown", type=Path, metavar="FILE",
        help="write the tables there, or between their marks in a document")  # fmt: skip


def _workload(options: argparse.Namespace) -> Workload:
    from stretto.bench.offline import Workload

    return Workload(
        input_len=options.input_len,
        output_len=options.output_len,
        frames=options.frames,
        seed=options.seed,
    )


def _section(options: argparse.Namespace, bench: str) -> Section | None:
    from stretto.bench.tables import Section

    if options.markdown is None:
        return None
    return Section(options.markdown, f"bench {bench} {Path(options.model).name}")


def _publish(options: argparse.Namespace, section: Section | None, result: Any, tables: Any) -> int:
    """Tables for a reader, a document if one was named, and the JSON as the last line."""
    import msgspec
    from rich.console import Console

    from stretto.bench.tables import show

    # A file or a pipe has no width; tables there are not to be squeezed into 80 columns.
    show(tables, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    encoded = msgspec.json.encode(result)
    if options.json is not None:
        options.json.write_bytes(encoded)
    if section is not None:
        about = f"{time.strftime('%Y-%m-%d %H:%M')}, {result.machine}."
        section.write(_command_line(), about, tables)
    print(encoded.decode())
    return 0


def _add_ablation(actions: Any) -> None:
    command = add_command(
        actions,
        "ablation",
        _ablation,
        summary="measure the modes of a pipeline against each other",
        details=(
            "\nasync_chunk off and on x Code2Wav batch x concurrency, all modes up at once, runs"
            "\ninterleaved. The last line of stdout is one JSON object."
        ),
    )
    _add_workload(command)
    add = command.add_argument
    add("--concurrency", type=_numbers, default=(1, 4, 10), metavar="N,N", help="default: 1,4,10")
    add("--repeats", type=int, default=3, metavar="N", help="waves per cell; default: %(default)s")
    add("--code2wav-batch", type=_numbers, default=(1, 64), metavar="N,N",
        help="the last is the deployed one; default: 1,64")  # fmt: skip
    add("--long-context", type=_numbers, default=(100, 2000, 8000), metavar="N,N",
        help="prompt lengths for the cost of hops; default: 100,2000,8000")  # fmt: skip
    add("--deploy-config", type=Path, metavar="FILE", help="deployment YAML over the profile")
    add("--trace", type=Path, metavar="DIR", help="keep the traces, one file a mode")
    add("--inline", action="store_true", help="all stages of a mode in this process")


def _ablation(options: argparse.Namespace) -> int:
    from stretto.bench.ablation import Plan, ablate, modes_of
    from stretto.bench.figures import result_of, tables_of
    from stretto.bench.tables import machine

    plan = Plan(
        model=options.model,
        workload=_workload(options),
        modes=modes_of(options.code2wav_batch),
        concurrency=options.concurrency,
        repeats=options.repeats,
        long_inputs=options.long_context,
        inline=options.inline,
    )
    section, where = _section(options, "ablation"), machine()
    with _progress() as progress:
        measured = asyncio.run(
            ablate(
                plan,
                cache_dir=cache_dir(),
                deploy_config=options.deploy_config,
                keep_traces=options.trace,
                on_progress=progress,
            )
        )
    result = result_of(plan, measured, machine=where)
    return _publish(options, section, result, tables_of(result))


# ---- peers ---------------------------------------------------------------------------------------


def _add_peers(actions: Any) -> None:
    command = add_command(
        actions,
        "peers",
        _peers,
        summary="measure stretto against transformers' generate on the same prompts",
        details=(
            "\nGreedy, float32, the same lengths; ids and codes are compared. transformers gets 1"
            "\nor 2 threads, whichever is better here. The last line of stdout is one JSON object."
        ),
    )
    _add_workload(command)
    command.add_argument(
        "--prompts", type=int, default=3, metavar="N", help="one by one; default: %(default)s"
    )
    command.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="waves of 16; default: %(default)s"
    )
    command.add_argument("--quick", action="store_true", help="leave the 16 at once out")
    add_deployment(command)


def _peers(options: argparse.Namespace) -> int:
    from stretto.bench.peers import PeersPlan, compare, tables_of
    from stretto.bench.tables import machine

    plan = PeersPlan(
        model=options.model,
        workload=_workload(options),
        num_prompts=options.prompts,
        repeats=options.repeats,
        quick=options.quick,
        async_chunk=options.async_chunk,
    )
    section = _section(options, "peers")
    with _progress() as progress:
        result = asyncio.run(
            compare(
                plan,
                machine=machine(),
                cache_dir=cache_dir(),
                deploy_config=options.deploy_config,
                trace=options.trace,
                on_progress=progress,
            )
        )
    return _publish(options, section, result, tables_of(result))


# ---- kernels -------------------------------------------------------------------------------------


def _add_kernels(actions: Any) -> None:
    command = add_command(
        actions,
        "kernels",
        _kernels,
        summary="measure one step of each model against what the machine can do at best",
        details=(
            "\nCode predictor, decode steps and vocoder calls of Qwen3-Omni models, in one process,"
            "\nbeside the time that reading their weights and running their products takes here."
            "\nThe last line of stdout is one JSON object."
        ),
    )
    add = command.add_argument
    add("--model", default="tiny", help="default: %(default)s")
    add("--rows", type=_numbers, default=(1, 4, 16), metavar="N,N", help="default: 1,4,16")
    add("--chunks", type=_numbers, default=(1, 4, 10, 25), metavar="N,N",
        help="frames of each row in a vocoder call; default: 1,4,10,25")  # fmt: skip
    add("--repeats", type=int, default=20, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s, as deployed")
    _add_results(command)


def _kernels(options: argparse.Namespace) -> int:
    from stretto.bench.kernels import KernelPlan, measure, tables_of
    from stretto.bench.tables import machine

    plan = KernelPlan(
        model=options.model,
        rows=options.rows,
        chunks=options.chunks,
        repeats=options.repeats,
        threads=options.threads,
    )
    section = _section(options, "kernels")
    with _progress() as progress:
        result = measure(plan, machine=machine(), cache_dir=cache_dir(), on_progress=progress)
    return _publish(options, section, result, tables_of(result))


# ---- report --------------------------------------------------------------------------------------


def _add_report(actions: Any) -> None:
    command = add_command(
        actions,
        "report",
        _report,
        summary="make a page of plots from results and traces",
        details=(
            "\nFILES are JSON results of bench serve, ablation and peers, and traces (--trace). The"
            "\npage needs nothing but itself; its plots are written as PNG beside it."
        ),
    )
    command.add_argument("files", metavar="FILE", nargs="+", type=Path)
    command.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="default: %(default)s"
    )


def _report(options: argparse.Namespace) -> int:
    with _bench_extra():
        from stretto.bench.report import write_report

    for path in write_report(options.files, options.output):
        print(f"wrote {path}")
    return 0
