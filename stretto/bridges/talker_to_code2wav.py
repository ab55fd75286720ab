"""Talker to Code2Wav: frames, in the portions that `codec_chunks` decides."""

from __future__ import annotations

import numpy as np

from stretto.bridges.codec_chunks import CodecChunker
from stretto.config.deployment import CodecChunkConfig, EdgeConfig
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.payloads import CodecFrames, Payload, SpeechStep, StageStep
from stretto.request import StageRequest


class TalkerToCode2Wav:
    """The bridge of this edge. Codes only: the vocoder needs no hidden rows."""

    def __init__(self, spec: OmniSpec, edge: EdgeConfig, *, async_chunk: bool) -> None:
        self._codec = edge.codec or CodecChunkConfig()
        self._async_chunk = async_chunk

    def open(self, ticket: StageRequest) -> TalkerStream:
        return TalkerStream(self._chunker(ticket), streaming=self._async_chunk)

    def inbox(self, ticket: StageRequest) -> CodecInbox:
        return CodecInbox(self._chunker(ticket))

    def _chunker(self, ticket: StageRequest) -> CodecChunker:
        assert ticket.speech is not None
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
    """Frames that wait for the vocoder; each call of it gets one portion."""

    def __init__(self, chunker: CodecChunker) -> None:
        self._chunker = chunker
        self._ended = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a portion to decode: a full one, or the rest of an ended stream."""
        return self._chunker.is_ready or (self._ended and self._chunker.num_held > 0)

    @property
    def is_done(self) -> bool:
        return self._ended and self._chunker.num_held == 0

    def take(self) -> np.ndarray:
        """The next portion, int16 [frames, num_codebooks]."""
        return self._chunker.cut()

    def push(self, payload: Payload) -> None:
        assert isinstance(payload, CodecFrames)
        self._chunker.push(payload.codes)

    def end(self) -> None:
        self._ended = True
