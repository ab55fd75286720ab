"""Every frame is heard once and in order, whatever the portions, and the first one follows load."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.bridges.codec_chunks import CodecChunker, initial_frames_for_load
from stretto.bridges.talker_to_code2wav import TalkerToCode2Wav
from stretto.config.deployment import CodecChunkConfig, EdgeConfig
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.payloads import CodecFrames, Payload, SpeechStep
from tests.fakes import NUM_CODEBOOKS, ticket

# 3 * 25 + r for every r, and what is around one, the first and the second chunk.
NUM_FRAMES = [0, 1, 2, 3, 4, 5, 24, 25, 26, 28, 29, 30, 54, *range(75, 100), 300]
SIZES = [(1, 1), (1, 25), (2, 4), (4, 25), (16, 25), (25, 25), (3, 3)]


def frame(number: int) -> np.ndarray:
    return np.full(NUM_CODEBOOKS, number, np.int16)


def numbers(portions: list[np.ndarray]) -> list[int]:
    return [int(code) for portion in portions for code in portion[:, 0]]


def a_bridge(spec: OmniSpec, *, steady: int, streaming: bool) -> TalkerToCode2Wav:
    codec = CodecChunkConfig(codec_chunk_frames=steady, initial_codec_chunk_frames=1)
    edge = EdgeConfig(from_stage="talker", to_stage="code2wav", codec=codec)
    return TalkerToCode2Wav(spec, edge, async_chunk=streaming)


def sent(
    spec: OmniSpec, num_frames: int, *, initial: int, steady: int, streaming: bool
) -> tuple[list[Payload], list[np.ndarray]]:
    """The payloads of a Talker's stream, and the portions the vocoder then gets of them."""
    bridge = a_bridge(spec, steady=steady, streaming=streaming)
    request = ticket("r", initial_frames=initial)
    stream, inbox = bridge.open(request), bridge.inbox(request)
    portions: list[np.ndarray] = []
    payloads: list[Payload] = []

    def receive(arrived: tuple[Payload, ...]) -> None:
        payloads.extend(arrived)
        for payload in arrived:
            inbox.push(payload)
        while inbox.is_ready:
            portions.append(inbox.take()[0])

    for number in range(num_frames):
        receive(stream.push(SpeechStep(frame(number))))
    # The step that ended it has no frame.
    receive(stream.push(SpeechStep(None)))
    receive(stream.finish())
    assert not inbox.is_done
    inbox.end()
    receive(())
    assert inbox.is_done
    return payloads, portions


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize(("initial", "steady"), SIZES)
def test_every_frame_is_heard_once_and_in_order(
    tiny_spec: OmniSpec, num_frames: int, initial: int, steady: int
) -> None:
    for streaming in (True, False):
        payloads, portions = sent(
            tiny_spec, num_frames, initial=initial, steady=steady, streaming=streaming
        )
        assert numbers(portions) == list(range(num_frames))
        carried = [p.codes for p in payloads if isinstance(p, CodecFrames)]
        assert numbers(carried) == list(range(num_frames))
        assert all(len(codes) for codes in carried)


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize(("initial", "steady"), SIZES)
def test_the_vocoder_gets_the_same_portions_whether_chunks_come_early_or_all_at_the_end(
    tiny_spec: OmniSpec, num_frames: int, initial: int, steady: int
) -> None:
    _, early = sent(tiny_spec, num_frames, initial=initial, steady=steady, streaming=True)
    whole, late = sent(tiny_spec, num_frames, initial=initial, steady=steady, streaming=False)
    assert [len(portion) for portion in early] == [len(portion) for portion in late]
    assert len(whole) <= 1


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize(("initial", "steady"), SIZES)
def test_the_first_portion_is_the_initial_one_and_only_the_last_may_be_short(
    num_frames: int, initial: int, steady: int
) -> None:
    chunker = CodecChunker(initial=initial, steady=steady)
    sizes = []
    for number in range(num_frames):
        chunker.push(frame(number)[None])
        if chunker.is_ready:
            sizes.append(len(chunker.cut()))
        assert chunker.num_held < steady
    full = [initial, *[steady] * num_frames][: len(sizes)]
    assert sizes == full
    assert chunker.num_held == num_frames - sum(sizes)


