"""A stage process: `python -m stretto.pipeline.worker CONTROL UPSTREAM DOWNSTREAM`.

The arguments are descriptors of sockets that the front made, -1 for none. The first message on the
control channel says what to be. The main thread runs the engine; one more reads commands. When the
front is gone, its end of the channel closes, and the process ends at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

from stretto.engine.engine import StageEngine
from stretto.errors import StrettoError
from stretto.events import Abort, Admit, Command, Ping, Pong, Report, Shutdown, StageDied
from stretto.pipeline.assembly import (
    Connectors,
    StageEdge,
    StageSpec,
    build_stage,
    edge_connector,
)
from stretto.pipeline.channel import Channel
from stretto.transfer.connector import OmniConnector
from stretto.wire import Codec

log = logging.getLogger(__name__)

# A thread that hands something on waits at most so long for the interpreter's lock while the engine
# computes; Python's own 5 ms are as long as a step of the Thinker (docs/log.md, "Hand-overs").
SWITCH_S = 0.0005

# torch's convolutions on a CPU are compiled for each shape, and 1024 kept: some 20 shapes of the
# vocoder, which has about a hundred (docs/log.md, "Kernels that are made at their first use"). In
# the environment, since that is where oneDNN reads it, at its first use.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")


def main(arguments: list[str]) -> int:
    control, upstream, downstream = (int(argument) for argument in arguments)
    # The front decides when to stop; an interrupt from the terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    channel = Channel(socket.socket(fileno=control))
    spec = channel.receive(Codec[StageSpec](StageSpec))
    if spec is None:
        return 1
    logging.basicConfig(format=f"%(asctime)s {spec.config.name}: %(message)s")
    try:
        _serve(spec, channel, upstream, downstream)
    except StrettoError as error:
        channel.send(StageDied(str(error)))
        return 1
    except Exception as error:
        log.exception("the stage ends")
        channel.send(StageDied(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _serve(spec: StageSpec, channel: Channel, upstream: int, downstream: int) -> None:
    connectors = Connectors(
        _connector(spec, spec.upstream, upstream), _connector(spec, spec.downstream, downstream)
    )
    built = build_stage(spec, connectors, _Publisher(channel), threaded=True)
    engine = built.engine
    threading.Thread(target=_obey, args=(channel, engine), name="control", daemon=True).start()
    channel.send(built.ready)
    engine.run()
    engine.close()


def _connector(spec: StageSpec, edge: StageEdge | None, descriptor: int) -> OmniConnector | None:
    return None if edge is None else edge_connector(spec, edge, socket.socket(fileno=descriptor))


def _obey(channel: Channel, engine: StageEngine) -> None:
    """Reads commands until told to stop; when the front is gone, ends the process."""
    commands: Codec[Command] = Codec(Command)
    publish = _Publisher(channel)
    while (command := channel.receive(commands)) is not None:
        match command:
            case Admit() | Abort():
                engine.post(command)
            case Ping():
                publish(_pong(engine))
            case Shutdown():
                engine.stop()
                return
    os._exit(1)


class _Publisher:
    """Sends reports; with nobody left to hear them, ends the process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __call__(self, report: Report) -> None:
        try:
            self._channel.send(report)
        except OSError:
            os._exit(1)


def _pong(engine: StageEngine) -> Pong:
    load = engine.load()
    return Pong(
        step_age_s=engine.step_age_s,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_for_chunk=load.num_waiting_for_chunk,
        dropped_chunks=engine.num_dropped_chunks,
        kv_usage=load.kv_usage,
        prefix_queried_tokens=load.prefix_queried_tokens,
        prefix_hit_tokens=load.prefix_hit_tokens,
        is_prepared=engine.is_prepared,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
