"""The front of all stages: gives out ids and tickets, relays events, ends every request once.

    submit ─> one id, a ticket to every stage at once      (asyncio; one thread)
    feed ─> chunks to the entry stage, where it reads a text that is still being written
    reports of the stages ─> events of the request's handle
    Finished when every stage that got a ticket has finished; Failed when any could not

Data never passes here on its way from stage to stage; topology is the configuration's, and what a
request's tickets hold its frontend's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.config.deployment import (
    CodecChunkConfig,
    EdgeConfig,
    PipelineConfig,
    StageConfig,
)
from stretto.errors import (
    InvalidRequest,
    Overloaded,
    PipelineClosed,
    RequestAborted,
    RequestFailed,
    StageFailed,
    TransferFailed,
)
from stretto.events import (
    Abort,
    Aborted,
    Admit,
    AudioDelta,
    AudioOut,
    Event,
    Failed,
    Finished,
    Pong,
    Report,
    StageDied,
    StageErred,
    StageFinished,
    StageReady,
    StageWork,
    TextDelta,
    TextOut,
    Timings,
    Usage,
)
from stretto.models.family import ModelSpec
from stretto.payloads import Chunk, SpokenTokens
from stretto.pipeline.assembly import (
    FED_BY_CLIENT,
    Connectors,
    StageEdge,
    StageSpec,
    build_stage,
    edge_connector,
)
from stretto.pipeline.stage import InlineStage, Stage, StageProcess, Worker
from stretto.request import SamplingParams, SpeechOptions, StageRequest
from stretto.text import PieceTokenizer
from stretto.trace import Tracer, merge_parts, part_file
from stretto.transfer.adapter import ChunkTransferAdapter, Edge, TransferError
from stretto.transfer.connector import OmniConnector
from stretto.transfer.memory_connector import MemoryConnector

log = logging.getLogger(__name__)

SAMPLE_RATE = 24000
# The front's own name in traces.
FRONT = "front"
# Who feeds an entry stage that reads texts out; a stage may not be called so.
CLIENT = "client"
CLIENT_ID = -1


class PipelineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose every value was checked: a ticket for each stage that works on it, in order.

    Ids and seeds are still to be given, by the pipeline.
    """

    tickets: tuple[StageRequest, ...]
    # Of the text that was given with it; for usage.
    num_prompt_tokens: int
    # Makes ids of a text that comes in pieces; None: the tickets bring everything.
    open_text: Callable[[], PieceTokenizer] | None = None
    # The caller's own name for it, for logs.
    label: str | None = None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.tickets[0].prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        """The entry stage's."""
        return self.tickets[0].sampling

    @property
    def speech(self) -> SpeechOptions | None:
        """None: text only, no other stage works."""
        return self.tickets[-1].speech


