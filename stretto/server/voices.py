"""Which speaker is meant by what a client calls a voice.

The names of OpenAI's voices mean the model's own default, unless the checkpoint has a speaker of
that name: clients choose them without knowing the model (Pipecat refuses all others), so they
say "some voice". Any other name must be a speaker; nobody gets a voice they did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.server.errors import echo, invalid, unsupported
from stretto.server.protocol import Voice, VoiceId

OPENAI_VOICES = frozenset(
    (
        "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer",
        "verse", "marin", "cedar",
    )
)  # fmt: skip
# How vllm-omni's clients ask for no voice in particular.
NO_VOICE = "default"


def speaker_of(named: Mapping[str, Voice | None], speakers: Sequence[str]) -> str | None:
    """The speaker that a request's fields name; None for the model's default.

    `named` has the value of each field that may name a voice.

    Raises:
        ApiError: a name is unknown, or two fields name different speakers.
    """
    chosen: dict[str | None, str] = {}
    for param, voice in named.items():
        if voice is not None:
            name = voice.id if isinstance(voice, VoiceId) else voice
            chosen[_speaker(param, name, speakers)] = param
    if len(chosen) > 1:
        raise invalid(
            list(chosen.values())[-1],
            f"{' and '.join(chosen.values())} name different speakers; give one of them",
        )
    return next(iter(chosen), None)


def _speaker(param: str, name: str, speakers: Sequence[str]) -> str | None:
    lower = name.lower()
    if lower in speakers:
        return lower
    if lower in OPENAI_VOICES or lower == NO_VOICE:
        return None
    raise unsupported(
        param,
        f"{param}: unknown voice {echo(name)}; the model's speakers are {', '.join(speakers)}, and "
        f"OpenAI's names ({', '.join(sorted(OPENAI_VOICES))}) mean its default",
    )
