"""A connector between two processes of one machine: a socket for keys, shared memory for bulk.

    sender   ── [key, length, bytes] ──────────────────────────────> receiver     small
    sender   ── [key, length] + descriptor of a memory file ───────> receiver     large

Messages go over a Unix socket pair that keeps message borders (SOCK_SEQPACKET), so a message is
its own doorbell: nobody polls, nothing has a lock. A large payload lies in an anonymous memory file
(memfd) whose descriptor travels with the message. It never has a name, so nothing can be left in
/dev/shm, whoever is killed and when: the kernel frees it with its last descriptor.

The kernel keeps the time-outs (SO_SNDTIMEO, SO_RCVTIMEO), so that a hop is one system call on
either side. Each call lets go of the interpreter's lock, which the engine's thread then takes and
keeps for a while: with Python's own time-outs there were three (docs/log.md, "Hand-overs").

Linux only.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

from stretto.transfer.connector import Buffer, ConnectorClosed, request_of

# Seconds and microseconds, as the kernel takes a time-out.
TIMEVAL = struct.Struct("@ll")
# Length of the key, length of the payload, whether the payload is in a memory file.
HEADER = struct.Struct("<HQ?")
# A message holds a key, a header and at most this much payload.
MAX_INLINE_BYTES = 65536
MAX_KEY_BYTES = 1024
DESCRIPTOR_BYTES = array.array("i", [0]).itemsize
# The kernel takes at most this many buffers in one call.
MAX_BUFFERS = 512


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of an edge: (sender's, receiver's)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SharedMemoryConnector:
    """One end of an edge. Used by one thread: the sender's by `put`, the other by `wait`, `get`."""

    def __init__(self, end: socket.socket, *, inline_bytes: int, send_timeout: float) -> None:
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout))
        self._socket = end
        # As the kernel knows it; None: for ever, as in the beginning.
        self._receive_timeout: float | None = None
        self._inline_bytes = min(inline_bytes, MAX_INLINE_BYTES)
        self._send_timeout = send_timeout
        # None: its memory file could not be taken in.
        self._arrived: dict[str, memoryview | None] = {}
        self._unnamed: deque[str] = deque()

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Sequence[Buffer]) -> int:
        key = put_key.encode()
        views = [memoryview(buffer).cast("B") for buffer in data]
        length = sum(len(view) for view in views)
        try:
            if length <= self._inline_bytes:
                head = HEADER.pack(len(key), length, False) + key
                self._socket.sendmsg([head, *_few(views)])
                return length
            descriptor = _memory_file(put_key, views)
            try:
                head = HEADER.pack(len(key), length, True) + key
                rights = array.array("i", [descriptor])
                self._socket.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            finally:
                os.close(descriptor)
        except BlockingIOError as error:
            raise TimeoutError(f"{to_stage} took nothing for {self._send_timeout} s") from error
        except OSError as error:
            raise ConnectorClosed(f"{from_stage}->{to_stage}: {error}") from error
        return length

    def get(self, from_stage: str, to_stage: str, get_key: str, timeout: float) -> memoryview:
        while get_key not in self._arrived:
            if not self._receive(timeout):
                raise TimeoutError(
                    f"{from_stage}->{to_stage}: nothing under {get_key} in {timeout} s"
                )
        data = self._arrived.pop(get_key)
        if data is None:
            raise ValueError(
                f"{from_stage}->{to_stage}: no descriptor was free to take {get_key} in; "
                "too many open files"
            )
        return data

    def wait(self, timeout: float) -> str | None:
        if not self._unnamed:
            self._receive(timeout)
        return self._unnamed.popleft() if self._unnamed else None

    def discard(self, request_id: str) -> None:
        for key in [key for key in self._arrived if request_of(key) == request_id]:
            del self._arrived[key]
        self._unnamed = deque(key for key in self._unnamed if request_of(key) != request_id)

    def close(self) -> None:
        # The other end may be gone already, which is what closing is for.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self, timeout: float) -> bool:
        """Takes in one message; False when none came in time."""
        try:
            if timeout > 0 and timeout != self._receive_timeout:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))
                self._receive_timeout = timeout
            message, ancillary, flags, _ = self._socket.recvmsg(
                HEADER.size + MAX_KEY_BYTES + MAX_INLINE_BYTES,
                socket.CMSG_SPACE(DESCRIPTOR_BYTES),
                0 if timeout > 0 else socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectorClosed(str(error)) from error
        if not message:
            raise ConnectorClosed("the sender has closed its end")
        assert not flags & socket.MSG_TRUNC, "a message was cut short"
        key_length, length, in_file = HEADER.unpack_from(message)
        body = memoryview(message)[HEADER.size :]
        key = bytes(body[:key_length]).decode()
        if not in_file:
            self._arrived[key] = body[key_length:]
        elif flags & socket.MSG_CTRUNC:
            # The kernel found no free descriptor for it, and has dropped it.
            self._arrived[key] = None
        else:
            self._arrived[key] = _mapped(ancillary, length)
        self._unnamed.append(key)
        return True


def _timeval(seconds: float) -> bytes:
    # All zeros would mean for ever.
    microseconds = max(1, round(seconds * 1e6))
    return TIMEVAL.pack(*divmod(microseconds, 1_000_000))


def _few(views: Sequence[memoryview]) -> Sequence[Buffer]:
    return views if len(views) < MAX_BUFFERS else [b"".join(views)]


def _memory_file(name: str, views: Sequence[memoryview]) -> int:
    """The descriptor of a memory file that holds the bytes."""
    descriptor = os.memfd_create(name[:200], os.MFD_CLOEXEC)
    try:
        for rest in views:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        os.close(descriptor)
        size = sum(len(view) for view in views)
        raise OSError(
            error.errno, f"no shared memory for a chunk of {size} bytes: {error.strerror}"
        ) from error
    return descriptor


def _mapped(ancillary: list[tuple[int, int, bytes]], length: int) -> memoryview:
    """The memory file in a message, mapped; unmapped when its last view is gone."""
    (_, _, rights) = ancillary[0]
    descriptor = array.array("i", rights[:DESCRIPTOR_BYTES])[0]
    try:
        return memoryview(mmap.mmap(descriptor, length, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
