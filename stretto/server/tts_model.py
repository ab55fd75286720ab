"""The speech routes' model, where the pipeline is Qwen3-TTS."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import InvalidRequest
from stretto.models.qwen3_tts.spec import ModelKind
from stretto.pipeline.pipeline import PipelineRequest
from stretto.pipeline.tts_frontend import SpeakOptions, TtsFrontend, Voice
from stretto.server.speech_model import SpeechInput, TaskType, VoiceSample

TASK_OF: dict[ModelKind, TaskType] = {
    "custom_voice": "CustomVoice",
    "voice_design": "VoiceDesign",
    "base": "Base",
}


class TtsModel:
    """A `SpeechModel` over a frontend."""

    def __init__(self, frontend: TtsFrontend) -> None:
        self._frontend = frontend

    @property
    def kinds(self) -> Sequence[TaskType]:
        return (TASK_OF[self._frontend.spec.model_kind],)

    @property
    def speakers(self) -> Sequence[str]:
        return self._frontend.speakers

    @property
    def languages(self) -> Sequence[str]:
        return self._frontend.languages[1:]

    def prepare(self, speech: SpeechInput) -> PipelineRequest:
        if speech.task_type not in self.kinds:
            raise InvalidRequest(
                "task_type",
                f"task_type is {speech.task_type!r}; this checkpoint does {self.kinds[0]!r}",
            )
        options = SpeakOptions(
            speaker=speech.speaker,
            language=speech.language,
            instructions=speech.instructions,
            voice=None if speech.voice is None else _voice(speech.voice),
            text_first=speech.non_streaming_mode,
            sampling=dict(speech.sampling),
            initial_codec_chunk_frames=speech.initial_codec_chunk_frames,
            label=speech.label,
        )
        if speech.pieces:
            return self._frontend.prepare_pieces(options)
        return self._frontend.prepare(speech.text, options)


def _voice(sample: VoiceSample) -> Voice:
    return Voice(
        samples=sample.samples,
        sample_rate=sample.sample_rate,
        text=sample.ref_text,
        speaker_embedding=sample.speaker_embedding,
    )