def test_frames_may_come_in_any_bundles() -> None:
    chunker = CodecChunker(initial=2, steady=5)
    heard: list[np.ndarray] = []
    rows = np.stack([frame(number) for number in range(71)])
    for bundle in (rows[:32], rows[32:32], rows[32:64], rows[64:]):
        chunker.push(bundle)
        while chunker.is_ready:
            heard.append(chunker.cut())
    heard.append(chunker.cut())
    assert [len(portion) for portion in heard] == [2, *[5] * 13, 4]
    assert numbers(heard) == list(range(71))


def test_an_empty_payload_is_nothing_and_the_stream_goes_on(tiny_spec: OmniSpec) -> None:
    bridge = a_bridge(tiny_spec, steady=2, streaming=True)
    inbox = bridge.inbox(ticket("r"))
    inbox.push(CodecFrames(np.zeros((0, NUM_CODEBOOKS), np.int16)))
    assert not inbox.is_ready
    inbox.push(CodecFrames(frame(7)[None]))
    assert numbers([inbox.take()[0]]) == [7]
    inbox.push(CodecFrames(np.zeros((0, NUM_CODEBOOKS), np.int16)))
    inbox.end()
    assert (inbox.is_ready, inbox.is_done) == (False, True)


def test_what_a_chunk_holds_does_not_change_when_the_talker_goes_on(tiny_spec: OmniSpec) -> None:
    bridge = a_bridge(tiny_spec, steady=2, streaming=True)
    stream = bridge.open(ticket("r", initial_frames=2))
    buffer = np.zeros((2, NUM_CODEBOOKS), np.int16)
    stream.push(SpeechStep(buffer[0]))
    (payload,) = stream.push(SpeechStep(buffer[1]))
    buffer[:] = 9
    assert isinstance(payload, CodecFrames)
    assert not payload.codes.any()


def test_the_first_chunk_grows_with_the_load_up_to_a_limit() -> None:
    sizes = [initial_frames_for_load(others, 25) for others in range(100)]
    assert sizes[:7] == [2, 2, 3, 3, 4, 4, 5]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 16


def first_sizes(spec: OmniSpec, num_requests: int, *, streaming: bool) -> list[int]:
    """First portions at the receiver of requests that all came before any of them had a frame."""
    edge = EdgeConfig(from_stage="talker", to_stage="code2wav", codec=CodecChunkConfig())
    sender, receiver = (TalkerToCode2Wav(spec, edge, async_chunk=streaming) for _ in range(2))
    tickets = [ticket(f"r{n}", initial_frames=None) for n in range(num_requests)]
    streams = [sender.open(request) for request in tickets]
    inboxes = [receiver.inbox(request) for request in tickets]
    for stream, inbox in zip(streams, inboxes, strict=True):
        for number in range(60):
            for payload in stream.push(SpeechStep(frame(number))):
                inbox.push(payload)
        for payload in stream.finish():
            inbox.push(payload)
    return [len(inbox.take()[0]) for inbox in inboxes]


@pytest.mark.parametrize("streaming", [True, False])
def test_all_of_a_burst_count_for_the_first_chunk_of_each(
    tiny_spec: OmniSpec, streaming: bool
) -> None:
    assert first_sizes(tiny_spec, 1, streaming=streaming) == [2]
    assert first_sizes(tiny_spec, 10, streaming=streaming) == [6] * 10


def test_streams_that_have_gone_do_not_count(tiny_spec: OmniSpec) -> None:
    edge = EdgeConfig(from_stage="talker", to_stage="code2wav", codec=CodecChunkConfig())
    bridge = TalkerToCode2Wav(tiny_spec, edge, async_chunk=True)
    for number in range(10):
        bridge.open(ticket(f"r{number}", initial_frames=None))
    stream = bridge.open(ticket("alone", initial_frames=None))
    assert stream.push(SpeechStep(frame(0))) == ()
    (payload,) = stream.push(SpeechStep(frame(1)))
    assert isinstance(payload, CodecFrames)
    assert (len(payload.codes), payload.initial_frames) == (2, 2)


@pytest.mark.parametrize("steady", [1, 2, 3, 10, 16, 25])
def test_the_first_chunk_is_never_larger_than_the_others(steady: int) -> None:
    assert all(1 <= initial_frames_for_load(others, steady) <= steady for others in range(100))
