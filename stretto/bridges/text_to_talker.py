"""Text to Talker: a text that is read out by itself, whole or as it is being written.

The client is the stage before this Talker: what it sends are the ids of the text, in order, and
the word that nothing follows. The layout is that of Qwen3-TTS (`generate` of its reference):

    position   0 .. h-1    h .. h+n                  h+n+1+j
    text       head        t[0] .. t[n]              t[n+1+j]     then eos, then pads
    codec      tags        bos, reference frames     frame j      (t: reference text, then text)

and where the whole text comes first (`text_first`), with m ids in t:

    position   0 .. h-1    h .. h+m-1      h+m     h+m+1 .. h+m+1+n         from there on
    text       head        t               eos     pads                     pads
    codec      tags        pads            pad     bos, reference frames    frames
"""

from __future__ import annotations

import numpy as np

from stretto.bridges.prompt_inbox import UNBOUNDED
from stretto.models.qwen3_tts.spec import TtsSpec
from stretto.payloads import CodecFrames, Payload, SpokenTokens, ThinkerPrompt
from stretto.request import NO_CODEC, SpeechPrompt, StageRequest


def prompt_positions(prompt: SpeechPrompt) -> int:
    """Cache positions of a prompt; with `text_first` its text must be whole."""
    head = len(prompt.head_ids)
    reference = 0 if prompt.reference_codes is None else len(prompt.reference_codes)
    if not prompt.text_first:
        return head + 1 + reference
    return head + len(prompt.reference_text_ids) + len(prompt.text_ids) + 1 + 1 + reference


class TextToTalker:
    """The receiving half of this edge; the client's half is `Pipeline`'s."""

    def __init__(self, spec: TtsSpec) -> None:
        self._spec = spec

    def inbox(self, ticket: StageRequest) -> TextInbox:
        assert ticket.speech is not None
        assert ticket.speech.prompt is not None
        return TextInbox(self._spec, ticket.speech.prompt, max_positions=ticket.max_positions)


class TextInbox:
    """What the Talker has of one text, and which of its positions that covers.

    It never pads where text may still come: the end of speech enters only once the text has ended.
    """

    def __init__(self, spec: TtsSpec, prompt: SpeechPrompt, *, max_positions: int) -> None:
        """`max_positions` the request can have at most; text beyond them is not kept."""
        ids, codec = spec.prompt_ids, spec.talker.codec_ids
        self._eos, self._pad = ids.tts_eos, ids.tts_pad
        self._codec = codec
        self._prompt = prompt
        self._head = len(prompt.head_ids)
        codes = prompt.reference_codes
        self._num_reference = 0 if codes is None else len(codes)
        self._text = [*prompt.reference_text_ids, *prompt.text_ids]
        self._max_positions = max_positions
        self._ended = not prompt.text_follows
        assert self._ended or not prompt.text_first, "a text that comes first is whole"
        self.prompt_length: int | None = prompt_positions(prompt)

    @property
    def positions_ready(self) -> int:
        return UNBOUNDED if self._ended and not self.is_void else self._head + len(self._text)

    @property
    def is_void(self) -> bool:
        return self._ended and len(self._text) == len(self._prompt.reference_text_ids)

    @property
    def speaker_embedding(self) -> np.ndarray | None:
        """Float32 [H]; stands where `codec_ids` says GIVEN_VOICE."""
        return self._prompt.speaker_embedding

    @property
    def reference(self) -> tuple[int, np.ndarray] | None:
        """The first position of the reference's frames, and they, int16 [n, num_codebooks]."""
        codes = self._prompt.reference_codes
        assert self.prompt_length is not None
        return None if codes is None else (self.prompt_length - len(codes), codes)

    def text_ids(self, start: int, stop: int) -> list[int]:
        """Text ids of positions `start` to `stop`, which `positions_ready` must cover."""
        return [self._text_id(position) for position in range(start, stop)]

    def codec_ids(self, start: int, stop: int) -> list[int]:
        """Codec ids of prompt positions, NO_CODEC where there is none."""
        return [self._codec_id(position) for position in range(start, stop)]

    def _text_id(self, position: int) -> int:
        if position < self._head:
            return self._prompt.head_ids[position]
        at = position - self._head
        if at < len(self._text):
            return self._text[at]
        return self._eos if at == len(self._text) else self._pad

    def _codec_id(self, position: int) -> int:
        assert self.prompt_length is not None
        if position < self._head:
            return self._prompt.codec_ids[position]
        first_frame = self.prompt_length - self._num_reference
        if position < first_frame - 1:
            return self._codec.pad
        return self._codec.bos if position == first_frame - 1 else NO_CODEC

    def push(self, payload: Payload) -> None:
        match payload:
            case SpokenTokens(token_ids=token_ids):
                room = max(self._max_positions - len(self._text), 0)
                self._text += token_ids[:room].tolist()
            case ThinkerPrompt() | CodecFrames():
                raise TypeError(f"{type(payload).__name__} arrived at a Talker that reads texts")

    def end(self) -> None:
        self._ended = True
