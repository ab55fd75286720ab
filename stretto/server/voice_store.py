"""Voices that clients bring: what may be one, and how it is kept.

    DIRECTORY/NAME.json      whose it is, and which content; written whole and never changed
    DIRECTORY/content/KEY    the upload as it came, or float32 numbers; KEY is its SHA-256

Nothing is kept in memory but what was decoded last, so what one process has stored, another one and
the next start find. A name is taken until it is deleted: whoever uses it hears what was uploaded.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import soundfile

from stretto.server.errors import ApiError, echo, invalid
from stretto.server.speech_model import VoiceSample

log = logging.getLogger(__name__)

MAX_SOUND_BYTES = 10 * 2**20
MIN_SOUND_S = 1.0
MAX_SOUND_S = 30.0
SOUND_RATES = (8000, 192_000)
MAX_SOUND_CHANNELS = 8
# 16-bit silence with a little dither.
SILENCE = 1e-3
MAX_EMBEDDING = 16_384
MAX_VOICES = 1000
VOICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Where the name of a format, as libsndfile has it, is not the one of its MIME type.
MIME_TYPES = {"MP3": "audio/mpeg", "MPEG": "audio/mpeg"}


class UploadedVoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As clients see it; its name is as they wrote it, and found whatever the case."""

    name: str
    consent: str
    created_at: int
    file_size: int
    mime_type: str
    embedding_source: Literal["audio", "direct"]
    content_key: str
    embedding_dim: int | None = None
    ref_text: str | None = None
    speaker_description: str | None = None


class Sound(msgspec.Struct, frozen=True):
    """`samples` float32 [n], mono."""

    samples: np.ndarray
    sample_rate: int
    mime_type: str


