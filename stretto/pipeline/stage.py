"""A stage as the pipeline sees it: takes commands, gives reports, is closed.

`StageProcess` is a process of its own (service); `InlineStage` is an engine in the caller's thread
(tests, debugging). Both speak in the same commands and reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.config.deployment import StageConfig
from stretto.errors import StageFailed
from stretto.events import (
    Abort,
    Admit,
    Command,
    Ping,
    Pong,
    Report,
    Shutdown,
    StageDied,
    StageReady,
)
from stretto.pipeline.assembly import FED_BY_CLIENT, BuiltStage, StageSpec
from stretto.pipeline.channel import LENGTH, frame
from stretto.transfer.shm_connector import socket_pair
from stretto.wire import Codec

log = logging.getLogger(__name__)

# A stage is asked this often whether it still moves.
PING_S = 1.0
# From Shutdown to being killed.
SHUTDOWN_S = 10.0

OnReport = Callable[[str, Report], None]


class Stage(Protocol):
    name: str

    async def start(self) -> StageReady:
        """Loads the stage.

        Raises:
            StageFailed: it did not come up.
        """

    def watch(self) -> None:
        """From now on the stage counts as hung when it takes too long; until here it warms up."""

    def send(self, command: Admit | Abort) -> None: ...

    async def close(self) -> None:
        """Ends the stage; nothing of it is left afterwards."""


@dataclass(frozen=True)
class Worker:
    """A stage process that was started and has not yet been told what to be."""

    process: asyncio.subprocess.Process
    control: socket.socket
    # The front's end of the edge into an entry stage that reads texts out.
    feed: socket.socket | None

    async def discard(self) -> None:
        """Ends a worker that is not needed after all: it reads the end of its channel."""
        self.control.close()
        if self.feed is not None:
            self.feed.close()
        await self.process.wait()


async def spawn_workers(stages: Sequence[StageConfig]) -> list[Worker]:
    """Starts the processes of `stages`, with the edges between neighbours.

    They import what they need while the front reads the checkpoint's config.
    """
    edges: list[tuple[socket.socket, socket.socket] | None] = [
        socket_pair() if stages[0].model in FED_BY_CLIENT else None,
        *(socket_pair() for _ in stages[1:]),
        None,
    ]
    workers = []
    for index, (into, out) in enumerate(itertools.pairwise(edges)):
        ours, theirs = socket.socketpair()
        upstream = None if into is None else into[1]
        downstream = None if out is None else out[0]
        ends = [theirs, upstream, downstream]
        numbers = [-1 if end is None else end.fileno() for end in ends]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "stretto.pipeline.worker",
            *map(str, numbers),
            pass_fds=[number for number in numbers if number >= 0],
        )
        for end in ends:
            if end is not None:
                end.close()
        feed = into[0] if index == 0 and into is not None else None
        workers.append(Worker(process, ours, feed))
    return workers


class StageProcess:
    """A stage in a process of its own, watched over: it answers pings and ends its steps, or goes.

    `on_report(name, report)` gets what the stage says, and a `StageDied` when it dies or hangs.
    """

    def __init__(
        self,
        spec: StageSpec,
        worker: Worker,
        *,
        step_timeout_s: float,
        on_report: OnReport,
    ) -> None:
        self.name = spec.config.name
        self._spec = spec
        self._worker = worker
        self._process = worker.process
        self._step_timeout_s = step_timeout_s
        self._on_report = on_report
        self._commands: Codec[Command] = Codec(Command)
        self._reports: Codec[Report] = Codec(Report)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # Pings since the last answer. Pings, not seconds: a front that is held up itself asks none.
        self._num_unanswered = 0
        self._closing = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> StageReady:
        reader, self._writer = await asyncio.open_connection(sock=self._worker.control)
        self._writer.write(frame(Codec[StageSpec](StageSpec), self._spec))
        try:
            first = await self._read(reader)
        except asyncio.IncompleteReadError:
            raise StageFailed(
                self.name, f"did not start (exit code {await self._exit_code()})"
            ) from None
        if isinstance(first, StageDied):
            raise StageFailed(self.name, first.message)
        assert isinstance(first, StageReady)
        self._tasks = [asyncio.create_task(self._listen(reader))]
        return first

    def watch(self) -> None:
        self._tasks.append(asyncio.create_task(self._ask()))

    def send(self, command: Admit | Abort) -> None:
        self._write(command)

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks[1:]:
            task.cancel()
        if self._writer is None:
            await self._worker.discard()
            return
        self._write(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), SHUTDOWN_S)
        except TimeoutError:
            log.warning("stage %s did not end within %.0f s and is killed", self.name, SHUTDOWN_S)
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()

    def _write(self, command: Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(self._commands, command))

    async def _read(self, reader: asyncio.StreamReader) -> Report:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return self._reports.decode(await reader.readexactly(length))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        died = False
        while True:
            try:
                report = await self._read(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            if isinstance(report, Pong):
                self._num_unanswered = 0
                if report.step_age_s > self._step_timeout_s:
                    self._give_up(f"a step has been running for {report.step_age_s:.0f} s")
            died = died or isinstance(report, StageDied)
            self._on_report(self.name, report)
        if not died and not self._closing:
            self._on_report(self.name, StageDied(f"died (exit code {await self._exit_code()})"))

    async def _ask(self) -> None:
        while True:
            self._write(Ping())
            self._num_unanswered += 1
            await asyncio.sleep(PING_S)
            silent_s = self._num_unanswered * PING_S
            if silent_s > self._step_timeout_s:
                self._give_up(f"has not answered for {silent_s:.0f} s")
                return

    def _give_up(self, why: str) -> None:
        """The stage hangs: its requests are failed, and the process is ended."""
        self._closing = True
        self._on_report(self.name, StageDied(f"hangs: {why} (step_timeout_s); it was killed"))
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _exit_code(self) -> int:
        return await self._process.wait()


class InlineStage:
    """A stage whose engine the pipeline steps itself."""

    def __init__(self, name: str, build: Callable[[], BuiltStage]) -> None:
        self.name = name
        self._build = build
        self._built: BuiltStage | None = None

    async def start(self) -> StageReady:
        self._built = self._build()
        return self._built.ready

    def watch(self) -> None:
        """A stage of the front's own thread cannot be watched from there."""

    def step(self) -> bool:
        return self._engine_of().engine.step()

    def send(self, command: Admit | Abort) -> None:
        self._engine_of().engine.post(command)

    @property
    def is_empty(self) -> bool:
        return self._engine_of().engine.is_empty

    async def close(self) -> None:
        if self._built is not None:
            self._built.engine.close()

    def _engine_of(self) -> BuiltStage:
        assert self._built is not None, "the stage was not started"
        return self._built
