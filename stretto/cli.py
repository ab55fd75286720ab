"""The `stretto` command. The only module that reads the environment.

What a person reads goes to the terminal; where a script reads along, the last line of stdout is one
JSON object. Heavy imports happen inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import codecs
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto._version import __version__
from stretto.errors import ConfigError, InvalidRequest, StrettoError

if TYPE_CHECKING:
    import numpy as np

    from stretto.api import Answer, Delta, Omni

DESCRIPTION = """\
Speech-and-text models that speak while they still think.

A MODEL is a local checkpoint directory in Hugging Face layout, or a name:
  parrot   ships with stretto; says what you write (the default)
  tiny     random weights of the real architecture, made on first use; for tests
  small    the same, larger; for measurements
  tiny-tts, tiny-tts-design, tiny-tts-base    the same of Qwen3-TTS, which reads texts out
"""

EPILOG = """\
examples:
  stretto say "Computers can learn to speak." -o hello.wav
  stretto say --model tiny --max-tokens 50 --max-frames 100 "Tell me a story."
  stretto serve parrot --port 8091
  stretto bench ablation --model tiny --concurrency 1,4
  stretto verify parrot
  stretto check my-deployment.yaml

environment:
  STRETTO_CACHE     where made checkpoints are kept (default ~/.cache/stretto)
  STRETTO_QWEN_TTS  where the qwen-tts package lies, for verify (default .reference)
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the process's exit status."""
    # Nothing is ever downloaded; transformers would ask its hub otherwise.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It warns of every config key that it leaves to the model's own code.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    options = _parser().parse_args(arguments)
    level = (
        logging.DEBUG if options.verbose > 1 else logging.INFO if options.verbose else logging.ERROR
    )
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        status: int = options.run(options)
    except StrettoError as error:
        print(f"stretto: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`stretto check | head`); nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    from stretto.bench.cli import add_bench

    parser = argparse.ArgumentParser(
        prog="stretto",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stretto {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_say(commands)
    _add_serve(commands)
    _add_verify(commands)
    _add_check(commands)
    _add_models(commands)
    add_bench(commands)
    return parser


def add_command(
    commands: Any, name: str, run: Any, *, summary: str, details: str = ""
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "-v", "--verbose", action="count", default=0, help="log to stderr (-vv: every detail)"
    )
    return command


def add_deployment(command: argparse.ArgumentParser) -> None:
    """The options of every command that starts a pipeline."""
    command.add_argument(
        "--deploy-config",
        metavar="FILE",
        type=Path,
        help="deployment YAML over the bundled profile",
    )
    command.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write a Chrome trace (ui.perfetto.dev) at the end",
    )
    command.add_argument(
        "--async-chunk",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="hand chunks on as they come, or one chunk at the end of each stage",
    )


def cache_dir() -> Path:
    own = os.environ.get("STRETTO_CACHE")
    return Path(own) if own else Path.home() / ".cache" / "stretto"


# ---- say -----------------------------------------------------------------------------------------


def _add_say(commands: Any) -> None:
    command = add_command(
        commands,
        "say",
        _say,
        summary="answer a text, in writing and in sound; or read it out",
        details=(
            "\nThe answer's text appears as it is written, a line below it counts frames and sound;"
            "\nat the end come the times that matter. A Qwen3-TTS model reads the text out, with -"
            "\nwhile it is still being written to stdin."
        ),
    )
    command.add_argument("text", metavar="TEXT", help="what to say to the model; - reads stdin")
    command.add_argument("--model", default="parrot", help="default: %(default)s")
    command.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the sound as WAV")
    command.add_argument("--system", metavar="TEXT", help="a system prompt before it")
    command.add_argument("--speaker", help="a speaker of the checkpoint")
    command.add_argument("--language", help="of what is read out; default: auto")
    command.add_argument("--instructions", metavar="TEXT", help="how to read, or whose voice")
    command.add_argument(
        "--ref-audio", metavar="FILE", type=Path, help="a voice to speak like (base checkpoints)"
    )
    command.add_argument("--ref-text", metavar="TEXT", help="what is said in it")
    command.add_argument("--max-tokens", type=int, metavar="N", help="text tokens at most")
    command.add_argument("--max-frames", type=int, metavar="N", help="frames at most, 80 ms each")
    command.add_argument("--temperature", type=float, metavar="T", help="of the text; 0 is greedy")
    command.add_argument("--talker-temperature", type=float, metavar="T", help="of the speech")
    command.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    command.add_argument(
        "--initial-codec-chunk-frames", type=int, metavar="N", help="frames of the first chunk"
    )
    command.add_argument("--inline", action="store_true", help="all stages in this process")
    command.add_argument("--json", action="store_true", help="end with one JSON line of figures")
    add_deployment(command)


def _say(options: argparse.Namespace) -> int:
    from stretto.api import Omni, collect
    from stretto.pipeline.tts_frontend import TtsFrontend

    with _loading(options.model):
        omni = Omni(
            options.model,
            deploy_config=options.deploy_config,
            async_chunk=options.async_chunk,
            inline=options.inline,
            trace=options.trace,
            cache_dir=cache_dir(),
        )
    with omni:
        reads = isinstance(omni.frontend, TtsFrontend)
        events = _read_out(omni, options) if reads else _answered(omni, options)
        answer = collect(list(_shown_live(events)))
    _print_figures(answer)
    if options.output is not None:
        answer.save_wav(options.output)
        print(f"wrote {options.output}")
    if options.json:
        print(_figures_json(answer))
    return 0


def _answered(omni: Omni, options: argparse.Namespace) -> Iterator[Delta]:
    """What a model answers to a text."""
    _refuse(options, "language", "instructions", "ref_audio", "ref_text")
    text = sys.stdin.read() if options.text == "-" else options.text
    prompt = [{"role": "user", "content": text}]
    if options.system is not None:
        prompt.insert(0, {"role": "system", "content": options.system})
    return omni.stream(
        prompt,
        speaker=options.speaker,
        sampling=_given(
            temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
        ),
        talker_sampling=_given(
            temperature=options.talker_temperature, max_tokens=options.max_frames
        ),
        initial_codec_chunk_frames=options.initial_codec_chunk_frames,
    )


def _read_out(omni: Omni, options: argparse.Namespace) -> Iterator[Delta]:
    """A text as a model reads it out."""
    from stretto.pipeline.tts_frontend import Voice

    _refuse(options, "system", "temperature", "max_tokens")
    voice = None
    if options.ref_audio is not None:
        samples, sample_rate = _sound(options.ref_audio)
        voice = Voice(samples=samples, sample_rate=sample_rate, text=options.ref_text)
    else:
        _refuse(options, "ref_text")
    how = {
        "speaker": options.speaker,
        "language": options.language,
        "instructions": options.instructions,
        "voice": voice,
        "sampling": _given(
            temperature=options.talker_temperature,
            max_tokens=options.max_frames,
            seed=options.seed,
        ),
        "initial_codec_chunk_frames": options.initial_codec_chunk_frames,
    }
    if options.text == "-":
        return omni.speak(_as_written(), **how)
    return omni.stream(options.text, **how)


def _sound(path: Path) -> tuple[np.ndarray, int]:
    """A sound file as float32 [n], mono, and its sample rate. Raises InvalidRequest."""
    import soundfile

    try:
        samples, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.LibsndfileError) as error:
        raise InvalidRequest("ref_audio", f"{path} cannot be read as sound: {error}") from error
    return samples.mean(axis=1), sample_rate


def _as_written() -> Iterator[str]:
    """The text on stdin, each part as it comes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while data := os.read(sys.stdin.fileno(), 4096):
            yield decoder.decode(data)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidRequest("text", f"stdin is not UTF-8: {error}") from error


def _refuse(options: argparse.Namespace, *names: str) -> None:
    """Raises InvalidRequest for an option that the model has no use for."""
    for name in names:
        if vars(options)[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidRequest(name, f"{flag} means nothing to {options.model}")


def _given(**values: Any) -> dict[str, Any]:
    """The values that were given on the command line."""
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _loading(model: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(f"loading {model} ..."):
        yield


def _shown_live(events: Iterator[Delta]) -> Iterator[Delta]:
    """Passes events on and shows them: the text as it grows, and how much sound there is."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from stretto.events import AudioDelta, TextDelta

    console = Console()
    text, num_frames, sound_s = Text(), 0, 0.0
    if not console.is_terminal:
        yield from _printed(events)
        return
    with Live(console=console, refresh_per_second=12) as live:
        for event in events:
            if isinstance(event, TextDelta):
                text.append(event.text)
            elif isinstance(event, AudioDelta):
                num_frames += event.num_frames
                sound_s += len(event.samples) / event.sample_rate
            status = Text(f"\u266a {num_frames} frames, {sound_s:.1f} s of sound", style="dim")
            live.update(Group(text, status))
            yield event


def _printed(events: Iterator[Delta]) -> Iterator[Delta]:
    """Passes events on and writes the text, for readers that are no terminal."""
    from stretto.events import TextDelta

    for event in events:
        if isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
        yield event
    print()


def _print_figures(answer: Answer) -> None:
    timings, usage = answer.timings, answer.usage
    print(
        f"TTFT {_ms(timings.ttft_s)}   TTFP {_ms(timings.ttfp_s)}   "
        f"RTF {'-' if timings.rtf is None else f'{timings.rtf:.3f}'}   E2E {timings.e2e_s:.2f} s"
    )
    print(
        f"{usage.prompt_tokens} prompt tokens, {usage.text_tokens} text tokens, "
        f"{usage.audio_tokens} frames, {answer.duration_s:.2f} s of sound; "
        f"ended by {answer.finish_reason}"
    )


def _figures_json(answer: Answer) -> str:
    import hashlib

    import msgspec

    from stretto.audio import pcm16

    figures = {
        **msgspec.structs.asdict(answer.timings),
        **msgspec.structs.asdict(answer.usage),
        "finish_reason": answer.finish_reason,
        "duration_s": answer.duration_s,
        "text": answer.text,
        "pcm_sha256": hashlib.sha256(pcm16(answer.audio)).hexdigest(),
    }
    return msgspec.json.encode(figures).decode()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


# ---- serve ---------------------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    command = add_command(
        commands,
        "serve",
        _serve,
        summary="serve a model over HTTP, as OpenAI's API does",
        details=(
            "\nChat completions with text and sound side by side, streamed; speech, models, health,"
            "\nmetrics. SIGTERM lets running requests finish; a second one does not."
        ),
    )
    command.add_argument("model", metavar="MODEL", nargs="?", default="parrot")
    command.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    command.add_argument("--port", type=int, default=8091, help="0: any; default: %(default)s")
    command.add_argument(
        "--api-key", metavar="K", action="append", default=[], help="may be given more than once"
    )
    command.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        default=[],
        help="what requests may call the model; may be given more than once",
    )
    command.add_argument(
        "--max-body-bytes", type=int, metavar="N", default=32 * 2**20, help="default: %(default)s"
    )
    command.add_argument(
        "--max-input-chars",
        type=int,
        metavar="N",
        default=4096,
        help="longest text to be read out; default: %(default)s",
    )
    command.add_argument(
        "--segment-chars",
        type=int,
        metavar="N",
        default=600,
        help="a longer text is spoken in pieces of whole sentences; default: %(default)s",
    )
    command.add_argument(
        "--max-instruction-chars",
        type=int,
        metavar="N",
        default=500,
        help="longest instructions of a speech request; default: %(default)s",
    )
    command.add_argument(
        "--allowed-local-media-path",
        metavar="DIR",
        type=Path,
        help="where requests may name files (file://); default: nowhere",
    )
    command.add_argument(
        "--voices-dir",
        metavar="DIR",
        type=Path,
        help="where uploaded voices are kept; default: voices in the cache",
    )
    command.add_argument(
        "--drain-s", type=float, metavar="S", default=30.0, help="grace after SIGTERM"
    )
    command.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    add_deployment(command)


