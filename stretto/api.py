"""The offline API: `Omni` for scripts, `AsyncOmni` for programs that have an event loop.

with Omni("parrot") as omni:
    answer = omni.generate("Hello there.")
    answer.save_wav("hello.wav")
    for event in omni.stream("And again."):
        ...                             # TextDelta, AudioDelta, then Finished

Models that read texts out (Qwen3-TTS) take a text for a prompt, and `speak` one that is still being
written.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from stretto import audio
from stretto.errors import InvalidRequest, PipelineClosed
from stretto.events import (
    AudioDelta,
    Event,
    Failed,
    Finished,
    TextDelta,
    Timings,
    Usage,
)
from stretto.pipeline.frontend import Frontend, Prompt
from stretto.pipeline.frontends import load_frontend
from stretto.pipeline.model import Model, open_model
from stretto.pipeline.pipeline import SAMPLE_RATE, Pipeline, PipelineRequest, RequestHandle
from stretto.pipeline.stage import spawn_workers
from stretto.request import FinishReason

DEFAULT_MODEL = "parrot"
DEFAULT_CACHE = Path.home() / ".cache" / "stretto"

Delta = TextDelta | AudioDelta | Finished
T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. `audio` float32 [samples] in -1..1, empty if none was asked for.

    `codes` int16 [frames, codebooks] with `return_codes`, else None.
    """

    text: str
    token_ids: tuple[int, ...]
    audio: np.ndarray
    sample_rate: int
    codes: np.ndarray | None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings

    @property
    def duration_s(self) -> float:
        return len(self.audio) / self.sample_rate

    def save_wav(self, path: Path | str) -> None:
        audio.save_wav(path, self.audio, self.sample_rate)


class AsyncOmni:
    """A pipeline and the front before it. Use as `async with`, or `start` and `close`."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        deploy_config: Path | str | None = None,
        async_chunk: bool | None = None,
        inline: bool = False,
        flags: Mapping[str, Any] | None = None,
        trace: Path | str | None = None,
        cache_dir: Path | str = DEFAULT_CACHE,
    ) -> None:
        """`model` is a checkpoint directory, or a name: `parrot`, `tiny`, `small`, `tiny-tts`, ...

        `inline` runs all stages in the event loop's thread. `flags` are settings as in a
        deployment file (stages and connectors by name), over all others. `trace` is a file that
        gets a Chrome trace at the end.

        Raises:
            CheckpointError, ConfigError: before anything is started.
        """
        settings = dict(flags or {})
        if async_chunk is not None:
            settings["async_chunk"] = async_chunk
        self._cache_dir = Path(cache_dir)
        self.model: Model = open_model(
            model,
            cache_dir=self._cache_dir,
            deploy_config=None if deploy_config is None else Path(deploy_config),
            flags=settings,
        )
        self._inline = inline
        self._trace = None if trace is None else Path(trace)
        self._frontend: Frontend | None = None
        self._pipeline: Pipeline | None = None

    async def start(self) -> None:
        """Loads everything and runs a warm-up request.

        Raises:
            CheckpointError, StageFailed: nothing is left running.
        """
        workers = None if self._inline else await spawn_workers(self.model.config.stages)
        try:
            # Off the loop: it imports transformers, which takes seconds.
            self._frontend = await asyncio.to_thread(
                load_frontend, self.model, cache_dir=self._cache_dir
            )
        except BaseException:
            for worker in workers or ():
                await worker.discard()
            raise
        self._pipeline = Pipeline(
            self.model.config,
            self._frontend.spec,
            model_dir=str(self.model.directory),
            tokenizer_file=self._frontend.tokenizer_file,
            context_lengths=self._frontend.context_lengths,
            workers=workers,
            trace=self._trace,
        )
        await self._pipeline.start(self._frontend.warm_up())

    async def close(self) -> None:
        if self._pipeline is not None:
            await self._pipeline.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def frontend(self) -> Frontend:
        assert self._frontend is not None, "not started"
        return self._frontend

    @property
    def pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "not started"
        return self._pipeline

    def submit(self, prompt: Prompt, **options: Any) -> RequestHandle:
        """Starts a request; its handle gives its events, `Failed` among them, and can abort it.

        `options` are the fields of the frontend's options: `Options` of `omni_frontend`,
        `SpeakOptions` of `tts_frontend`.

        Raises:
            InvalidRequest, Overloaded, StageFailed, PipelineClosed: nothing was started.
        """
        return self.pipeline.submit(self.prepare(prompt, **options))

    def prepare(self, prompt: Prompt, **options: Any) -> PipelineRequest:
        """The request of a prompt, checked and not yet started. Raises InvalidRequest."""
        return self.frontend.prepare(prompt, self._checked(options))

    def _checked(self, options: Mapping[str, Any]) -> Any:
        try:
            return msgspec.convert(options, self.frontend.options)
        except msgspec.ValidationError as error:
            named = re.search(r"`\$\.(\w+)|unknown field `(\w+)", str(error))
            param = (named[1] or named[2]) if named else "options"
            raise InvalidRequest(param, str(error)) from error

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Delta]:
        """The answer as it comes. Raises what `submit` raises, and RequestFailed."""
        handle = self.submit(prompt, **options)
        try:
            async for event in handle:
                yield _raised(event)
        finally:
            # Does nothing to a request that has ended.
            await handle.abort()

    async def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """The whole answer. Raises what `stream` raises."""
        return collect([event async for event in self.stream(prompt, **options)])

    def submit_pieces(self, **options: Any) -> RequestHandle:
        """Starts a request whose text is still to come: by the handle's `feed` and `end_text`.

        Only for models that read texts out. Raises as `submit`.
        """
        checked = self._checked(options)
        return self.pipeline.submit(self.frontend.prepare_pieces(checked))

    async def speak(
        self, pieces: AsyncIterable[str], **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Reads out a text while it is being written, as a language model writes it.

        The pieces may be cut anywhere; what is said is what the whole text at once, with
        `text_first` false, would have given. Raises what `submit` raises, RequestFailed, and
        whatever `pieces` raises, which aborts the request.
        """
        handle = self.submit_pieces(**options)

        async def feed() -> None:
            async for piece in pieces:
                handle.feed(piece)
            handle.end_text()

        feeding = asyncio.create_task(feed())
        feeding.add_done_callback(lambda task: _abandon_if_failed(task, handle))
        try:
            async for event in handle:
                if isinstance(event, Failed) and feeding.done() and feeding.exception():
                    # Aborted for it.
                    await feeding
                yield _raised(event)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await handle.abort()


