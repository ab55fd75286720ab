"""Qwen3-TTS: a text in, whole or in pieces, and the prompt of a Talker that reads it out.

    [instructions]  role   pads .. bos     the text, one token a frame, or all of it first
                           tags, voice

The layout is that of the reference (`generate` in the `qwen-tts` package): `SpeechPrompt` says what
is in it, `bridges/text_to_talker.py` where it stands.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.bridges.text_to_talker import prompt_positions
from stretto.errors import CheckpointError, InvalidRequest
from stretto.models.qwen3_tts.spec import SPEECH_TOKENIZER, TtsSpec, read_spec
from stretto.pipeline.frontend import (
    MIN_CONTEXT,
    WARM_UP_FRAMES,
    Frontend,
    Prompt,
)
from stretto.pipeline.model import Model, read_json
from stretto.pipeline.pipeline import PipelineRequest, check_initial_frames
from stretto.request import (
    GIVEN_VOICE,
    NO_CODEC,
    SamplingParams,
    SpeechOptions,
    SpeechPrompt,
    StageRequest,
    merge_sampling,
)
from stretto.text import PieceTokenizer

if TYPE_CHECKING:
    from stretto.models.qwen3_tts.voices import ClonedVoice, VoiceEncoder

AUTO_LANGUAGE = "auto"
# <|im_start|> assistant \n
ROLE_LENGTH = 3
# A take that finds no end is cut: no speech takes two seconds for each of its tokens.
FRAMES_PER_TEXT_TOKEN = 25
SPARE_FRAMES = 50
# Voices whose encoding is kept, by content.
MAX_KEPT_VOICES = 256
# The published checkpoint that takes no instructions.
WITHOUT_INSTRUCTIONS = "0b6"


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """A voice to speak like: its sound, or what the speaker encoder made of such.

    `samples` float32 [n], mono. With `text`, what is said in it, the speech goes on as the sample
    ends; without, only the speaker is taken. `speaker_embedding` float32 [H] stands by itself.
    """

    samples: np.ndarray | None = None
    sample_rate: int = 24000
    text: str | None = None
    speaker_embedding: np.ndarray | None = None


class SpeakOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may say besides its text. None or empty: as deployed."""

    speaker: str | None = None
    language: str | None = None
    instructions: str | None = None
    voice: Voice | None = None
    # The whole text before the first frame; None: as the kind of checkpoint was published with.
    text_first: bool | None = None
    sampling: dict[str, Any] = {}
    initial_codec_chunk_frames: int | None = None
    return_codes: bool = False
    label: str | None = None


class _Encoded(msgspec.Struct, frozen=True):
    """A voice as the prompt has it."""

    speaker_embedding: np.ndarray
    codes: np.ndarray | None
    text_ids: tuple[int, ...]


