"""A text on its way to sound: what a request asks for, and the one stream it becomes.

    fields, text ─> SpeechInput ─> Take ─> samples ... ─> bytes ...

A text longer than `segment_chars` is spoken in segments of whole sentences, one pipeline request
each, in the same voice and with the same seed. While one is heard the next is made already, so the
stream goes on without a gap; no pause is put between them, for a model ends a sentence as it
breathes.

    segment 0   [prepare][. . . first sound . . . . . . . end]
    segment 1                          [prepare][. . . . . . . . . end]
    heard                              0000000000000000000000111111111111
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from stretto.errors import InvalidRequest
from stretto.events import AudioDelta, Finished
from stretto.pipeline.pipeline import SAMPLE_RATE
from stretto.sentences import segments
from stretto.server.encoders import (
    EncodedStream,
    encode_whole,
    filtered,
    open_encoder,
    open_filters,
)
from stretto.server.errors import (
    ApiError,
    check_model,
    check_unicode,
    echo,
    from_stretto,
    invalid,
    unsupported,
)
from stretto.server.meters import Meters
from stretto.server.protocol import FinishReason, SpeechFields, SpeechUsage
from stretto.server.service import Service
from stretto.server.speech_model import SpeechInput, SpeechModel, TaskType, VoiceSample
from stretto.server.streaming import Job
from stretto.server.voice_store import (
    MAX_SOUND_BYTES,
    UploadedVoice,
    VoiceStore,
    checked_embedding,
    sample_of_embedding,
    sample_of_sound,
)
from stretto.server.voices import speaker_of

# What agent frameworks call a speech model unless told otherwise.
MODEL_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
# What these routes call what a pipeline calls otherwise.
OUR_NAMES = {"max_tokens": "max_new_tokens", "text_first": "non_streaming_mode"}
# How often a text that is already being spoken asks for a place for its next segment.
RETRY_S = 0.05


class Studio:
    """What all speech routes share: the model, and the voices that were brought to it."""

    def __init__(self, service: Service, model: SpeechModel | None, store: VoiceStore) -> None:
        self.service = service
        self.store = store
        self._model = model

    @property
    def model(self) -> SpeechModel:
        """Raises ApiError where the model cannot read texts out."""
        if self._model is None:
            raise ApiError(
                404,
                f"the model {self.service.names[0]!r} answers texts and does not read them out; "
                "use /v1/chat/completions with modalities ['text', 'audio']",
            )
        return self._model

    @property
    def can_clone(self) -> bool:
        return self._model is not None and "Base" in self._model.kinds

    @property
    def speakers(self) -> Sequence[str]:
        return self.service.speakers if self._model is None else self._model.speakers

    async def read(self, fields: SpeechFields, *, label: str) -> SpeechInput:
        """How something is to be said; the text is still to come. Raises ApiError."""
        check_model(fields.model, (*self.service.names, *MODEL_ALIASES))
        # Off the loop: it may decode half a minute of sound.
        return await asyncio.to_thread(self._read, fields, label)

    def take(self, speech: SpeechInput, text: str) -> Take:
        """A whole text, not yet started. Raises ApiError."""
        self.check_text(text)
        return Take(self.service, self.model, msgspec.structs.replace(speech, text=text), None)

    def take_in_pieces(self, speech: SpeechInput, pieces: AsyncIterator[str]) -> Take:
        """A text that is still being written, not yet started."""
        speech = msgspec.structs.replace(speech, pieces=True)
        return Take(self.service, self.model, speech, pieces)

    def check_text(self, text: str) -> None:
        """Raises ApiError for a text that is not read out, whatever the other fields say."""
        most = self.service.settings.max_input_chars
        if not text.strip():
            raise invalid("input", "input is empty; there is nothing to read out")
        if len(text) > most:
            raise invalid("input", f"input has {len(text)} characters; at most {most} are allowed")
        check_unicode("input", text)

    def _read(self, fields: SpeechFields, label: str) -> SpeechInput:
        names = [*self.speakers, *self.store.names()]
        name = speaker_of({"voice": fields.voice, "speaker": fields.speaker}, names)
        uploaded = None
        if name is not None and name not in self.speakers:
            uploaded = self.store.find(name)
            if uploaded is None:
                raise invalid("voice", f"the voice {echo(name)} is gone")
        brought = {
            "voice": uploaded,
            "ref_audio": fields.ref_audio,
            "speaker_embedding": fields.speaker_embedding,
        }
        given = [param for param, value in brought.items() if value is not None]
        if len(given) > 1:
            raise invalid(given[-1], f"{' and '.join(given)} exclude each other; give one of them")
        # What the checkpoint can do comes before what is missing for it.
        task = self._task(fields, given[0] if given else None)
        limits = {"max_tokens": fields.max_new_tokens, "seed": fields.seed}
        return SpeechInput(
            text="",
            task_type=task,
            speaker=None if given else name,
            voice=self._voice(fields, uploaded),
            instructions=self._instructions(fields.instructions),
            language=self._language(fields.language),
            non_streaming_mode=fields.non_streaming_mode,
            sampling={name: value for name, value in limits.items() if value is not None},
            initial_codec_chunk_frames=fields.initial_codec_chunk_frames,
            label=label,
        )

    def _instructions(self, instructions: str | None) -> str | None:
        most = self.service.settings.max_instruction_chars
        if instructions is None or not instructions.strip():
            return None
        if len(instructions) > most:
            raise invalid(
                "instructions",
                f"instructions has {len(instructions)} characters; at most {most} are allowed",
            )
        check_unicode("instructions", instructions)
        return instructions

    def _language(self, language: str | None) -> str | None:
        wanted = (language or "auto").strip().lower()
        if wanted == "auto":
            return None
        own = {name.lower(): name for name in self.model.languages}
        if wanted not in own:
            allowed = ", ".join(("auto", *(name for name in own if name != "auto")))
            raise unsupported("language", f"language is {echo(language)}; this model has {allowed}")
        return own[wanted]

    def _voice(self, fields: SpeechFields, uploaded: UploadedVoice | None) -> VoiceSample | None:
        """The voice to speak like, if one was brought or is kept. Raises ApiError."""
        ref_text, only_speaker = (fields.ref_text or "").strip() or None, fields.x_vector_only_mode
        if ref_text is not None:
            check_unicode("ref_text", ref_text)
        if uploaded is not None:
            said = None if only_speaker else ref_text or uploaded.ref_text
            return self.store.sample(uploaded, ref_text=said)
        if fields.ref_audio is None and ref_text is not None:
            raise invalid("ref_text", "ref_text says what is said in ref_audio, which is missing")
        if fields.speaker_embedding is not None:
            return sample_of_embedding(
                checked_embedding("speaker_embedding", fields.speaker_embedding)
            )
        if fields.ref_audio is None:
            if only_speaker:
                raise invalid("x_vector_only_mode", "x_vector_only_mode goes with ref_audio")
            return None
        if ref_text is None and not only_speaker:
            raise invalid(
                "ref_text",
                "ref_text is missing: say what is said in ref_audio, or set x_vector_only_mode",
            )
        content = self._content(fields.ref_audio)
        return sample_of_sound("ref_audio", content, ref_text=None if only_speaker else ref_text)

    def _task(self, fields: SpeechFields, voice_param: str | None) -> TaskType:
        asked, kinds = fields.task_type, self.model.kinds
        if voice_param is not None and asked not in (None, "Base"):
            raise invalid("task_type", f"task_type is {asked!r}; with {voice_param} it is 'Base'")
        task: TaskType = asked or ("Base" if voice_param is not None else kinds[0])
        if task not in kinds:
            raise unsupported(
                "task_type" if voice_param is None else voice_param,
                f"this checkpoint does not do {task}; it does {', '.join(kinds)}",
            )
        if task == "Base" and voice_param is None:
            raise invalid(
                "ref_audio",
                "this speaks like a given voice; give ref_audio and ref_text, a speaker_embedding, "
                "or the name of an uploaded voice",
            )
        if task == "VoiceDesign" and self._instructions(fields.instructions) is None:
            raise invalid("instructions", "instructions is missing: describe the voice to be made")
        return task

    def _content(self, url: str) -> bytes:
        """The bytes that `ref_audio` names. Raises ApiError."""
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            head, _, data = url.partition(",")
            if not head.lower().endswith(";base64"):
                raise invalid("ref_audio", "ref_audio must be 'data:audio/...;base64,...'")
            try:
                return base64.b64decode("".join(data.split()), validate=True)
            except (binascii.Error, ValueError) as error:
                raise invalid("ref_audio", f"ref_audio is no base64: {error}") from error
        if scheme == "file":
            return self._file(url)
        if scheme in ("http", "https"):
            raise unsupported(
                "ref_audio",
                "ref_audio is an address, and this server fetches nothing; send the sound itself "
                "as 'data:audio/wav;base64,...'",
            )
        raise invalid("ref_audio", "ref_audio must be 'data:audio/...;base64,...' or 'file://...'")

    def _file(self, url: str) -> bytes:
        root = self.service.settings.allowed_local_media_path
        if root is None:
            raise unsupported(
                "ref_audio",
                "ref_audio names a file, and no directory is open for that "
                "(--allowed-local-media-path); send the sound as 'data:audio/wav;base64,...'",
            )
        address = urlsplit(url)
        refused = invalid("ref_audio", f"{echo(url)} is no file that may be read here")
        try:
            path = Path(unquote(address.path)).resolve()
            inside = path.is_relative_to(root.resolve()) and path.is_file()
        except (OSError, ValueError) as error:
            raise refused from error
        if address.netloc not in ("", "localhost") or not inside:
            # One answer for what is elsewhere and what is nowhere: nobody can look around.
            raise refused
        with path.open("rb") as file:
            return file.read(MAX_SOUND_BYTES + 1)


class Take:
    """One text read out. Its `samples` are heard once; afterwards it knows how it ended."""

    def __init__(
        self,
        service: Service,
        model: SpeechModel,
        speech: SpeechInput,
        pieces: AsyncIterator[str] | None,
    ) -> None:
        self._service = service
        self._model = model
        self._pieces = pieces
        self.usage = SpeechUsage(0, 0, 0)
        self.finish_reason: FinishReason = "stop"
        texts = segments(speech.text, max_chars=service.settings.segment_chars)
        if len(texts) > 1:
            speech = with_seed(speech)
        sampling = speech.sampling
        # Frames that are still allowed; None: as many as the model takes.
        self._frames_left: int | None = sampling.get("max_tokens")
        self._segments = [
            msgspec.structs.replace(speech, text=text, sampling=sampling) for text in texts
        ]

    async def samples(self, *, patient: bool = False) -> AsyncGenerator[np.ndarray, None]:
        """float32 pieces, as they are made. Leaving early aborts what is under way.

        With `patient` it waits for a place where it would be refused for want of one.

        Raises:
            ApiError: one could not be prepared or submitted, or it failed.
        """
        coming: list[asyncio.Task[Job]] = []
        feeding: asyncio.Task[None] | None = None
        try:
            for index in range(len(self._segments)):
                if not coming:
                    coming.append(self._open(index, patient=patient or index > 0))
                job = await coming[0]
                coming.clear()
                if self._pieces is not None:
                    feeding = asyncio.create_task(_feed(job, self._pieces))
                async with aclosing(job.events()) as events:
                    async for event in events:
                        if isinstance(event, AudioDelta):
                            # What is left for the next one is known only at this one's end.
                            if not coming and self._frames_left is None and self._has(index + 1):
                                coming.append(self._open(index + 1, patient=True))
                            yield event.samples
                        elif isinstance(event, Finished):
                            self._note(event)
                if self._frames_left == 0 and self._has(index + 1):
                    self.finish_reason = "length"
                    return
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            for task in coming:
                task.cancel()
                (opened,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(opened, Job):
                    opened.leave()

    def _has(self, index: int) -> bool:
        return index < len(self._segments)

    def _open(self, index: int, *, patient: bool) -> asyncio.Task[Job]:
        """A job that has been started, soon."""
        speech = self._segments[index]
        if self._frames_left is not None:
            limited: dict[str, Any] = {**speech.sampling, "max_tokens": self._frames_left}
            speech = msgspec.structs.replace(speech, sampling=limited)

        async def opened() -> Job:
            service, model = self._service, self._model
            try:
                job = service.job(await service.prepared(lambda: model.prepare(speech)))
            except InvalidRequest as error:
                error.param = OUR_NAMES.get(error.param, error.param)
                raise from_stretto(error) from error
            while True:
                try:
                    job.start()
                except ApiError as error:
                    if error.status != 429 or not patient:
                        raise
                    await asyncio.sleep(RETRY_S)
                else:
                    return job

        return asyncio.create_task(opened())

    def _note(self, end: Finished) -> None:
        read = self.usage.input_tokens + end.usage.prompt_tokens
        made = self.usage.output_tokens + end.usage.audio_tokens
        self.usage = SpeechUsage(read, made, read + made)
        if end.finish_reason == "length":
            self.finish_reason = "length"
        if self._frames_left is not None:
            self._frames_left = max(self._frames_left - end.usage.audio_tokens, 0)


def with_seed(speech: SpeechInput) -> SpeechInput:
    """For several requests in one voice, also where chance makes the voice."""
    sampling = {"seed": secrets.randbits(31), **speech.sampling}
    return msgspec.structs.replace(speech, sampling=sampling)


async def _feed(job: Job, pieces: AsyncIterator[str]) -> None:
    async for piece in pieces:
        job.feed(piece)
    job.end_text()


def sample_rate_of(fields: SpeechFields) -> int:
    return fields.sample_rate or SAMPLE_RATE


def open_stream(fields: SpeechFields) -> EncodedStream:
    rate = sample_rate_of(fields)
    filters = open_filters(speed=fields.speed, rate_in=SAMPLE_RATE, rate_out=rate)
    return EncodedStream(filters, open_encoder(fields.response_format, rate))


async def encoded(take: Take, stream: EncodedStream, meters: Meters) -> AsyncGenerator[bytes, None]:
    """The bytes of a take as they are made, never empty ones; counted by how it ends."""
    try:
        async with aclosing(take.samples()) as sound:
            async for samples in sound:
                # Encoders run in threads: two seconds of sound are 40 ms of work as Opus.
                piece = await asyncio.to_thread(stream.push, samples)
                if piece:
                    yield piece
        rest = await asyncio.to_thread(stream.finish)
        if rest:
            yield rest
    except (asyncio.CancelledError, GeneratorExit):
        meters.speech_aborted("closed")
        raise
    except Exception:
        meters.speech_aborted("error")
        raise
    meters.speech_completed()


async def whole_file(take: Take, fields: SpeechFields, *, patient: bool = False) -> bytes:
    """A take's bytes in one, lengths in the header. Raises ApiError."""
    async with aclosing(take.samples(patient=patient)) as sound:
        pieces = [np.zeros(0, np.float32), *[samples async for samples in sound]]

    def encode() -> bytes:
        rate = sample_rate_of(fields)
        filters = open_filters(speed=fields.speed, rate_in=SAMPLE_RATE, rate_out=rate)
        return encode_whole(fields.response_format, filtered(filters, np.concatenate(pieces)), rate)

    return await asyncio.to_thread(encode)
