"""Talker to Code2Wav: frames, in the portions that `codec_chunks` decides."""

from __future__ import annotations

import numpy as np

from stretto.bridges.codec_chunks import CodecChunker
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

    def open(self, ticket: StageRequest) -> TalkerStream:
        return TalkerStream(self._chunker(ticket), streaming=self._async_chunk)

    def inbox(self, ticket: StageRequest) -> CodecInbox:
        assert ticket.speech is not None
        prompt = ticket.speech.prompt
        heard = None if prompt is None else prompt.reference_codes
        return CodecInbox(self._chunker(ticket), heard)

    def _chunker(self, ticket: StageRequest) -> CodecChunker:
        assert ticket.speech is not None
        assert ticket.speech.initial_codec_chunk_frames is not None, "chosen at admission"
        return CodecChunker(
            initial=ticket.speech.initial_codec_chunk_frames,
            steady=self._codec.codec_chunk_frames,
            growth=self._codec.codec_chunk_growth,
        )


class TalkerStream:
    def __init__(self, chunker: CodecChunker, *, streaming: bool) -> None:
        self._chunker = chunker
        self._streaming = streaming
        self._whole: list[np.ndarray] = []

    def push(self, step: StageStep) -> tuple[Payload, ...]:
        assert isinstance(step, SpeechStep)
        if step.frame is None:
            return ()
        if not self._streaming:
            self._whole.append(step.frame)
            return ()
        self._chunker.push(step.frame[None])
        return (CodecFrames(self._chunker.cut()),) if self._chunker.is_ready else ()

    def finish(self) -> tuple[Payload, ...]:
        if self._whole:
            return (CodecFrames(np.stack(self._whole)),)
        return (CodecFrames(self._chunker.cut()),) if self._chunker.num_held else ()


class CodecInbox:
    """Frames that wait for the vocoder; each call of it gets one portion.

    Before them come the frames of a reference to speak like, int16 [n, num_codebooks]: the vocoder
    hears them as what was just said, and their sound is nobody's.
    """

    def __init__(self, chunker: CodecChunker, reference: np.ndarray | None = None) -> None:
        self._chunker = chunker
        self._ended = False
        self._reference: list[np.ndarray] = []
        if reference is not None:
            portions = range(0, len(reference), REFERENCE_PORTION)
            self._reference = [reference[at : at + REFERENCE_PORTION] for at in portions]

    @property
    def is_ready(self) -> bool:
        """Whether there is a portion to decode: a full one, or the rest of an ended stream."""
        if self._reference:
            return True
        return self._chunker.is_ready or (self._ended and self._chunker.num_held > 0)

    @property
    def is_done(self) -> bool:
        return self._ended and self._chunker.num_held == 0

    def take(self) -> tuple[np.ndarray, bool]:
        """The next portion, int16 [frames, num_codebooks], and whether its sound is heard."""
        if self._reference:
            return self._reference.pop(0), False
        return self._chunker.cut(), True

    def push(self, payload: Payload) -> None:
        assert isinstance(payload, CodecFrames)
        self._chunker.push(payload.codes)

    def end(self) -> None:
        self._ended = True
