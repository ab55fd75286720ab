"""Structs to bytes and back; arrays travel beside the message, without an extra copy.

    ┌─────────────┬──────────────────┬─────┬──────────┬─────┬──────────┐
    │ head length │ msgpack head     │ pad │ array 0  │ pad │ array 1  │ ...
    │ u32 LE      │ (arrays as refs) │     │          │     │          │
    └─────────────┴──────────────────┴─────┴──────────┴─────┴──────────┘

A reference in the head is (dtype, shape, offset). Arrays start at multiples of 64 bytes, so that
the receiver may use them in place. Knows structs and arrays; no request, no transport.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

ALIGNMENT = 64
HEAD_LENGTH = struct.Struct("<I")

# Receivers check against this list before they build an array from foreign bytes.
DTYPES = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "float16", "float32"})
# numpy works a dtype's name out in Python, at every call.
NAMES = {np.dtype(name): name for name in DTYPES}

T = TypeVar("T")


# Larger than any message; keeps foreign numbers from overflowing anything.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _ArrayRef(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[Size, ...]
    offset: Size


class Codec(Generic[T]):
    """Encodes and decodes one struct type (or a union of tagged ones)."""

    def __init__(self, kind: type[T] | Any) -> None:
        self._kind = kind

    def encode(self, value: T) -> list[bytes | memoryview]:
        """Buffers to be sent one behind the other; arrays are views of the caller's memory."""
        arrays: list[np.ndarray] = []
        offset = 0

        def reference(item: Any) -> tuple[str, tuple[int, ...], int]:
            nonlocal offset
            if not isinstance(item, np.ndarray):
                raise TypeError(f"{type(item).__name__} cannot travel between stages")
            array = np.ascontiguousarray(item)
            arrays.append(array)
            start = offset
            offset += _padded(array.nbytes)
            # As an `_ArrayRef` is encoded.
            return NAMES.get(array.dtype) or str(array.dtype), array.shape, start

        head = msgspec.msgpack.encode(value, enc_hook=reference)
        first = HEAD_LENGTH.pack(len(head)) + head
        buffers: list[bytes | memoryview] = [first + bytes(_padding(len(first)))]
        for array in arrays:
            buffers.append(array.reshape(-1).view(np.uint8).data)
            if padding := _padding(array.nbytes):
                buffers.append(bytes(padding))
        return buffers

    def decode(self, data: bytes | memoryview) -> T:
        """The struct in `data`; its arrays are views of `data`.

        Raises:
            ValueError: the bytes are not such a struct, or an array of it reaches past the end or
                is of a dtype that is not allowed (msgspec's errors are ValueErrors too).
        """
        view = memoryview(data)
        if len(view) < HEAD_LENGTH.size:
            raise ValueError(f"{len(view)} bytes are no message")
        (head_length,) = HEAD_LENGTH.unpack_from(view)
        head = view[HEAD_LENGTH.size : HEAD_LENGTH.size + head_length]
        body = view[_padded(HEAD_LENGTH.size + head_length) :]

        def resolve(kind: type, item: Any) -> Any:
            if kind is not np.ndarray:
                raise NotImplementedError(f"cannot decode {kind}")
            ref = msgspec.convert(item, _ArrayRef)
            if ref.dtype not in DTYPES:
                raise ValueError(f"dtype {ref.dtype!r} is not allowed on the wire")
            count = math.prod(ref.shape)
            if count > len(body):
                raise ValueError(f"an array of {count} items does not fit {len(body)} bytes")
            return np.ndarray(ref.shape, ref.dtype, body, ref.offset)

        decoded: T = msgspec.msgpack.decode(head, type=self._kind, dec_hook=resolve)
        return decoded


def _padding(length: int) -> int:
    return -length % ALIGNMENT


def _padded(length: int) -> int:
    return length + _padding(length)
