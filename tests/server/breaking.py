"""A bridge into the vocoder that fails every request at its sixth frame."""

from __future__ import annotations

from stretto.bridges.talker_to_code2wav import TalkerStream, TalkerToCode2Wav
from stretto.payloads import Payload, SpeechStep, StageStep
from stretto.request import StageRequest

FAILS_AT_FRAME = 6


class BreakingBridge(TalkerToCode2Wav):
    def open(self, ticket: StageRequest) -> TalkerStream:
        return BreakingStream(self, ticket, streaming=True)


class BreakingStream(TalkerStream):
    num_frames = 0

    def push(self, step: StageStep) -> tuple[Payload, ...]:
        assert isinstance(step, SpeechStep)
        self.num_frames += step.frame is not None
        if self.num_frames == FAILS_AT_FRAME:
            raise RuntimeError("this bridge breaks")
        return super().push(step)
