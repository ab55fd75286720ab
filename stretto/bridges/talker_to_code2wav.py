"""Talker to Code2Wav: frames, in the portions that `codec_chunks` decides.

The first portion is fixed where the stream begins, at the sender's first frame; the first frames
say it to the receiver, whether they come early or all at the end.
"""

from __future__ import annotations

import weakref

import numpy as np

from stretto.bridges.codec_chunks import CodecChunker, initial_frames_for_load
from stretto.config.deployment import CodecChunkConfig, EdgeConfig
from stretto.models.family import ModelSpec
from stretto.payloads import CodecFrames, Payload, SpeechStep, StageStep
from stretto.request import StageRequest

# Frames of a reference per call: others' frames do not wait for the whole of it.
REFERENCE_PORTION = 25


class TalkerToCode2Wav:
    """The bridge of this edge. Codes only: the vocoder needs no hidden rows."""

    def __init__(self, spec: ModelSpec, edge: EdgeConfig, *, async_chunk: bool) -> None:
        self._codec = edge.codec or CodecChunkConfig()
        self._async_chunk = async_chunk
        # Of the sending side. One that is dropped goes with the outlet that held it.
        self._streams: weakref.WeakSet[TalkerStream] = weakref.WeakSet()

    def open(self, ticket: StageRequest) -> TalkerStream:
        stream = TalkerStream(self, ticket, streaming=self._async_chunk)
        self._streams.add(stream)
        return stream

    def inbox(self, ticket: StageRequest) -> CodecInbox:
        return CodecInbox(self, ticket)

    def initial_frames(self, ticket: StageRequest) -> int:
        """The first portion of a stream that begins now: as fixed, or by who else is speaking."""
        assert ticket.speech is not None
        asked, deployed = ticket.speech.initial_codec_chunk_frames, self._codec
        if asked is not None:
            return asked
        if deployed.initial_codec_chunk_frames != "auto":
            return deployed.initial_codec_chunk_frames
        others = max(0, len(self._streams) - 1)
        return initial_frames_for_load(others, deployed.codec_chunk_frames)

    def chunker(self, initial: int) -> CodecChunker:
        return CodecChunker(
            initial=initial,
            steady=self._codec.codec_chunk_frames,
            growth=self._codec.codec_chunk_growth,
        )


class TalkerStream:
    def __init__(self, bridge: TalkerToCode2Wav, ticket: StageRequest, *, streaming: bool) -> None:
        self._bridge = bridge
        self._ticket = ticket
        self._streaming = streaming
        self._whole: list[np.ndarray] = []
        # Until the first of its frames is handed on: what the receiver is told.
        self._initial: int | None = None
        self._chunker: CodecChunker | None = None

    def push(self, step: StageStep) -> tuple[Payload, ...]:
        assert isinstance(step, SpeechStep)
        if step.frame is None:
            return ()
        if self._chunker is None:
            # Not before: now those who came in the same burst are known.
            self._initial = self._bridge.initial_frames(self._ticket)
            self._chunker = self._bridge.chunker(self._initial)
        if not self._streaming:
            self._whole.append(step.frame)
            return ()
        self._chunker.push(step.frame[None])
        return (self._frames(self._chunker.cut()),) if self._chunker.is_ready else ()

    def finish(self) -> tuple[Payload, ...]:
        if self._whole:
            return (self._frames(np.stack(self._whole)),)
        if self._chunker is None or not self._chunker.num_held:
            return ()
        return (self._frames(self._chunker.cut()),)

    def _frames(self, codes: np.ndarray) -> CodecFrames:
        initial, self._initial = self._initial, None
        return CodecFrames(codes, initial)


class CodecInbox:
    """Frames that wait for the vocoder; each call of it gets one portion.

    Before them come the frames of a reference to speak like, int16 [n, num_codebooks]: the vocoder
    hears them as what was just said, and their sound is nobody's.
    """

    def __init__(self, bridge: TalkerToCode2Wav, ticket: StageRequest) -> None:
        self._bridge = bridge
        self._ticket = ticket
        # Made when the first frames say how it is to cut.
        self._chunker: CodecChunker | None = None
        self._ended = False
        self._reference: list[np.ndarray] = []
        assert ticket.speech is not None
        prompt = ticket.speech.prompt
        if prompt is not None and prompt.reference_codes is not None:
            reference = prompt.reference_codes
            portions = range(0, len(reference), REFERENCE_PORTION)
            self._reference = [reference[at : at + REFERENCE_PORTION] for at in portions]

    @property
    def is_ready(self) -> bool:
        """Whether there is a portion to decode: a full one, or the rest of an ended stream."""
        if self._reference:
            return True
        if self._chunker is None:
            return False
        return self._chunker.is_ready or (self._ended and self._chunker.num_held > 0)

    @property
    def is_done(self) -> bool:
        return self._ended and (self._chunker is None or self._chunker.num_held == 0)

    @property
    def portion_frames(self) -> int:
        if self._reference:
            return len(self._reference[0])
        assert self._chunker is not None
        return self._chunker.portion_frames

    def take(self) -> tuple[np.ndarray, bool]:
        """The next portion, int16 [frames, num_codebooks], and whether its sound is heard."""
        if self._reference:
            return self._reference.pop(0), False
        assert self._chunker is not None
        return self._chunker.cut(), True

    def push(self, payload: Payload) -> None:
        assert isinstance(payload, CodecFrames)
        if self._chunker is None:
            initial = payload.initial_frames or self._bridge.initial_frames(self._ticket)
            self._chunker = self._bridge.chunker(initial)
        self._chunker.push(payload.codes)

    def end(self) -> None:
        self._ended = True