def content_key(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def decoded_sound(param: str, content: bytes) -> Sound:
    """A sound that a voice can be taken from. Raises ApiError."""
    if len(content) > MAX_SOUND_BYTES:
        raise ApiError(
            413,
            f"{param} has {len(content)} bytes; at most {MAX_SOUND_BYTES} (10 MB) are allowed",
            param=param,
        )
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, channels = file.samplerate, file.channels
            # Looked at before anything is decoded: a small file can hold hours.
            duration_s = file.frames / rate
            if not MIN_SOUND_S <= duration_s <= MAX_SOUND_S:
                raise invalid(
                    param,
                    f"{param} is {duration_s:.1f} s long; allowed are {MIN_SOUND_S:.0f} to "
                    f"{MAX_SOUND_S:.0f} s",
                )
            if not SOUND_RATES[0] <= rate <= SOUND_RATES[1] or channels > MAX_SOUND_CHANNELS:
                raise invalid(
                    param,
                    f"{param} has {rate} Hz and {channels} channels; allowed are {SOUND_RATES[0]} "
                    f"to {SOUND_RATES[1]} Hz and up to {MAX_SOUND_CHANNELS} channels",
                )
            sound, kind = file.read(dtype="float32", always_2d=True), str(file.format)
    except soundfile.LibsndfileError as error:
        raise invalid(
            param, f"{param} is no sound that can be read ({error}); WAV, FLAC, MP3 and Ogg can"
        ) from error
    samples = np.ascontiguousarray(sound.mean(axis=1))
    if not np.isfinite(samples).all() or np.abs(samples).max(initial=0) < SILENCE:
        raise invalid(param, f"{param} is silent or holds no finite numbers")
    return Sound(samples, rate, MIME_TYPES.get(kind, "audio/" + kind.lower()))


def checked_embedding(param: str, numbers: list[float]) -> np.ndarray:
    """float32 [n]. Raises ApiError."""
    if not 1 <= len(numbers) <= MAX_EMBEDDING:
        raise invalid(
            param, f"{param} has {len(numbers)} numbers; allowed are 1 to {MAX_EMBEDDING}"
        )
    with np.errstate(over="ignore"):
        embedding = np.array(numbers, np.float32)
    if not np.isfinite(embedding).all():
        raise invalid(param, f"{param} holds numbers that are not finite")
    return embedding


def sample_of_sound(param: str, content: bytes, *, ref_text: str | None) -> VoiceSample:
    """Raises ApiError."""
    sound = decoded_sound(param, content)
    return VoiceSample(
        content_key=content_key(content),
        samples=sound.samples,
        sample_rate=sound.sample_rate,
        ref_text=ref_text,
    )


def sample_of_embedding(embedding: np.ndarray) -> VoiceSample:
    return VoiceSample(content_key=content_key(embedding.tobytes()), speaker_embedding=embedding)


class VoiceStore:
    """Any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._contents = directory / "content"
        self._changing = threading.Lock()

    def names(self) -> list[str]:
        """Lower case."""
        return sorted(path.stem for path in self._directory.glob("*.json"))

    def all(self) -> list[UploadedVoice]:
        found = [self.find(name) for name in self.names()]
        return [voice for voice in found if voice is not None]

    def find(self, name: str) -> UploadedVoice | None:
        if not VOICE_NAME.fullmatch(name):
            return None
        path = self._record(name)
        try:
            return msgspec.json.decode(path.read_bytes(), type=UploadedVoice)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            log.warning("%s is passed over: %s", path, error)
            return None

    def sample(self, voice: UploadedVoice, *, ref_text: str | None) -> VoiceSample:
        """The voice as a model takes it. Raises ApiError if its content is gone."""
        try:
            kept = _kept_sample(self._contents / voice.content_key, voice.embedding_source)
        except FileNotFoundError as error:
            raise invalid(
                "voice", f"the content of voice {voice.name!r} is gone; upload it again"
            ) from error
        return msgspec.structs.replace(kept, ref_text=ref_text)

    def add(self, voice: UploadedVoice, content: bytes) -> None:
        """Raises ApiError if the name is taken, or there are too many."""
        with self._changing:
            if len(self.names()) >= MAX_VOICES:
                raise invalid("name", f"{MAX_VOICES} voices are kept already; delete some first")
            self._contents.mkdir(parents=True, exist_ok=True)
            target = self._contents / voice.content_key
            if not target.exists():
                _write(self._contents, content).replace(target)
            record = _write(self._directory, msgspec.json.encode(voice))
            try:
                # Publishes, unless somebody has that name, in whichever process.
                os.link(record, self._record(voice.name))
            except FileExistsError as error:
                raise ApiError(
                    409,
                    f"there is a voice {echo(voice.name)} already; delete it first, or choose "
                    "another name",
                    param="name",
                    code="voice_exists",
                ) from error
            finally:
                record.unlink()

    def remove(self, name: str) -> bool:
        """Whether there was such a voice."""
        with self._changing:
            voice = self.find(name)
            if voice is None:
                return False
            self._record(name).unlink(missing_ok=True)
            if all(other.content_key != voice.content_key for other in self.all()):
                (self._contents / voice.content_key).unlink(missing_ok=True)
            return True

    def _record(self, name: str) -> Path:
        return self._directory / f"{name.lower()}.json"


@functools.lru_cache(maxsize=8)
def _kept_sample(path: Path, source: Literal["audio", "direct"]) -> VoiceSample:
    content = path.read_bytes()
    if source == "direct":
        return sample_of_embedding(np.frombuffer(content, np.float32))
    return sample_of_sound("voice", content, ref_text=None)


def _write(directory: Path, content: bytes) -> Path:
    """A new file that is on disk, under a name that nobody looks for."""
    path = directory / f".{secrets.token_hex(8)}"
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def new_voice(
    *,
    name: str,
    consent: str,
    sound: bytes | None,
    numbers: list[float] | None,
    ref_text: str | None,
    speaker_description: str | None,
) -> tuple[UploadedVoice, bytes]:
    """A voice to be kept and its content: a sound or the numbers of an embedding.

    Raises:
        ApiError: names the field at fault.
    """
    if not VOICE_NAME.fullmatch(name):
        raise invalid(
            "name",
            f"name is {echo(name)}; allowed are up to 64 of A-Z, a-z, 0-9, '_', '.', '-', the "
            "first a letter or a digit",
        )
    if consent.strip().lower() in ("", "false", "no", "0"):
        raise invalid(
            "consent",
            "consent is needed: say who agreed to the use of this voice, or an id of the agreement",
        )
    if (sound is None) == (numbers is None):
        raise invalid("audio_sample", "give either audio_sample, a file, or speaker_embedding")
    if sound is not None:
        content, mime_type = sound, decoded_sound("audio_sample", sound).mime_type
    else:
        assert numbers is not None
        if ref_text is not None:
            raise invalid("ref_text", "ref_text says what is said in audio_sample; there is none")
        content = checked_embedding("speaker_embedding", numbers).tobytes()
        mime_type = "application/json"
    voice = UploadedVoice(
        name=name,
        consent=consent,
        created_at=int(time.time()),
        file_size=len(content),
        mime_type=mime_type,
        embedding_source="direct" if sound is None else "audio",
        embedding_dim=None if numbers is None else len(numbers),
        content_key=content_key(content),
        ref_text=ref_text,
        speaker_description=speaker_description,
    )
    return voice, content
