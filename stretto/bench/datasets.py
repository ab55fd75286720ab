"""What is asked: random words, lines of a file, JSON lines, or a Seed-TTS list.

Random prompts have an exact number of tokens: they are put together from words that are one token
each, so that no tokenizer has to be asked how pieces join.
"""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from stretto.errors import ConfigError

# How byte-level tokenizers write the space that begins a word.
SPACE = "\u0120"
# More words than this add nothing but the time to look them up.
MAX_WORDS = 2000
SEED_TTS = ("seed-tts", "seed-tts-text", "seed-tts-design")
LANGUAGES = {"en": "English", "zh": "Chinese"}
READ_ALOUD = "You read the user's text aloud, word for word, and say nothing else."


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """`extra` are fields of the request's body of its own. Token counts are None where unknown."""

    text: str
    system: str | None = None
    num_tokens: int | None = None
    max_tokens: int | None = None
    extra: dict[str, Any] = {}


class RandomWords:
    """Texts of an exact number of tokens, the same for the same seed."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        words = sorted(
            token[1:]
            for token in vocabulary
            if token.startswith(SPACE) and token[1:].isascii() and token[1:].isalpha()
        )
        random.Random(0).shuffle(words)
        self._words = [w for w in words[:MAX_WORDS] if self.count(f" {w}") == 1]
        self._first = [w for w in words if self.count(w) == 1]
        if not self._first or not self._words:
            raise ConfigError(
                f"{tokenizer_file}: no words of one token; random prompts need a byte-level BPE"
            )

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, num_tokens: int, *, seed: int) -> str:
        rng = random.Random(seed)
        words = [rng.choice(self._first), *rng.choices(self._words, k=num_tokens - 1)]
        text = " ".join(words)
        assert self.count(text) == num_tokens, "words of one token did not stay so"
        return text


def random_prompts(
    words: RandomWords, *, count: int, input_len: int, output_len: int, seed: int
) -> list[Prompt]:
    return [
        Prompt(
            text=words.text(input_len, seed=seed + index),
            num_tokens=input_len,
            max_tokens=output_len,
        )
        for index in range(count)
    ]


def text_prompts(path: Path, output_len: int) -> list[Prompt]:
    """One prompt a line."""
    lines = [line.strip() for line in _read(path).splitlines()]
    return _some([Prompt(text=line, max_tokens=output_len) for line in lines if line], path)


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    system: str | None = None
    output_len: int | None = None
    extra_body: dict[str, Any] = {}


def jsonl_prompts(path: Path, output_len: int) -> list[Prompt]:
    """One object a line: `prompt`, and if wanted `system`, `output_len`, `extra_body`."""
    prompts = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            own = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        prompts.append(
            Prompt(
                text=own.prompt,
                system=own.system,
                max_tokens=own.output_len or output_len,
                extra=own.extra_body,
            )
        )
    return _some(prompts, path)


def seed_tts_prompts(
    kind: str, root: Path, locale: str, *, chat: bool, output_len: int
) -> list[Prompt]:
    """Lines `utt|reference transcript|wav|text` of ROOT/LOCALE/meta.lst; a design has a fifth."""
    path = root / locale / "meta.lst"
    prompts = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.split("|")
        wanted = 5 if kind == "seed-tts-design" else 4
        if len(fields) < wanted:
            raise ConfigError(f"{path}:{number}: {len(fields)} fields; {kind} needs {wanted}")
        extra: dict[str, Any] = {}
        if kind == "seed-tts":
            sound = base64.b64encode((path.parent / fields[2]).read_bytes()).decode()
            extra = {
                "ref_audio": f"data:audio/wav;base64,{sound}",
                "ref_text": fields[1],
                "task_type": "Base",
            }
        elif kind == "seed-tts-design":
            extra = {"task_type": "VoiceDesign", "instructions": fields[4]}
        if kind != "seed-tts-text":
            extra |= {"language": LANGUAGES[locale], "max_new_tokens": output_len}
        prompts.append(
            Prompt(
                text=fields[3],
                system=READ_ALOUD if chat else None,
                max_tokens=output_len if chat else None,
                extra=extra,
            )
        )
    return _some(prompts, path)


def repeated(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, from the beginning again when there are fewer."""
    return [prompts[index % len(prompts)] for index in range(count)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _some(prompts: list[Prompt], path: Path) -> list[Prompt]:
    if not prompts:
        raise ConfigError(f"{path}: no prompts in it")
    return prompts