def _serve(options: argparse.Namespace) -> int:
    import msgspec

    from stretto.server.run import serve
    from stretto.server.settings import ServerSettings

    given = {
        "model": options.model,
        "host": options.host,
        "port": options.port,
        "deploy_config": _path(options.deploy_config),
        "async_chunk": options.async_chunk,
        "trace": _path(options.trace),
        "cache_dir": str(cache_dir()),
        "api_keys": options.api_key,
        "served_model_names": options.served_model_name,
        "max_body_bytes": options.max_body_bytes,
        "max_input_chars": options.max_input_chars,
        "segment_chars": options.segment_chars,
        "max_instruction_chars": options.max_instruction_chars,
        "allowed_local_media_path": _path(options.allowed_local_media_path),
        "voices_dir": _path(options.voices_dir),
        "drain_s": options.drain_s,
        "log_level": options.log_level,
    }
    try:
        settings = msgspec.convert(given, ServerSettings, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise ConfigError(f"serve: {error}") from error
    return serve(settings)


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


# ---- verify --------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    command = add_command(
        commands,
        "verify",
        _verify,
        summary="compare every mode with the reference on a checkpoint",
        details=(
            "\nThe reference is transformers' generate, and the qwen-tts package for Qwen3-TTS."
            "\nInline and process stages, async_chunk on and off, codec chunks of 1, 3 and 25"
            "\nframes, 1 and 4 requests at once, greedy, in float32 on the CPU. Text and codes must"
            "\nbe equal, samples equal in number and within 1e-4. The last line of stdout is one"
            "\nJSON object; the exit status is 1 if anything differs."
        ),
    )
    command.add_argument("model", metavar="MODEL", nargs="?", default="parrot")
    command.add_argument(
        "--reference",
        metavar="DIR",
        type=Path,
        default=Path(os.environ.get("STRETTO_QWEN_TTS", ".reference")),
        help="where the qwen-tts package lies (`make .reference`); default: %(default)s",
    )