class Omni:
    """`AsyncOmni` for code without an event loop; its loop runs in a thread of its own."""

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        """As `AsyncOmni`; the pipeline is started at once."""
        self._omni = AsyncOmni(model, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stretto", daemon=True)
        self._thread.start()
        try:
            self._run(self._omni.start())
        except BaseException:
            self._end_loop()
            raise

    @property
    def model(self) -> Model:
        return self._omni.model

    @property
    def frontend(self) -> Frontend:
        return self._omni.frontend

    @property
    def pipeline(self) -> Pipeline:
        """For looking at; its methods belong to the loop's thread."""
        return self._omni.pipeline

    def generate(self, prompt: Prompt, **options: Any) -> Answer:
        """The whole answer. Raises InvalidRequest, Overloaded, RequestFailed."""
        return self._run(self._omni.generate(prompt, **options))

    def generate_all(self, prompts: Sequence[Prompt], **options: Any) -> list[Answer]:
        """The answers of several prompts that run side by side, in their order."""
        return self.generate_each([(prompt, options) for prompt in prompts])

    def generate_each(self, requests: Sequence[tuple[Prompt, Mapping[str, Any]]]) -> list[Answer]:
        """As `generate_all`, each prompt with options of its own."""

        async def side_by_side() -> list[Answer]:
            # All are checked before the first is started.
            for prompt, options in requests:
                self._omni.prepare(prompt, **options)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._omni.generate(prompt, **options))
                        for prompt, options in requests
                    ]
            except BaseExceptionGroup as failures:
                # The others were cancelled for it.
                raise failures.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._run(side_by_side())

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """The answer as it comes; leaving the loop early aborts the request."""
        handle = self._run(self._submit(prompt, options))
        events = handle.__aiter__()
        try:
            while True:
                try:
                    event: Event = self._run(_next(events))
                except StopAsyncIteration:
                    return
                yield _raised(event)
        finally:
            self._run(handle.abort())

    def speak(self, pieces: Iterable[str], **options: Any) -> Iterator[Delta]:
        """As `AsyncOmni.speak`; `pieces` are waited for in a thread of their own."""
        events = self._omni.speak(_from_thread(pieces), **options)
        try:
            while True:
                try:
                    yield self._run(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            self._run(_closed(events))

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._omni.close())
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    async def _submit(self, prompt: Prompt, options: Mapping[str, Any]) -> RequestHandle:
        return self._omni.submit(prompt, **options)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            coroutine.close()
            raise PipelineClosed("the pipeline was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def collect(events: Sequence[Delta]) -> Answer:
    """The answer that a finished stream's events make up."""
    text = [event for event in events if isinstance(event, TextDelta)]
    sound = [event for event in events if isinstance(event, AudioDelta)]
    end = events[-1]
    assert isinstance(end, Finished)
    codes = [event.codes for event in sound if event.codes is not None]
    return Answer(
        text="".join(event.text for event in text),
        token_ids=tuple(token for event in text for token in event.token_ids),
        audio=np.concatenate([e.samples for e in sound]) if sound else np.zeros(0, np.float32),
        sample_rate=sound[0].sample_rate if sound else SAMPLE_RATE,
        codes=np.concatenate(codes) if codes else None,
        finish_reason=end.finish_reason,
        usage=end.usage,
        timings=end.timings,
    )


def _abandon_if_failed(feeding: asyncio.Task[None], handle: RequestHandle) -> None:
    if not feeding.cancelled() and feeding.exception() is not None:
        handle.abandon()


async def _from_thread(pieces: Iterable[str]) -> AsyncIterator[str]:
    """The pieces of an iterator that may wait, without making the event loop wait."""
    waiting = iter(pieces)
    while (piece := await asyncio.to_thread(next, waiting, None)) is not None:
        yield piece


async def _next(events: AsyncIterator[T]) -> T:
    return await anext(events)


async def _closed(events: AsyncGenerator[Any, None]) -> None:
    await events.aclose()


def _raised(event: Event) -> Delta:
    if isinstance(event, Failed):
        raise event.error
    return event