class RequestHandle:
    """A request's events, for its owner: iterate to the end, or abort.

    With a text that comes in pieces: `feed` them, then `end_text`.
    """

    def __init__(self, pipeline: Pipeline, request_id: str, text: PieceTokenizer | None) -> None:
        self.request_id = request_id
        self._pipeline = pipeline
        self._text = text
        self._num_chunks = 0
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Deltas, then exactly one Finished or Failed. Leaving earlier aborts the request."""
        try:
            while not self._ended:
                event = await self._events.get()
                self._ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            if not self._ended:
                self._ended = True
                self._pipeline.abandon(self.request_id)

    async def abort(self) -> None:
        """Returns when no stage holds anything of the request."""
        await self._pipeline.abort(self.request_id)

    def abandon(self) -> None:
        """As `abort`, without waiting; does nothing to a request that has ended."""
        self._pipeline.abandon(self.request_id)

    def feed(self, text: str) -> None:
        """The next piece of the text; words may be cut anywhere. For nothing once it has ended.

        Raises:
            InvalidRequest: the text was given whole, or has ended.
        """
        self._send(self._open_text().push(text), last=False)

    def end_text(self) -> None:
        """Nothing follows. Raises InvalidRequest as `feed` does."""
        token_ids = self._open_text().finish()
        self._text = None
        self._send(token_ids, last=True)

    def _open_text(self) -> PieceTokenizer:
        if self._text is None:
            raise InvalidRequest("text", "this request takes no more text")
        return self._text

    def _send(self, token_ids: list[int], *, last: bool) -> None:
        if not token_ids and not last:
            return
        payloads = (SpokenTokens(np.array(token_ids, dtype=np.int32)),) if token_ids else ()
        chunk = Chunk(self.request_id, self._num_chunks, last, payloads)
        self._num_chunks += 1
        self._pipeline.send_text(chunk, len(token_ids))

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)


class _Live:
    """What the front keeps of a request in flight."""

    def __init__(self, request: PipelineRequest, handle: RequestHandle, stages: list[str]) -> None:
        self.request = request
        self.handle = handle
        self.unfinished = set(stages)
        self.finished: dict[str, StageFinished] = {}
        self.began_ns = time.monotonic_ns()
        self.first_text_s: float | None = None
        self.first_audio_s: float | None = None
        self.last_audio_s: float | None = None
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_text_tokens = 0
        self.num_frames = 0
        self.num_samples = 0

    def elapsed(self) -> float:
        return (time.monotonic_ns() - self.began_ns) / 1e9


class Pipeline:
    """All stages of one model. Every method is for the event loop's thread."""

    def __init__(
        self,
        config: PipelineConfig,
        model: ModelSpec,
        *,
        model_dir: str,
        tokenizer_file: str,
        context_lengths: Mapping[str, int],
        workers: Sequence[Worker] | None = None,
        trace: Path | None = None,
    ) -> None:
        """`context_lengths` are the positions per request of each autoregressive stage.

        `workers` are the processes of the stages, from `spawn_workers`; without them all stages
        run inline, in the event loop's thread. `trace` is a file that gets a Chrome trace of
        everything when the pipeline is closed.
        """
        self.config = config
        self._live: dict[str, _Live] = {}
        self._aborting: dict[str, tuple[set[str], asyncio.Future[None]]] = {}
        self._dead: dict[str, str] = {}
        self._pongs: dict[str, Pong] = {}
        self._ready: dict[str, StageReady] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._trace = trace
        self._tracer = Tracer(FRONT, None if trace is None else part_file(trace, FRONT))
        specs = _stage_specs(
            config,
            model,
            model_dir=model_dir,
            tokenizer_file=tokenizer_file,
            context_lengths=context_lengths,
            trace=trace,
        )
        self._feed: ChunkTransferAdapter | None = None
        if workers is None:
            self._stages = self._inline_stages(specs)
        else:
            self._stages = self._process_stages(specs, workers)

    # ---- life ------------------------------------------------------------------------------------

    async def start(self, warm_up: PipelineRequest) -> None:
        """Loads all stages at once and runs `warm_up` through them.

        Raises:
            StageFailed: a stage did not come up, or not within `start_timeout_s`.
        """
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._start_stages()
                async for event in self.submit(warm_up):
                    if isinstance(event, Failed):
                        raise event.error
            for stage in self._stages:
                stage.watch()
        except TimeoutError:
            missing = [stage.name for stage in self._stages if stage.name not in self._ready]
            await self.close()
            raise StageFailed(
                ", ".join(missing) or "warm-up",
                f"not ready within {self.config.start_timeout_s:.0f} s (start_timeout_s)",
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _start_stages(self) -> None:
        async def start(stage: Stage) -> None:
            self._ready[stage.name] = await stage.start()

        try:
            async with asyncio.TaskGroup() as group:
                for stage in self._stages:
                    group.create_task(start(stage))
        except BaseExceptionGroup as failures:
            # The others were cancelled for it.
            raise failures.exceptions[0] from None
        if any(isinstance(stage, InlineStage) for stage in self._stages):
            self._spawn(self._step_inline())

    async def close(self) -> None:
        """Fails what is still in flight, ends all stages. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for live in list(self._live.values()):
            self._fail(live, PipelineClosed("the pipeline was closed"))
        await asyncio.gather(*(stage.close() for stage in self._stages))
        if self._feed is not None:
            await asyncio.to_thread(self._feed.close)
        self._tracer.close()
        if self._trace is not None:
            merge_parts(self._trace, [FRONT, *(stage.name for stage in self._stages)])
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # ---- requests --------------------------------------------------------------------------------

    def submit(self, request: PipelineRequest) -> RequestHandle:
        """Starts a request; every value in it was checked before.

        Raises:
            Overloaded: `max_requests` are in flight.
            StageFailed: a stage that the request needs is dead.
            PipelineClosed: the pipeline was closed.
        """
        stages = self._stages[: len(request.tickets)]
        if self._closed:
            raise PipelineClosed("the pipeline is closed")
        for stage in stages:
            if stage.name in self._dead:
                raise StageFailed(stage.name, self._dead[stage.name])
        if len(self._live) >= self.config.max_requests:
            raise Overloaded(
                f"{len(self._live)} requests are in flight, as many as max_requests allows"
            )
        # One id per request, never used again; the caller's own is a label.
        request_id = uuid.uuid4().hex
        tickets = self._tickets(request_id, request)
        text = None if request.open_text is None else request.open_text()
        handle = RequestHandle(self, request_id, text)
        self._live[request_id] = _Live(request, handle, [stage.name for stage in stages])
        # Downstream first: most tickets are there before their first chunk.
        for stage, ticket in reversed(list(zip(stages, tickets, strict=True))):
            stage.send(Admit(ticket))
        return handle

    def send_text(self, chunk: Chunk, num_tokens: int) -> None:
        """A piece of a request's text, for its entry stage; dropped if the request has ended."""
        live = self._live.get(chunk.request_id)
        if live is not None:
            assert self._feed is not None, "the entry stage takes no text"
            live.num_prompt_tokens += num_tokens
            self._feed.save_async(chunk)

    async def abort(self, request_id: str) -> None:
        """Takes the request out of every stage; returns when all of them have confirmed it."""
        self.abandon(request_id)
        if request_id in self._aborting:
            await asyncio.shield(self._aborting[request_id][1])

    def abandon(self, request_id: str) -> None:
        """As `abort`, without waiting."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._withdraw(request_id, live)
            live.handle.put(Failed(RequestAborted("the request was aborted")))

    @property
    def num_in_flight(self) -> int:
        return len(self._live)

    @property
    def dead_stages(self) -> Mapping[str, str]:
        """Stages that died or hang, and why."""
        return self._dead

    @property
    def ready_stages(self) -> Mapping[str, StageReady]:
        return self._ready

    @property
    def stage_loads(self) -> Mapping[str, Pong]:
        """The last word of each stage process about its load."""
        return self._pongs

    @property
    def is_prepared(self) -> bool:
        """No stage process does anything ahead of requests any more; asked once a second."""
        return all(
            name in self._pongs and self._pongs[name].is_prepared for name in self.stage_pids
        )

    @property
    def stage_pids(self) -> dict[str, int]:
        return {stage.name: stage.pid for stage in self._stages if isinstance(stage, StageProcess)}

    @property
    def is_empty(self) -> bool:
        """No trace of any request is left here, nor in inline stages."""
        inline = [stage for stage in self._stages if isinstance(stage, InlineStage)]
        return not self._live and not self._aborting and all(stage.is_empty for stage in inline)

    # ---- reports ---------------------------------------------------------------------------------

    def _on_report(self, stage: str, report: Report) -> None:
        match report:
            case Pong():
                self._pongs[stage] = report
            case StageReady():
                pass
            case StageDied(message=message):
                self._on_death(stage, message)
            case Aborted(request_id=request_id):
                self._on_aborted(stage, request_id)
            case _:
                live = self._live.get(report.request_id)
                # None: aborted or failed meanwhile; what is still under way is of no use.
                if live is not None:
                    self._on_request_report(stage, live, report)

    def _on_request_report(
        self, stage: str, live: _Live, report: TextOut | AudioOut | StageFinished | StageErred
    ) -> None:
        match report:
            case TextOut():
                live.num_text_tokens += len(report.token_ids)
                self._tracer.span("text", time.monotonic_ns(), request=live.handle.request_id)
                if live.first_text_s is None:
                    live.first_text_s = live.elapsed()
                live.handle.put(TextDelta(report.text, report.token_ids))
            case AudioOut():
                live.num_frames += report.num_frames
                self._tracer.span(
                    "audio",
                    time.monotonic_ns(),
                    request=live.handle.request_id,
                    frames=report.num_frames,
                )
                live.num_samples += len(report.samples)
                live.last_audio_s = live.elapsed()
                if live.first_audio_s is None:
                    live.first_audio_s = live.last_audio_s
                live.handle.put(
                    AudioDelta(report.samples, SAMPLE_RATE, report.num_frames, report.codes)
                )
            case StageFinished():
                live.finished[stage] = report
                live.unfinished.discard(stage)
                if not live.unfinished:
                    self._finish(live)
            case StageErred():
                self._fail(live, StageFailed(stage, report.message))

    def _finish(self, live: _Live) -> None:
        del self._live[live.handle.request_id]
        stages = self.config.stages[: len(live.request.tickets)]
        reasons = [live.finished[stage.name].finish_reason for stage in stages]
        text, audio = None, None
        for index, stage in enumerate(stages):
            if stage.output == "text":
                text = reasons[index]
            elif stage.output == "audio":
                # A vocoder only ever runs out of frames; whether a limit cut them, the stage
                # before it knows.
                audio = reasons[index - 1]
        duration_s = live.num_samples / SAMPLE_RATE
        finished = Finished(
            text_reason=text,
            audio_reason=audio,
            usage=Usage(
                prompt_tokens=live.num_prompt_tokens,
                text_tokens=live.num_text_tokens,
                audio_tokens=live.num_frames,
                cached_tokens=live.finished[self._stages[0].name].num_cached_tokens,
            ),
            timings=Timings(
                ttft_s=live.first_text_s,
                ttfp_s=live.first_audio_s,
                e2e_s=live.elapsed(),
                rtf=live.last_audio_s / duration_s if live.last_audio_s is not None else None,
            ),
            stages=tuple(
                StageWork(stage.name, done.num_units, done.queue_s, done.busy_s)
                for stage in self._stages
                if (done := live.finished.get(stage.name)) is not None
            ),
        )
        log.info(
            "%s finished (%s): %d text tokens, %d frames, first audio %s s, rtf %s",
            live.request.label or live.handle.request_id,
            finished.finish_reason,
            live.num_text_tokens,
            live.num_frames,
            _shown(finished.timings.ttfp_s),
            _shown(finished.timings.rtf),
        )
        self._tracer.span("request", live.began_ns, request=live.handle.request_id)
        live.handle.put(finished)

    def _fail(self, live: _Live, error: RequestFailed) -> None:
        request_id = live.handle.request_id
        self._live.pop(request_id, None)
        self._withdraw(request_id, live)
        log.warning("%s failed: %s", live.request.label or request_id, error)
        live.handle.put(Failed(error))

    def _withdraw(self, request_id: str, live: _Live) -> None:
        """Tells every stage that got a ticket; `_aborting` holds who has yet to confirm."""
        names = {*live.unfinished, *live.finished} - set(self._dead)
        if self._closed or not names:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._aborting[request_id] = (names, done)
        for stage in self._stages:
            if stage.name in names:
                stage.send(Abort(request_id))

    def _on_aborted(self, stage: str, request_id: str) -> None:
        if request_id not in self._aborting:
            return
        names, done = self._aborting[request_id]
        names.discard(stage)
        if not names:
            del self._aborting[request_id]
            done.set_result(None)

    def _on_death(self, stage: str, message: str) -> None:
        if stage in self._dead:
            return
        self._dead[stage] = message
        log.error("stage %s %s", stage, message)
        for request_id in list(self._aborting):
            self._on_aborted(stage, request_id)
        for live in list(self._live.values()):
            if stage in live.unfinished or stage in live.finished:
                self._fail(live, StageFailed(stage, message))

    # ---- construction ----------------------------------------------------------------------------

    def _tickets(self, request_id: str, request: PipelineRequest) -> list[StageRequest]:
        """The request's tickets with what only its admission decides: id and seeds."""
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(62)
        tickets = []
        for ticket in request.tickets:
            own = ticket.sampling.seed
            sampling = msgspec.structs.replace(ticket.sampling, seed=seed if own is None else own)
            tickets.append(
                msgspec.structs.replace(
                    ticket, request_id=request_id, sampling=sampling, speech=request.speech
                )
            )
        return tickets

    def _process_stages(self, specs: list[StageSpec], workers: Sequence[Worker]) -> list[Stage]:
        feed, edge = workers[0].feed, specs[0].upstream
        if edge is not None:
            assert feed is not None
            self._feed = self._text_sender(
                edge, edge_connector(specs[0], edge, feed), threaded=True
            )
        return [
            StageProcess(
                spec,
                worker,
                step_timeout_s=self.config.step_timeout_s,
                on_report=self._on_report,
            )
            for spec, worker in zip(specs, workers, strict=True)
        ]

    def _inline_stages(self, specs: list[StageSpec]) -> list[Stage]:
        # What leads into each stage.
        connectors = [None if spec.upstream is None else MemoryConnector() for spec in specs]
        if connectors[0] is not None:
            assert specs[0].upstream is not None
            self._feed = self._text_sender(specs[0].upstream, connectors[0], threaded=False)
        stages: list[Stage] = []
        for spec, upstream, downstream in zip(
            specs, connectors, (*connectors[1:], None), strict=True
        ):
            ends = Connectors(upstream=upstream, downstream=downstream)

            def publish(report: Report, name: str = spec.config.name) -> None:
                self._on_report(name, report)

            stages.append(
                InlineStage(
                    spec.config.name,
                    lambda spec=spec, ends=ends, publish=publish: build_stage(  # type: ignore[misc]
                        spec, ends, publish, threaded=False
                    ),
                )
            )
        return stages

    def _text_sender(
        self, edge: StageEdge, connector: OmniConnector, *, threaded: bool
    ) -> ChunkTransferAdapter:
        """The client's end of the edge into an entry stage that reads texts out."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._fail_unsent)

        return ChunkTransferAdapter(
            inbound=None,
            outbound=(Edge(edge.config.from_stage, edge.config.to_stage, edge.from_id), connector),
            chunk_timeout_s=self.config.chunk_timeout_s,
            wake=wake,
            tracer=self._tracer,
            threaded=threaded,
        )

    def _fail_unsent(self) -> None:
        assert self._feed is not None
        for error in self._feed.arrivals():
            assert isinstance(error, TransferError), "nothing comes in on this edge"
            live = self._live.get(error.request_id)
            if live is not None:
                self._fail(live, TransferFailed(error.edge, error.message))

    async def _step_inline(self) -> None:
        """Steps all engines in turn, in this thread; waits a little when none has work."""
        inline = [stage for stage in self._stages if isinstance(stage, InlineStage)]
        while not self._closed:
            busy = False
            for stage in inline:
                try:
                    busy |= stage.step()
                except Exception as error:
                    log.exception("stage %s ends", stage.name)
                    self._on_death(stage.name, f"{type(error).__name__}: {error}")
                    return
            await asyncio.sleep(0 if busy else 0.001)

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def codec_of(config: PipelineConfig) -> CodecChunkConfig:
    """The codec section of the edge into the vocoder."""
    for edge in reversed(config.connectors):
        if edge.codec is not None:
            return edge.codec
    return CodecChunkConfig()


def check_initial_frames(value: int | None, config: PipelineConfig) -> None:
    """Raises InvalidRequest for a first chunk that the deployment cannot cut."""
    limit = codec_of(config).codec_chunk_frames
    if value is not None and not 1 <= value <= limit:
        raise InvalidRequest(
            "initial_codec_chunk_frames",
            f"initial_codec_chunk_frames is {value}; allowed is 1 to {limit} (codec_chunk_frames)",
        )


def _stage_specs(
    config: PipelineConfig,
    model: ModelSpec,
    *,
    model_dir: str,
    tokenizer_file: str,
    context_lengths: Mapping[str, int],
    trace: Path | None,
) -> list[StageSpec]:
    edges = [
        StageEdge(edge, config.stages[index].model, config.stages[index + 1].model, index)
        for index, edge in enumerate(config.connectors)
    ]
    entry = config.stages[0]
    client = None
    if entry.model in FED_BY_CLIENT:
        client = StageEdge(
            EdgeConfig(from_stage=CLIENT, to_stage=entry.name), CLIENT, entry.model, CLIENT_ID
        )

    def spec(index: int, stage: StageConfig) -> StageSpec:
        return StageSpec(
            stage_id=index,
            config=stage,
            model_dir=model_dir,
            model=model,
            async_chunk=config.async_chunk,
            chunk_timeout_s=config.chunk_timeout_s,
            max_model_len=context_lengths[stage.name],
            tokenizer_file=tokenizer_file,
            trace_part=None if trace is None else str(part_file(trace, stage.name)),
            upstream=edges[index - 1] if index > 0 else client,
            downstream=edges[index] if index < len(edges) else None,
        )

    return [spec(index, stage) for index, stage in enumerate(config.stages)]


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"
