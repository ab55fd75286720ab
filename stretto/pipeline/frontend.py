"""From what a person asks to what the stages get: prompts, defaults, and every check.

    model name ─> checkpoint directory ─> config, tokenizer, defaults            (once)
    messages, options ─> PipelineRequest, or InvalidRequest that names the field (per request)

After this module a request has no value that a stage could refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.bridges.thinker_to_talker import talker_prompt_length
from stretto.config.deployment import PipelineConfig
from stretto.config.resolve import Layer, Resolved, bundled_profile, deployment_file, resolve
from stretto.errors import CheckpointError, ConfigError, InvalidRequest
from stretto.models.qwen3_omni.spec import OmniSpec, read_spec
from stretto.models.tiny import CACHED_CHECKPOINTS, cached_checkpoint
from stretto.pipeline.pipeline import (
    MIN_CONTEXT,
    PipelineRequest,
    SpeechRequest,
    check_initial_frames,
)
from stretto.request import SamplingParams, merge_sampling

PARROT = "parrot"
Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# Names in generation_config.json and ours; the Talker's carry a prefix there.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class PromptTooLong(InvalidRequest):
    """The prompt alone fills the context. Told apart, since clients shorten it and retry."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Turn(msgspec.Struct, frozen=True):
    """One message. Text is all that is looked at: there are no parts of another type."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may say besides its prompt. None or empty: as deployed."""

    speak: bool = True
    speaker: str | None = None
    sampling: dict[str, Any] = {}
    talker_sampling: dict[str, Any] = {}
    initial_codec_chunk_frames: int | None = None
    return_codes: bool = False
    label: str | None = None


def model_directory(model: str, cache_dir: Path) -> Path:
    """The checkpoint directory behind a name.

    `parrot` ships with the package, `tiny` and `small` are made on first use in `cache_dir`,
    anything else is a path.

    Raises:
        CheckpointError: there is no such directory, or it is no checkpoint.
    """
    if model == PARROT:
        from stretto import models

        return Path(models.__path__[0]) / PARROT
    if model in CACHED_CHECKPOINTS:
        return cached_checkpoint(model, cache_dir=cache_dir)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{model}: not a directory with a config.json; a model is a checkpoint directory, or "
            f"one of {', '.join((PARROT, *CACHED_CHECKPOINTS))} (models are never downloaded)"
        )
    return directory


class Model(msgspec.Struct, frozen=True):
    """A checkpoint directory as far as it is read before any weight: files, config, defaults."""

    name: str
    directory: Path
    resolved: Resolved

    @property
    def config(self) -> PipelineConfig:
        return self.resolved.config


def open_model(
    model: str, *, cache_dir: Path, deploy_config: Path | None, flags: Mapping[str, Any]
) -> Model:
    """The model and the settings it is to be served with.

    Raises:
        CheckpointError, ConfigError: see there.
    """
    directory = model_directory(model, cache_dir)
    config_file = directory / "config.json"
    model_type = _read_json(config_file).get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{config_file}: no model_type")
    layers = [bundled_profile(model_type), _generation_defaults(directory)]
    if deploy_config is not None:
        layers.append(deployment_file(deploy_config))
    layers.append(Layer("flags", dict(flags)))
    return Model(Path(model).name, directory, resolve(*layers))


