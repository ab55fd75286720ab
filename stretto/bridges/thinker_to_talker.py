"""Thinker to Talker: which ids are heard of the prompt, and which tokens are spoken.

The Talker hears the user's segments of the prompt and the head of the answer, and speaks the
answer's tokens (FACTS 3; `Qwen3OmniMoeForConditionalGeneration.generate` in transformers):

    <|im_start|> system . <|im_start|> user \\n hello <|im_end|> <|im_start|> assistant \\n It is me
                          └───────── user_ids ─────────────────┘ └───── head_ids ───────┘ └ spoken

A token is spoken once it is known not to be the last: transformers never feeds the last one back,
so it is never spoken. An answer of one token that a limit cut off is spoken all the same; an answer
of only an end token has nothing to say.

On the Talker's side `TalkerInbox` says which cache positions these ids cover. It never pads where
an id is still to come: the end of speech enters only after the Thinker has ended.
"""

from __future__ import annotations

import numpy as np

from stretto.bridges.prompt_inbox import UNBOUNDED
from stretto.config.deployment import EdgeConfig
from stretto.errors import InvalidRequest
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.spec import PromptIds
from stretto.payloads import CodecFrames, Payload, SpokenTokens, StageStep, TextStep, ThinkerPrompt
from stretto.request import NO_CODEC, StageRequest

# <|im_start|> assistant \n
HEAD_LENGTH = 3
# Behind the user rows: the head, four pads, bos, the first text token.
ANSWER_ROWS = 9
NUM_PADS = 4


def heard_prompt(prompt: tuple[int, ...], ids: PromptIds) -> tuple[list[bool], int]:
    """For each prompt position whether the Talker hears it, and where the answer's head begins.

    Raises:
        InvalidRequest: the prompt opens no answer.
    """
    heard: list[bool] = []
    user, head = False, None
    for at, token in enumerate(prompt):
        role = prompt[at + 1] if at + 1 < len(prompt) else None
        if token == ids.im_start or at == 0:
            user = role == ids.user
            if token == ids.im_start and role == ids.assistant:
                head = at
        heard.append(user)
    if head is None or head + HEAD_LENGTH > len(prompt):
        raise InvalidRequest(
            "messages",
            "the prompt must end with an opened assistant turn for its answer to be spoken",
        )
    return heard, head


def talker_prompt_length(prompt: tuple[int, ...], ids: PromptIds) -> int:
    """Cache positions of the Talker's prompt for a prompt of the Thinker."""
    heard, _ = heard_prompt(prompt, ids)
    return sum(heard) + ANSWER_ROWS


class ThinkerToTalker:
    """The bridge of this edge."""

    def __init__(self, spec: OmniSpec, edge: EdgeConfig, *, async_chunk: bool) -> None:
        self._spec = spec
        self._async_chunk = async_chunk

    def open(self, ticket: StageRequest) -> ThinkerStream:
        return ThinkerStream(ticket, self._spec.prompt_ids, streaming=self._async_chunk)

    def inbox(self, ticket: StageRequest) -> TalkerInbox:
        assert ticket.speech is not None
        speaker = self._spec.talker.speakers[ticket.speech.speaker]
        return TalkerInbox(self._spec, speaker=speaker)


class ThinkerStream:
    def __init__(self, ticket: StageRequest, ids: PromptIds, *, streaming: bool) -> None:
        self._prompt = np.array(ticket.prompt_token_ids, dtype=np.int32)
        heard, self._head = heard_prompt(ticket.prompt_token_ids, ids)
        self._heard = np.array(heard, dtype=bool)
        self._streaming = streaming
        # Prompt positions handed on, prompt positions computed.
        self._num_sent = 0
        self._num_computed = 0
        # Whatever a prompt holds behind the head is the beginning of the answer.
        self._unsent: list[int] = list(ticket.prompt_token_ids[self._head + HEAD_LENGTH :])
        self._num_spoken = len(self._unsent)

    def push(self, step: StageStep) -> tuple[Payload, ...]:
        assert isinstance(step, TextStep)
        self._num_computed += step.num_prompt_tokens
        only_token = self._num_spoken == 0 and step.ends == "length"
        if step.token_id is not None and (step.ends is None or only_token):
            self._unsent.append(step.token_id)
            self._num_spoken += 1
        return self._cut() if self._streaming else ()

    def finish(self) -> tuple[Payload, ...]:
        return self._cut()

    def _cut(self) -> tuple[Payload, ...]:
        payloads: list[Payload] = []
        if self._num_sent < self._num_computed:
            piece = slice(self._num_sent, self._num_computed)
            self._num_sent = self._num_computed
            complete = self._num_sent == len(self._prompt)
            head = self._prompt[self._head : self._head + HEAD_LENGTH] if complete else None
            payloads.append(ThinkerPrompt(self._prompt[piece][self._heard[piece]], head))
        if self._unsent and self._num_sent == len(self._prompt):
            payloads.append(SpokenTokens(np.array(self._unsent, dtype=np.int32)))
            self._unsent = []
        return tuple(payloads)


class TalkerInbox:
    """What the Talker has of one request, and which of its positions that covers.

    position   0 .. U-1     U .. U+7               U+8           U+9+j
    text       user ids     head, pads, bos        spoken[0]     spoken[j+1], then eos, pad ...
    needs      its id       the prompt's end       spoken[0]     spoken[j+1] or the end
    """

    # Only a Talker that reads texts out by itself is told whom to sound like.
    speaker_embedding = None
    reference = None

    def __init__(self, spec: OmniSpec, *, speaker: int) -> None:
        codec = spec.talker.codec_ids
        self._ids = spec.prompt_ids
        # Beside the last rows of the prompt, one each.
        self._codec_tail = (
            codec.nothink, codec.think_bos, codec.think_eos, speaker, codec.pad, codec.bos,
        )  # fmt: skip
        # Text ids by position as far as they are known; grows by one per spoken token.
        self._text: list[int] = []
        self._num_spoken = 0
        self._ended = False
        self.prompt_length: int | None = None

    @property
    def positions_ready(self) -> int:
        return UNBOUNDED if self._ended and self._num_spoken else len(self._text)

    @property
    def is_void(self) -> bool:
        return self._ended and not self._num_spoken

    def text_ids(self, start: int, stop: int) -> list[int]:
        """Text ids of positions `start` to `stop`, which `positions_ready` must cover."""
        known = self._text[start:stop]
        for position in range(max(start, len(self._text)), stop):
            first_beyond = position == len(self._text)
            known.append(self._ids.tts_eos if first_beyond else self._ids.tts_pad)
        return known

    def codec_ids(self, start: int, stop: int) -> list[int]:
        """Codec ids of prompt positions, NO_CODEC where there is none."""
        if self.prompt_length is None:
            return [NO_CODEC] * (stop - start)
        first = self.prompt_length - len(self._codec_tail)
        return [
            NO_CODEC if position < first else self._codec_tail[position - first]
            for position in range(start, stop)
        ]

    def push(self, payload: Payload) -> None:
        match payload:
            case ThinkerPrompt(user_ids=user_ids, head_ids=head_ids):
                self._text += user_ids.tolist()
                if head_ids is not None:
                    self._text += head_ids.tolist()
                    self._text += [self._ids.tts_pad] * NUM_PADS + [self._ids.tts_bos]
                    self.prompt_length = len(self._text) + 1
            case SpokenTokens(token_ids=token_ids):
                self._text += token_ids.tolist()
                self._num_spoken += len(token_ids)
            case CodecFrames():
                raise TypeError("codec frames arrived at the Talker")

    def end(self) -> None:
        self._ended = True