class TtsFrontend(Frontend):
    options = SpeakOptions
    spec: TtsSpec
    prompt_field = "input"

    def __init__(self, model: Model, *, cache_dir: Path) -> None:
        super().__init__(model, cache_dir=cache_dir)
        self._special_texts = tuple(self.tokenizer.get_added_vocab())
        self._role = tuple(self.encode("<|im_start|>assistant\n"))
        if len(self._role) != ROLE_LENGTH:
            raise CheckpointError(
                f"{model.directory}: the tokenizer makes {len(self._role)} ids of an opened "
                f"assistant turn; {ROLE_LENGTH} are needed"
            )
        self._voices = _KeptVoices(model, self.spec)

    @property
    def speakers(self) -> list[str]:
        return sorted(self.spec.talker.speakers)

    @property
    def languages(self) -> list[str]:
        """What `language` may be, lower case. Dialects come with their speakers."""
        own = self.spec.talker.languages
        return [AUTO_LANGUAGE, *sorted(name for name in own if "dialect" not in name)]

    @property
    def takes_instructions(self) -> bool:
        spec = self.spec
        return spec.model_kind != "base" and spec.model_size != WITHOUT_INSTRUCTIONS

    def prepare(self, prompt: Prompt, options: SpeakOptions) -> PipelineRequest:
        """The request of a whole text. Encoding a new voice takes a second."""
        if not isinstance(prompt, str):
            raise InvalidRequest("messages", "this model reads a text out; it takes no messages")
        text = prompt.strip()
        if not text:
            raise InvalidRequest(self.prompt_field, "the text is empty; there is nothing to say")
        return self._request(tuple(self.plain_ids(text)), options, text_follows=False)

    def prepare_pieces(self, options: SpeakOptions) -> PipelineRequest:
        if options.text_first:
            raise InvalidRequest(
                "text_first", "text_first is true, but a text that comes in pieces cannot be first"
            )
        return self._request((), options, text_follows=True)

    def warm_up(self) -> PipelineRequest:
        head, codec = self._head((), language=None, voice=NO_CODEC)
        prompt = SpeechPrompt(head_ids=head, codec_ids=codec, text_ids=(self.spec.prompt_ids.user,))
        return self._tickets(
            prompt,
            SpeakOptions(label="warm-up"),
            self.warm_up_sampling(self.model.config.stages[0].name, WARM_UP_FRAMES),
            max_positions=MIN_CONTEXT,
        )

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a special token, whatever it looks like."""
        special = any(special in text for special in self._special_texts)
        return self.encode(text, split_special_tokens=special)

    def _request(
        self, text_ids: tuple[int, ...], options: SpeakOptions, *, text_follows: bool
    ) -> PipelineRequest:
        talker = self.model.config.stages[0]
        check_initial_frames(options.initial_codec_chunk_frames, self.model.config)
        speaker = self._speaker(options)
        language = self._language(options.language, speaker)
        instruction_ids = self._instruction_ids(options.instructions)
        encoded = None if options.voice is None else self._voice(options.voice)
        voice = NO_CODEC
        if encoded is not None:
            voice = GIVEN_VOICE
        elif speaker is not None:
            voice = self.spec.talker.speakers[speaker]
        head, codec = self._head(instruction_ids, language=language, voice=voice)
        text_first = options.text_first
        if text_first is None:
            text_first = self.spec.model_kind != "base" and not text_follows
        prompt = SpeechPrompt(
            head_ids=head,
            codec_ids=codec,
            text_ids=text_ids,
            text_follows=text_follows,
            text_first=text_first,
            reference_text_ids=() if encoded is None else encoded.text_ids,
            reference_codes=None if encoded is None else encoded.codes,
            speaker_embedding=None if encoded is None else encoded.speaker_embedding,
        )
        used = prompt_positions(prompt)
        sampling = self.talker_sampling(
            talker.name,
            options.sampling,
            eos=self.spec.talker.codec_ids.eos,
            used=used,
            most=None if text_follows else FRAMES_PER_TEXT_TOKEN * len(text_ids) + SPARE_FRAMES,
        )
        limit = sampling.max_tokens
        assert limit is not None
        return self._tickets(
            prompt,
            options,
            sampling,
            max_positions=used + limit,
            num_instruction_tokens=len(instruction_ids),
        )

    def _tickets(
        self,
        prompt: SpeechPrompt,
        options: SpeakOptions,
        sampling: SamplingParams,
        *,
        max_positions: int,
        num_instruction_tokens: int = 0,
    ) -> PipelineRequest:
        talker = self.model.config.stages[0]
        speech = SpeechOptions(
            speaker=options.speaker or "",
            initial_codec_chunk_frames=options.initial_codec_chunk_frames,
            residual_sampling=merge_sampling(SamplingParams(), talker.residual_sampling),
            return_codes=options.return_codes,
            prompt=prompt,
        )
        entry = StageRequest(
            sampling=sampling,
            max_positions=max_positions,
            speech=speech,
            brings_all=not prompt.text_follows,
            feeds_downstream=True,
        )
        vocoder = msgspec.structs.replace(
            entry, max_positions=0, brings_all=False, feeds_downstream=False
        )
        return PipelineRequest(
            tickets=(entry, vocoder),
            num_prompt_tokens=num_instruction_tokens
            + len(prompt.text_ids)
            + (0 if prompt.reference_codes is None else len(prompt.reference_codes)),
            open_text=self._piece_tokenizer if prompt.text_follows else None,
            label=options.label,
        )

    def _head(
        self, instruction_ids: tuple[int, ...], *, language: int | None, voice: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Text ids and codec ids of the rows before the text; `voice` NO_CODEC: nobody's."""
        ids, codec = self.spec.prompt_ids, self.spec.talker.codec_ids
        tags = (
            (codec.nothink, codec.think_bos, codec.think_eos)
            if language is None
            else (codec.think, codec.think_bos, language, codec.think_eos)
        )
        tags = (*tags, *(() if voice == NO_CODEC else (voice,)), codec.pad)
        plain = (*instruction_ids, *self._role)
        pads = (ids.tts_pad,) * (len(tags) - 1)
        return (*plain, *pads, ids.tts_bos), (*(NO_CODEC,) * len(plain), *tags)

    def _speaker(self, options: SpeakOptions) -> str | None:
        """The checkpoint's own speaker that is to be heard, if it is one of its own."""
        kind, speakers = self.spec.model_kind, self.spec.talker.speakers
        if kind != "base" and options.voice is not None:
            raise InvalidRequest(
                "ref_audio", f"a {kind} checkpoint clones no voices; a base checkpoint does"
            )
        if kind == "base" and options.voice is None:
            raise InvalidRequest(
                "ref_audio", "a base checkpoint speaks like a given voice; give one to speak like"
            )
        if kind != "custom_voice":
            if options.speaker is not None:
                raise InvalidRequest(
                    "speaker", f"speaker is {options.speaker!r}; a {kind} checkpoint has none"
                )
            return None
        name = next(iter(speakers)) if options.speaker is None else options.speaker.lower()
        if name not in speakers:
            raise InvalidRequest(
                "speaker",
                f"unknown speaker {options.speaker!r}; there are {', '.join(self.speakers)}",
            )
        return name

    def _language(self, language: str | None, speaker: str | None) -> int | None:
        """The id of a language; a speaker of a dialect of Chinese speaks it unless told other."""
        talker, name = self.spec.talker, (language or AUTO_LANGUAGE).lower()
        if name not in self.languages:
            raise InvalidRequest(
                "language", f"unknown language {language!r}; there are {', '.join(self.languages)}"
            )
        if name in ("chinese", AUTO_LANGUAGE) and speaker in talker.dialects:
            return talker.languages[talker.dialects[speaker]]
        return None if name == AUTO_LANGUAGE else talker.languages[name]

    def _instruction_ids(self, instructions: str | None) -> tuple[int, ...]:
        text = (instructions or "").strip()
        if not text:
            if self.spec.model_kind == "voice_design":
                raise InvalidRequest(
                    "instructions", "a voice_design checkpoint needs a voice to be described"
                )
            return ()
        if not self.takes_instructions:
            raise InvalidRequest(
                "instructions",
                f"a {self.spec.model_kind} checkpoint of size {self.spec.model_size} takes no "
                "instructions",
            )
        return (
            *self.encode("<|im_start|>user\n"),
            *self.plain_ids(text),
            *self.encode("<|im_end|>\n"),
        )

    def _voice(self, voice: Voice) -> _Encoded:
        text_ids = tuple(self.plain_ids((voice.text or "").strip()))
        if voice.speaker_embedding is not None:
            size = self.spec.talker.decoder.hidden_size
            if voice.samples is not None:
                raise InvalidRequest(
                    "speaker_embedding", "speaker_embedding and ref_audio exclude each other"
                )
            if voice.speaker_embedding.shape != (size,):
                raise InvalidRequest(
                    "speaker_embedding",
                    f"speaker_embedding has {voice.speaker_embedding.size} numbers; this "
                    f"checkpoint's have {size}",
                )
            if not np.isfinite(voice.speaker_embedding).all():
                raise InvalidRequest("speaker_embedding", "speaker_embedding has no finite numbers")
            if text_ids:
                raise InvalidRequest("ref_text", "ref_text goes with ref_audio")
            return _Encoded(voice.speaker_embedding.astype(np.float32), None, ())
        if voice.samples is None:
            raise InvalidRequest("ref_audio", "a voice needs ref_audio or a speaker_embedding")
        heard = self._voices.encode(voice.samples, voice.sample_rate, with_codes=bool(text_ids))
        return _Encoded(heard.speaker_embedding, heard.ref_codes, text_ids)

    def _piece_tokenizer(self) -> PieceTokenizer:
        backend = self.tokenizer.backend_tokenizer

        def words(text: str) -> tuple[str, list[int]]:
            if backend.normalizer is not None:
                text = backend.normalizer.normalize_str(text)
            return text, [begin for _, (begin, _) in backend.pre_tokenizer.pre_tokenize_str(text)]

        return PieceTokenizer(self.plain_ids, words)

    def _load_tokenizer(self, directory: Path) -> Any:
        from transformers import AutoTokenizer, PreTrainedConfig

        # transformers knows no config of this model and warns of it; the tokenizer needs none.
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, config=PreTrainedConfig()
        )

    def _read_spec(self) -> TtsSpec:
        directory = self.model.directory
        codec = read_json(directory / SPEECH_TOKENIZER / "config.json")
        return read_spec(read_json(directory / "config.json"), codec, str(directory))

    def _positions(self) -> dict[str, int]:
        return {"qwen3_tts.talker": self.spec.talker.decoder.max_positions}


class _KeptVoices:
    """Encodings of voices by their content; any thread. The encoder is loaded when first needed."""

    def __init__(self, model: Model, spec: TtsSpec) -> None:
        self._model = model
        self._spec = spec
        self._lock = threading.Lock()
        self._encoder: VoiceEncoder | None = None
        self._kept: OrderedDict[str, ClonedVoice] = OrderedDict()

    def encode(self, samples: np.ndarray, sample_rate: int, *, with_codes: bool) -> ClonedVoice:
        """The voice, with its codes or only its speaker.

        Raises:
            InvalidRequest: the sound is too short, too long, or not finite.
        """
        content = np.ascontiguousarray(samples, dtype=np.float32)
        how = f"@{sample_rate} {with_codes}".encode()
        key = hashlib.sha256(content.tobytes() + how).hexdigest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if self._encoder is None:
                # It imports what only cloning needs.
                from stretto.models.qwen3_tts.voices import VoiceEncoder

                self._encoder = VoiceEncoder(self._model.directory, self._spec)
            voice = self._kept[key] = self._encoder.encode(
                content, sample_rate, with_codes=with_codes
            )
            if len(self._kept) > MAX_KEPT_VOICES:
                self._kept.popitem(last=False)
            return voice
