"""Whatever stages hand each other comes out as it went in, and foreign bytes do no harm."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from stretto.payloads import Chunk, CodecFrames, Payload, SpokenTokens, ThinkerPrompt
from stretto.wire import ALIGNMENT, DTYPES, Codec


class Parcel(msgspec.Struct, frozen=True):
    label: str
    arrays: tuple[np.ndarray, ...]


PARCELS: Codec[Parcel] = Codec(Parcel)
CHUNKS: Codec[Chunk] = Codec(Chunk)

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: stnp.arrays(
        dtype, stnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
    )
)
parcels = st.builds(Parcel, label=st.text(max_size=200), arrays=st.lists(arrays).map(tuple))
ids = stnp.arrays(np.int32, st.integers(0, 40))
payloads: st.SearchStrategy[Payload] = st.one_of(
    st.builds(ThinkerPrompt, user_ids=ids, head_ids=st.none() | ids),
    st.builds(SpokenTokens, token_ids=ids),
    st.builds(CodecFrames, codes=stnp.arrays(np.int16, st.tuples(st.integers(0, 30), st.just(16)))),
)


def sent(buffers: list[bytes | memoryview]) -> bytes:
    return b"".join(buffers)


def assert_same(got: np.ndarray, given: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (given.dtype, given.shape)
    assert got.tobytes() == given.tobytes()


@given(parcels)
def test_what_goes_in_comes_out(parcel: Parcel) -> None:
    got = PARCELS.decode(sent(PARCELS.encode(parcel)))
    assert got.label == parcel.label
    assert len(got.arrays) == len(parcel.arrays)
    for array, original in zip(got.arrays, parcel.arrays, strict=True):
        assert_same(array, original)


@given(st.text(), st.integers(0, 2**40), st.booleans(), st.lists(payloads, max_size=4).map(tuple))
def test_a_chunk_keeps_its_payloads_and_their_order(
    request_id: str, index: int, last: bool, given_payloads: tuple[Payload, ...]
) -> None:
    got = CHUNKS.decode(sent(CHUNKS.encode(Chunk(request_id, index, last, given_payloads))))
    assert (got.request_id, got.index, got.last) == (request_id, index, last)
    assert [type(payload) for payload in got.payloads] == [type(p) for p in given_payloads]
    for payload, original in zip(got.payloads, given_payloads, strict=True):
        for name in payload.__struct_fields__:
            array, before = getattr(payload, name), getattr(original, name)
            assert (array is None) == (before is None)
            if array is not None:
                assert_same(array, before)


@given(parcels)
def test_arrays_start_where_vector_instructions_want_them(parcel: Parcel) -> None:
    whole = np.zeros(1 << 14, np.uint8)
    base = -whole.ctypes.data % ALIGNMENT
    data = sent(PARCELS.encode(parcel))
    if len(data) > len(whole) - base:
        return
    whole[base : base + len(data)] = np.frombuffer(data, np.uint8)
    for array in PARCELS.decode(whole[base : base + len(data)].data).arrays:
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0


def test_neither_end_copies_an_array() -> None:
    array = np.arange(1000, dtype=np.int32)
    buffers = PARCELS.encode(Parcel("", (array,)))
    views = [np.frombuffer(b, np.uint8) for b in buffers if isinstance(b, memoryview)]
    assert any(np.shares_memory(view, array) for view in views)
    whole = np.frombuffer(bytearray(sent(buffers)), np.uint8)
    (received,) = PARCELS.decode(whole.data).arrays
    assert np.shares_memory(received, whole)


def test_an_array_with_gaps_travels_without_them() -> None:
    array = np.arange(60, dtype=np.int16).reshape(6, 10)[::2, 1::3]
    (received,) = PARCELS.decode(sent(PARCELS.encode(Parcel("", (array,))))).arrays
    assert_same(received, np.ascontiguousarray(array))


@pytest.mark.parametrize("value", [1 + 2j, object()])
def test_what_is_no_array_is_refused_by_the_sender(value: object) -> None:
    codec: Codec[object] = Codec(object)
    with pytest.raises(TypeError, match="cannot travel between stages"):
        codec.encode([value])


def a_head(head: object) -> bytes:
    packed = msgspec.msgpack.encode(head)
    return struct.pack("<I", len(packed)) + packed


def a_parcel(dtype: object, shape: object, offset: object, body: bytes = bytes(256)) -> bytes:
    data = a_head({"label": "", "arrays": [[dtype, shape, offset]]})
    return data + bytes(-len(data) % ALIGNMENT) + body


HOSTILE = {
    "nothing": b"",
    "half a length": b"\x01\x00",
    "a length and no more": b"\xff\x00\x00\x00",
    "a length past the end": b"\xff\xff\xff\xff" + bytes(64),
    "noise": bytes(range(7, 250)),
    "another struct": a_head({"label": 5}),
    "a number": a_head(7),
    "an array past the end": a_parcel("int32", [100], 0),
    "an array from beyond the end": a_parcel("int32", [1], 1 << 20),
    "an array from before the start": a_parcel("int8", [1], -1),
    "a dtype that is not sent": a_parcel("complex64", [1], 0),
    "times": a_parcel("datetime64[s]", [1], 0),
    "objects": a_parcel("object", [1], 0),
    "a text as dtype": a_parcel("int32,(1000,)f8", [1], 0),
    "a shape that is none": a_parcel("int32", "abc", 0),
    "a shape that overflows": a_parcel("int8", [1 << 32, 1 << 32], 0),
    "a side that overflows": a_parcel("int8", [(1 << 64) - 1], 0),
    "an offset that overflows": a_parcel("int8", [1], (1 << 64) - 1),
    "a side below nothing": a_parcel("int8", [-1], 0),
    "a text that is no text": struct.pack("<I", 9) + b"\x81\xa5label\xa1\xff",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_foreign_bytes_are_a_value_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ValueError):
        PARCELS.decode(data)


@given(parcels, st.data())
def test_a_torn_message_is_a_value_error_or_short_of_nothing(
    parcel: Parcel, data: st.DataObject
) -> None:
    whole = sent(PARCELS.encode(parcel))
    torn = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        got = PARCELS.decode(torn)
    except ValueError:
        return
    for array, original in zip(got.arrays, parcel.arrays, strict=True):
        assert_same(array, original)
