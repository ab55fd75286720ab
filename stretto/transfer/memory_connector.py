"""A connector within one process: for stages that run inline, and for tests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from stretto.transfer.connector import Buffer, ConnectorClosed, request_of


class MemoryConnector:
    """Both ends in one object."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[str, bytes] = {}
        self._unnamed: deque[str] = deque()
        self._closed = False

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Sequence[Buffer]) -> int:
        whole = b"".join(data)
        with self._changed:
            if self._closed:
                raise ConnectorClosed(f"{from_stage}->{to_stage} is closed")
            self._arrived[put_key] = whole
            self._unnamed.append(put_key)
            self._changed.notify_all()
        return len(whole)

    def get(self, from_stage: str, to_stage: str, get_key: str, timeout: float) -> memoryview:
        with self._changed:
            there = self._changed.wait_for(
                lambda: get_key in self._arrived or self._closed, timeout
            )
            if get_key in self._arrived:
                return memoryview(self._arrived.pop(get_key))
            if there:
                raise ConnectorClosed(f"{from_stage}->{to_stage} is closed")
            raise TimeoutError(f"{from_stage}->{to_stage}: nothing under {get_key} in {timeout} s")

    def wait(self, timeout: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._unnamed) or self._closed, timeout)
            if self._unnamed:
                return self._unnamed.popleft()
            if self._closed:
                raise ConnectorClosed("closed")
            return None

    def discard(self, request_id: str) -> None:
        with self._changed:
            for key in [key for key in self._arrived if request_of(key) == request_id]:
                del self._arrived[key]
            self._unnamed = deque(key for key in self._unnamed if request_of(key) != request_id)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
