"""Qwen3-Omni: messages in, the Thinker's prompt and the Talker's limits out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.bridges.thinker_to_talker import talker_prompt_length
from stretto.errors import CheckpointError, InvalidRequest
from stretto.models.qwen3_omni.spec import OmniSpec, read_spec
from stretto.pipeline.frontend import (
    MIN_CONTEXT,
    WARM_UP_FRAMES,
    WARM_UP_TOKENS,
    Frontend,
    Prompt,
)
from stretto.pipeline.model import Model, read_json
from stretto.pipeline.pipeline import PipelineRequest, check_initial_frames
from stretto.request import SamplingParams, SpeechOptions, StageRequest, merge_sampling


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


class OmniFrontend(Frontend):
    options = Options
    spec: OmniSpec
    prompt_field = "messages"

    def __init__(self, model: Model, *, cache_dir: Path) -> None:
        super().__init__(model, cache_dir=cache_dir)
        if self.tokenizer.chat_template is None:
            template = read_json(model.directory / "chat_template.json").get("chat_template")
            if template is None:
                raise CheckpointError(f"{model.directory}: no chat template")
            self.tokenizer.chat_template = template
        self._special_texts = tuple(self.tokenizer.get_added_vocab())
        self._eos_ids = self._end_ids()

    @property
    def speakers(self) -> list[str]:
        return sorted(self.spec.talker.speakers)

    def prepare(self, prompt: Prompt, options: Options) -> PipelineRequest:
        token_ids = tuple(self._prompt_ids(prompt))
        thinker = self.model.config.stages[0].name
        sampling = self.sampling(thinker, options.sampling, used=len(token_ids))
        limit = sampling.max_tokens
        assert limit is not None
        stops = sampling.stop_token_ids if sampling.ignore_eos else (
            *sampling.stop_token_ids, *self._eos_ids,
        )  # fmt: skip
        entry = StageRequest(
            sampling=msgspec.structs.replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops))),
            max_positions=len(token_ids) + limit,
            prompt_token_ids=token_ids,
            brings_all=True,
        )
        return PipelineRequest(
            tickets=self._spoken(entry, options) if options.speak else (entry,),
            num_prompt_tokens=len(token_ids),
            label=options.label,
        )

    def warm_up(self) -> PipelineRequest:
        ids = self.spec.prompt_ids
        prompt = (
            *(ids.im_start, ids.user, ids.user, ids.im_end),
            *(ids.im_start, ids.assistant, ids.user),
        )
        entry = StageRequest(
            sampling=SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True),
            max_positions=len(prompt) + WARM_UP_TOKENS,
            prompt_token_ids=prompt,
            brings_all=True,
        )
        tickets: tuple[StageRequest, ...] = (entry,)
        if len(self.model.config.stages) > 1:
            talker = self.model.config.stages[1]
            tickets = speaking_tickets(
                entry,
                SpeechOptions(
                    speaker=self.speakers[0],
                    initial_codec_chunk_frames=None,
                    residual_sampling=merge_sampling(SamplingParams(), talker.residual_sampling),
                ),
                self.warm_up_sampling(talker.name, WARM_UP_FRAMES),
                max_positions=MIN_CONTEXT,
            )
        return PipelineRequest(tickets=tickets, num_prompt_tokens=len(prompt), label="warm-up")

    def _spoken(self, entry: StageRequest, options: Options) -> tuple[StageRequest, ...]:
        """The tickets of all stages, for an answer that is spoken."""
        config = self.model.config
        talker = config.stages[1]
        used = talker_prompt_length(entry.prompt_token_ids, self.spec.prompt_ids)
        sampling = self.talker_sampling(
            talker.name, options.talker_sampling, eos=self.spec.talker.codec_ids.eos, used=used
        )
        limit = sampling.max_tokens
        assert limit is not None
        check_initial_frames(options.initial_codec_chunk_frames, config)
        speech = SpeechOptions(
            speaker=self._speaker(options.speaker),
            initial_codec_chunk_frames=options.initial_codec_chunk_frames,
            residual_sampling=merge_sampling(SamplingParams(), talker.residual_sampling),
            return_codes=options.return_codes,
        )
        return speaking_tickets(entry, speech, sampling, max_positions=used + limit)

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
        return self.encode(self._rendered(messages, texts))

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
                ids += self.encode(text_of[piece], split_special_tokens=True)
            else:
                ids += self.encode(piece)
        return ids

    def _rendered(self, messages: list[Turn], texts: list[str]) -> str:
        rendered = self.tokenizer.apply_chat_template(
            [
                {"role": message.role, "content": text}
                for message, text in zip(messages, texts, strict=True)
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(rendered, str)
        return rendered

    def _read_spec(self) -> OmniSpec:
        from transformers import AutoConfig

        directory = self.model.directory
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory}: {error}") from error
        return read_spec(config.to_dict(), str(directory))

    def _positions(self) -> dict[str, int]:
        return {
            "qwen3_omni.thinker": self.spec.thinker.decoder.max_positions,
            "qwen3_omni.talker": self.spec.talker.decoder.max_positions,
        }

    def _end_ids(self) -> tuple[int, ...]:
        given = read_json(self.model.directory / "generation_config.json")
        own = given.get("eos_token_id", [])
        ids = own if isinstance(own, list) else [own]
        return tuple(dict.fromkeys((*ids, self.spec.prompt_ids.im_end)))


def speaking_tickets(
    entry: StageRequest, speech: SpeechOptions, sampling: SamplingParams, *, max_positions: int
) -> tuple[StageRequest, ...]:
    """Tickets of Thinker, Talker and vocoder."""
    talker = StageRequest(
        sampling=sampling, max_positions=max_positions, speech=speech, feeds_downstream=True
    )
    vocoder = msgspec.structs.replace(talker, max_positions=0, feeds_downstream=False)
    return (
        msgspec.structs.replace(entry, speech=speech, feeds_downstream=True),
        talker,
        vocoder,
    )