def _verify(options: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from stretto.verify import CaseResult, summarize, verify

    console = Console()
    table = Table("question", "mode", "at once", "text", "codes", "samples", "audio max |diff|")
    with console.status("starting ...") as status:

        def note(result: CaseResult) -> None:
            status.update(f"{len(table.rows) + 1} cases, last: {result.label}")
            table.add_row(
                result.question,
                result.mode.label,
                str(result.concurrency),
                *(
                    "equal" if equal else "[red]differ[/red]"
                    for equal in (result.text_equal, result.codes_equal, result.samples_equal)
                ),
                f"{result.audio_max_abs_diff:.1e}",
            )

        results = verify(
            options.model,
            cache_dir=cache_dir(),
            reference_dir=options.reference,
            on_result=note,
        )
    console.print(table)
    summary = summarize(results)
    print(msgspec.json.encode(summary).decode())
    return EXIT_FAILED if summary.failed else 0


# ---- check ---------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    command = add_command(
        commands,
        "check",
        _check,
        summary="read a deployment file and print the settings in force",
        details="\nEach value is shown with the place it comes from. Nothing is started.",
    )
    command.add_argument(
        "config", metavar="CONFIG", nargs="?", type=Path, help="deployment YAML; none: the profile"
    )
    command.add_argument("--model", default="parrot", help="default: %(default)s")


