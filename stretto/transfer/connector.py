"""The transport between two stages: moves bytes under a key, knows no request.

put(from, to, key, buffers)      sender's side
wait(timeout) -> key             receiver's side: the doorbell
get(from, to, key, timeout)      receiver's side: the bytes, once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | memoryview


class ConnectorClosed(Exception):
    """The other end is gone, or this one was closed."""


class OmniConnector(Protocol):
    def put(self, from_stage: str, to_stage: str, put_key: str, data: Sequence[Buffer]) -> int:
        """Hands the buffers over as one piece under `put_key`; their total length in bytes.

        Raises:
            ConnectorClosed: the receiver is gone.
            TimeoutError: the receiver takes nothing.
        """

    def get(self, from_stage: str, to_stage: str, get_key: str, timeout: float) -> memoryview:
        """The bytes that were put under `get_key`, once; waits for them at most `timeout` seconds.

        Raises:
            TimeoutError: nothing was put under that key in time.
            ConnectorClosed: the sender is gone and nothing more will come.
            ValueError: it came, and cannot be read.
        """

    def wait(self, timeout: float) -> str | None:
        """A key that has arrived and was not named before; None after `timeout` seconds.

        Raises:
            ConnectorClosed: the sender is gone and everything it sent was named.
        """

    def discard(self, request_id: str) -> None:
        """Frees what has arrived for a request and was not got."""

    def close(self) -> None:
        """Ends this side; a `wait` under way returns or raises ConnectorClosed."""


def chunk_key(request_id: str, stage_id: int, chunk_id: int) -> str:
    """The key of a chunk that stage `stage_id` sends."""
    return f"{request_id}_{stage_id}_{chunk_id}"


def request_of(key: str) -> str:
    return key.rsplit("_", 2)[0]
