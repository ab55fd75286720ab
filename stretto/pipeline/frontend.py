"""From what a person asks to what the stages get: prompts, defaults, and every check.

    checkpoint ─> config, tokenizer, defaults                                  (once)
    prompt, options ─> PipelineRequest, or InvalidRequest that names the field (per request)

After a frontend a request has no value that a stage could refuse. Each architecture has its own;
what is the same in all of them is here.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import CheckpointError, ConfigError, InvalidRequest
from stretto.models.family import ModelSpec
from stretto.pipeline.model import Model
from stretto.pipeline.pipeline import PipelineRequest
from stretto.request import SamplingParams, merge_sampling

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# The request that runs through all stages before a pipeline is ready.
WARM_UP_TOKENS = 3
WARM_UP_FRAMES = 3
# Positions that it takes in any stage, rounded up: a context may not be shorter.
MIN_CONTEXT = 32


class PromptTooLong(InvalidRequest):
    """The prompt alone fills the context. Told apart, since clients shorten it and retry."""


class Frontend(abc.ABC):
    """Tokenizer, sizes and defaults of one model. Loading it imports transformers."""

    # What `prepare` takes besides the prompt.
    options: type[msgspec.Struct]
    spec: ModelSpec
    # What the prompt is called where it is at fault.
    prompt_field: str

    def __init__(self, model: Model, *, cache_dir: Path) -> None:
        """Raises CheckpointError when the directory is not a checkpoint of this architecture."""
        self.model = model
        try:
            self.tokenizer = self._load_tokenizer(model.directory)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{model.directory}: {error}") from error
        self.tokenizer_file = self._write_tokenizer(cache_dir)
        self.spec = self._read_spec()
        self.context_lengths = self._context_lengths()
        self._defaults = {
            stage.name: merge_sampling(SamplingParams(), stage.default_sampling)
            for stage in model.config.stages
        }

    def warm_up_sampling(self, stage: str, max_tokens: int) -> SamplingParams:
        """As deployed: what is made at first use is then made for what comes."""
        return msgspec.structs.replace(
            self._defaults[stage], max_tokens=max_tokens, min_tokens=0, stop=()
        )

    @property
    @abc.abstractmethod
    def speakers(self) -> list[str]:
        """Names of the checkpoint's own voices, lower case."""

    @abc.abstractmethod
    def prepare(self, prompt: Prompt, options: Any) -> PipelineRequest:
        """A request that the pipeline can run; `options` are of the type `options`.

        Raises:
            InvalidRequest: names the field, the value and what is allowed.
        """

    def prepare_pieces(self, options: Any) -> PipelineRequest:
        """The request of a text that is still being written; its handle is fed.

        Raises:
            InvalidRequest: as `prepare`, and where a model takes no such.
        """
        raise InvalidRequest(
            self.prompt_field, "this model answers whole messages; it reads out no text in pieces"
        )

    @abc.abstractmethod
    def warm_up(self) -> PipelineRequest:
        """A short request that goes through all stages."""

    def _load_tokenizer(self, directory: Path) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, local_files_only=True)

    @abc.abstractmethod
    def _read_spec(self) -> ModelSpec:
        """Raises CheckpointError."""

    @abc.abstractmethod
    def _positions(self) -> dict[str, int]:
        """By model of a stage: the positions that the checkpoint was made for."""

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return ids

    def sampling(
        self, stage: str, given: Mapping[str, Any], *, used: int, most: int | None = None
    ) -> SamplingParams:
        """`given` over the stage's defaults, `max_tokens` within what its context has room for.

        `used` are the positions that the prompt takes; `most` limits what was not asked for.
        """
        sampling, asked = merge_sampling(self._defaults[stage], given), "max_tokens" in given
        context = self.context_lengths[stage]
        room = context - used
        if room < 1:
            raise PromptTooLong(
                self.prompt_field,
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
        if most is not None and not asked:
            limit = min(limit, most)
        if sampling.min_tokens > limit:
            raise InvalidRequest(
                "min_tokens",
                f"min_tokens is {sampling.min_tokens} in stage {stage}, max_tokens {limit}",
            )
        return msgspec.structs.replace(sampling, max_tokens=limit)

    def talker_sampling(
        self, stage: str, given: Mapping[str, Any], *, eos: int, used: int, most: int | None = None
    ) -> SamplingParams:
        """As `sampling`, for a stage that speaks: it ends with its own end code `eos`."""
        sampling = self.sampling(stage, given, used=used, most=most)
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
        return msgspec.structs.replace(sampling, stop_token_ids=(eos,))

    def _context_lengths(self) -> dict[str, int]:
        made_for, lengths = self._positions(), {}
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

    def _write_tokenizer(self, cache_dir: Path) -> str:
        """A `tokenizer.json` for the stage that writes text; made where the checkpoint has none."""
        directory = self.model.directory
        own = directory / "tokenizer.json"
        if own.is_file():
            return str(own)
        made = (
            cache_dir
            / "tokenizers"
            / f"{directory.resolve().as_posix().strip('/').replace('/', '_')}.json"
        )
        made.parent.mkdir(parents=True, exist_ok=True)
        self.tokenizer.backend_tokenizer.save(str(made))
        return str(made)