def _check(options: argparse.Namespace) -> int:
    from stretto.config.async_output import choose_async_output
    from stretto.config.resolve import effective_values
    from stretto.pipeline.model import open_model

    model = open_model(options.model, cache_dir=cache_dir(), deploy_config=options.config, flags={})
    values = effective_values(model.resolved)
    widths = [max(len(str(row[column])) for row in values) for column in (0, 1)]
    for path, value, source in values:
        print(f"{path:{widths[0]}}  {value!s:{widths[1]}}  {source}")
    print()
    for stage in model.config.stages:
        output = choose_async_output(stage, async_chunk=model.config.async_chunk)
        print(f"{stage.name}: async output {'on' if output.enabled else 'off'} ({output.reason})")
    return 0


# ---- models --------------------------------------------------------------------------------------


def _add_models(commands: Any) -> None:
    command = add_command(
        commands, "models", _models, summary="make checkpoints, see what is there"
    )
    actions = command.add_subparsers(metavar="ACTION")
    make = actions.add_parser(
        "make", help="write a random-weight checkpoint of a real architecture"
    )
    make.set_defaults(run=_models_make)
    make.add_argument("-v", "--verbose", action="count", default=0, help=argparse.SUPPRESS)
    make.add_argument("directory", metavar="DIR", type=Path, help="an empty or new directory")
    make.add_argument(
        "--arch", default="qwen3-omni", help="qwen3-omni or qwen3-tts; default: %(default)s"
    )
    make.add_argument(
        "--size", default="tiny", help="tiny, or small (qwen3-omni); default: %(default)s"
    )
    make.add_argument(
        "--kind", help="of qwen3-tts: custom_voice (the default), voice_design or base"
    )
    make.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _models(options: argparse.Namespace) -> int:
    from stretto.models.tiny import CACHED_CHECKPOINTS

    width = max(map(len, CACHED_CHECKPOINTS))
    print(f"{'parrot':{width}} ships with stretto")
    for name in CACHED_CHECKPOINTS:
        print(f"{name:{width}} random weights, made on first use in {cache_dir()}")
    return 0


def _models_make(options: argparse.Namespace) -> int:
    from stretto.models.tiny import make_checkpoint

    make_checkpoint(
        options.directory,
        arch=options.arch,
        size=options.size,
        seed=options.seed,
        kind=options.kind,
    )
    print(f"wrote {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