class Frontend:
    """Tokenizer, sizes and defaults of one model. Loading it imports transformers."""

    def __init__(self, model: Model, *, cache_dir: Path) -> None:
        """Raises CheckpointError when the directory is not a checkpoint of this architecture."""
        from transformers import AutoConfig, AutoTokenizer

        directory = model.directory
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory}: {error}") from error
        self.model = model
        self.spec: OmniSpec = read_spec(config.to_dict(), str(directory))
        self.tokenizer_file = self._write_tokenizer(directory, cache_dir)
        if self._tokenizer.chat_template is None:
            template = _read_json(directory / "chat_template.json").get("chat_template")
            if template is None:
                raise CheckpointError(f"{directory}: no chat template")
            self._tokenizer.chat_template = template
        self._special_texts = tuple(self._tokenizer.get_added_vocab())
        self._eos_ids = self._end_ids(directory)
        self.context_lengths = self._context_lengths()
        self._defaults = {
            stage.name: merge_sampling(SamplingParams(), stage.default_sampling)
            for stage in model.config.stages
        }

    @property
    def speakers(self) -> list[str]:
        return sorted(self.spec.talker.speakers)

    def prepare(self, prompt: Prompt, options: Options) -> PipelineRequest:
        """A request that the pipeline can run.

        Raises:
            InvalidRequest: names the field, the value and what is allowed.
        """
        token_ids = self._prompt_ids(prompt)
        thinker = self.model.config.stages[0]
        sampling = self._limited(
            merge_sampling(self._defaults[thinker.name], options.sampling),
            asked="max_tokens" in options.sampling,
            used=len(token_ids),
            stage=thinker.name,
        )
        stops = sampling.stop_token_ids if sampling.ignore_eos else (
            *sampling.stop_token_ids, *self._eos_ids,
        )  # fmt: skip
        return PipelineRequest(
            prompt_token_ids=tuple(token_ids),
            sampling=msgspec.structs.replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops))),
            speech=self._speech(tuple(token_ids), options) if options.speak else None,
            label=options.label,
        )

    def _speech(self, token_ids: tuple[int, ...], options: Options) -> SpeechRequest:
        config = self.model.config
        talker = config.stages[1]
        used = talker_prompt_length(token_ids, self.spec.prompt_ids)
        sampling = self._limited(
            merge_sampling(self._defaults[talker.name], options.talker_sampling),
            asked="max_tokens" in options.talker_sampling,
            used=used,
            stage=talker.name,
        )
        if sampling.stop:
            raise InvalidRequest("stop", "the Talker writes no text; it has no stop strings")
        if sampling.stop_token_ids:
            raise InvalidRequest(
                "stop_token_ids", "the Talker ends with its own end code; other ids are sounds"
            )
        limit = sampling.max_tokens
        assert limit is not None
        if sampling.ignore_eos:
            # A frame needs a code: the end may not be drawn where it does not count.
            sampling = msgspec.structs.replace(sampling, min_tokens=limit)
        eos = self.spec.talker.codec_ids.eos
        check_initial_frames(options.initial_codec_chunk_frames, config)
        return SpeechRequest(
            sampling=msgspec.structs.replace(sampling, stop_token_ids=(eos,)),
            residual_sampling=merge_sampling(SamplingParams(), talker.residual_sampling),
            speaker=self._speaker(options.speaker),
            max_positions=used + limit,
            initial_codec_chunk_frames=options.initial_codec_chunk_frames,
            return_codes=options.return_codes,
        )

    def _speaker(self, name: str | None) -> str:
        speakers = self.spec.talker.speakers
        if name is None:
            # transformers' own default, where the checkpoint has it.
            return "ethan" if "ethan" in speakers else self.speakers[0]
        if name.lower() not in speakers:
            raise InvalidRequest(
                "speaker", f"unknown speaker {name!r}; there are {', '.join(self.speakers)}"
            )
        return name.lower()

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not prompt.strip():
            raise InvalidRequest("messages", "the prompt is empty")
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not given:
            raise InvalidRequest("messages", "messages is empty; at least one is needed")
        try:
            messages = msgspec.convert(given, list[Turn])
        except msgspec.ValidationError as error:
            raise InvalidRequest("messages", f"messages: {error}") from error
        texts = [message.text for message in messages]
        if any(special in text for special in self._special_texts for text in texts):
            return self._literal_prompt_ids(messages)
        return self._encode(self._rendered(messages, texts))

    def _literal_prompt_ids(self, messages: list[Turn]) -> list[int]:
        """As usual, but what looks like a special token in a message is only text.

        Else whoever writes a message could end it and speak in another role.
        """
        marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
        text_of = {mark: message.text for mark, message in zip(marks, messages, strict=True)}
        pieces = re.split("(\ue000\\d+\ue001)", self._rendered(messages, marks))
        ids: list[int] = []
        for piece in pieces:
            if piece in text_of:
                ids += self._encode(text_of[piece], split_special_tokens=True)
            else:
                ids += self._encode(piece)
        return ids

    def _rendered(self, messages: list[Turn], texts: list[str]) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [
                {"role": message.role, "content": text}
                for message, text in zip(messages, texts, strict=True)
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(rendered, str)
        return rendered

    def _encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return ids

    def _limited(
        self, sampling: SamplingParams, *, asked: bool, used: int, stage: str
    ) -> SamplingParams:
        """`sampling` with a `max_tokens` that the stage's context has room for."""
        context = self.context_lengths[stage]
        room = context - used
        if room < 1:
            raise PromptTooLong(
                "messages",
                f"the prompt takes {used} positions in stage {stage}; its context is {context} "
                "(max_model_len) and must leave room for at least one token",
            )
        limit = sampling.max_tokens
        if limit is not None and limit > room and asked:
            raise InvalidRequest(
                "max_tokens",
                f"max_tokens is {limit} in stage {stage}; behind a prompt of {used} positions its "
                f"context of {context} (max_model_len) has room for {room}",
            )
        limit = room if limit is None else min(limit, room)
        if sampling.min_tokens > limit:
            raise InvalidRequest(
                "min_tokens",
                f"min_tokens is {sampling.min_tokens} in stage {stage}, max_tokens {limit}",
            )
        return msgspec.structs.replace(sampling, max_tokens=limit)

    def _context_lengths(self) -> dict[str, int]:
        made_for = {
            "qwen3_omni.thinker": self.spec.thinker.decoder.max_positions,
            "qwen3_omni.talker": self.spec.talker.decoder.max_positions,
        }
        lengths = {}
        for stage in self.model.config.stages:
            # A generation stage has no context: its state is of a fixed size.
            most = made_for.get(stage.model, 0)
            own = stage.max_model_len
            lengths[stage.name] = most if own == "auto" else min(own, most)
            if most and lengths[stage.name] < MIN_CONTEXT:
                raise ConfigError(
                    f"stage {stage.name}: max_model_len is {own}; at least {MIN_CONTEXT} positions "
                    "are needed"
                )
        return lengths

    def _end_ids(self, directory: Path) -> tuple[int, ...]:
        own = _read_json(directory / "generation_config.json").get("eos_token_id", [])
        ids = own if isinstance(own, list) else [own]
        return tuple(dict.fromkeys((*ids, self.spec.prompt_ids.im_end)))

    def _write_tokenizer(self, directory: Path, cache_dir: Path) -> str:
        """A `tokenizer.json` for the stage that writes text; made where the checkpoint has none."""
        own = directory / "tokenizer.json"
        if own.is_file():
            return str(own)
        made = (
            cache_dir
            / "tokenizers"
            / f"{directory.resolve().as_posix().strip('/').replace('/', '_')}.json"
        )
        made.parent.mkdir(parents=True, exist_ok=True)
        self._tokenizer.backend_tokenizer.save(str(made))
        return str(made)


def _generation_defaults(directory: Path) -> Layer:
    """generation_config.json as settings: the Thinker's, and `talker_...` the Talker's."""
    path = directory / "generation_config.json"
    given = _read_json(path)
    stages: dict[str, Any] = {}
    for stage, prefixes in (("thinker", ("", "thinker_")), ("talker", ("talker_",))):
        sampling: dict[str, Any] = {}
        for prefix in prefixes:
            for theirs, ours in GENERATION_FIELDS.items():
                if given.get(prefix + theirs) is not None:
                    sampling[ours] = given[prefix + theirs]
            if given.get(f"{prefix}do_sample") is False:
                sampling["temperature"] = 0.0
            elif given.get(f"{prefix}do_sample") is True:
                sampling.setdefault("temperature", 1.0)
        if sampling:
            stages[stage] = {"default_sampling": sampling}
    return Layer(f"{directory.name}/{path.name}", {"stages": stages} if stages else {})


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object")
    return content
