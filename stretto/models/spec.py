"""What the specs of several models have in common: ids that shape a prompt, and Talkers.

A model's own `spec.py` reads its configs into these; this module reads none.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stretto.errors import CheckpointError
from stretto.models.decoder import DecoderConfig

# The published Talkers keep their special codec ids in the last 1024 of their vocabulary.
NUM_SPECIAL_CODEC_IDS = 1024


class PromptIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of the text vocabulary that shape a prompt."""

    im_start: int
    im_end: int
    user: int
    assistant: int
    tts_bos: int
    tts_eos: int
    tts_pad: int


class CodecIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of a Talker's vocabulary that are not codes."""

    eos: int
    bos: int
    pad: int
    nothink: int
    think_bos: int
    think_eos: int


class CodecTalkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every Talker has: a decoder for code 0 and a small one for the other codes."""

    decoder: DecoderConfig
    predictor: DecoderConfig
    vocab_size: int
    num_codebooks: int
    codebook_size: int
    codec_ids: CodecIds
    # By name in lower case; an id of the Talker's vocabulary each.
    speakers: dict[str, int]


def check_ids(ids: Mapping[str, int], *, vocab_size: int, where: str) -> None:
    """Raises CheckpointError for an id that its vocabulary has not: it would be an index later."""
    for name, value in ids.items():
        if not 0 <= value < vocab_size:
            raise CheckpointError(
                f"{where}: {name} is {value}; its vocabulary has {vocab_size} ids"
            )
