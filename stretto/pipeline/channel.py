"""The control channel between the front and one stage process: length, message, length, message.

A socket pair made by the front; when either process is gone, the other reads the end of the stream,
so nobody has to ask whether the other still lives.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import TypeVar

from stretto.events import Report
from stretto.wire import Codec

LENGTH = struct.Struct("<I")

T = TypeVar("T")


class Channel:
    """The stage's end: blocking reads by one thread, sends by any."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = end.makefile("rb")
        self._reports: Codec[Report] = Codec(Report)
        self._sending = threading.Lock()

    def send(self, report: Report) -> None:
        """Raises OSError when the front is gone."""
        framed = frame(self._reports, report)
        with self._sending:
            self._socket.sendall(framed)

    def receive(self, codec: Codec[T]) -> T | None:
        """The next message; None at the end of the stream."""
        head = self._reader.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = self._reader.read(length)
        return codec.decode(body) if len(body) == length else None


def frame(codec: Codec[T], message: T) -> bytes:
    body = b"".join(codec.encode(message))
    return LENGTH.pack(len(body)) + body
