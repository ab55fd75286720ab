"""What lies between two stages: how one's steps become the other's input.

    sending stage    open(ticket) ─> BridgeStream   push(step) ─> payloads   finish() ─> payloads
    receiving stage  inbox(ticket) ─> Inbox         push(payload)            end()

One bridge object serves one edge, in both processes. It knows payloads; no thread, no transport.
Streaming or not is the stream's own matter: without it, `push` gives nothing and `finish` all.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from stretto.errors import ConfigError
from stretto.payloads import Payload, StageStep
from stretto.request import Inbox, StageRequest


class BridgeStream(Protocol):
    """One request's way across, on the sending side. Used by the materializer thread alone."""

    def push(self, step: StageStep) -> tuple[Payload, ...]:
        """What can be handed on now that this step is done."""

    def finish(self) -> tuple[Payload, ...]:
        """What was still held back; called once, after the last step."""


class Bridge(Protocol):
    def open(self, ticket: StageRequest) -> BridgeStream: ...

    def inbox(self, ticket: StageRequest) -> Inbox: ...


def load_class(path: str) -> Any:
    """The class at a dotted path of a deployment file.

    Raises:
        ConfigError: there is no such module or class.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        return vars(importlib.import_module(module_name))[class_name]
    except (ImportError, ValueError, KeyError) as error:
        raise ConfigError(
            f"custom_process_next_stage_input_func: no class at {path!r}: {error!r}"
        ) from error
