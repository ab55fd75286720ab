"""Step 3: the tokenizer, whose tokens are frames.

Byte-level BPE with the duration-fitted merges, each in four spellings (`th`, `Th`, `TH`, and
with the space before it), so that a word has as many tokens in capitals as without. Its
normaliser writes out what is not spelled as it is said: digits, signs, abbreviations.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from training.parrot.durations import Merge
from training.parrot.grammar import ACRONYMS
from training.parrot.spoken_numbers import ONES, TENS, spaced
from training.parrot.workspace import argument_parser, open_workspace, published

SPACE = "\u0120"  # how byte-level BPE writes a space
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# One token each where they stand right behind <|im_start|>.
ROLES = ("user", "assistant", "system")
SPECIAL_TOKENS = spaced(
    """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|>
    <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|>
    <|vision_pad|> <|image_pad|> <|video_pad|> <|audio_start|> <|audio_end|> <|audio_pad|>
    <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>"""
)

_SIGNS = {
    "\u2019": "'",
    "&": " and ",
    "%": " percent",
    "+": " plus ",
    "=": " equals ",
    "@": " at ",
    "$": " dollar ",
    "\u20ac": " euro ",
    "\u00a3": " pound ",
}
_ABBREVIATIONS = {
    "Mr": "Mister",
    "Mrs": "Misses",
    "Dr": "Doctor",
    "St": "Saint",
    "vs": "versus",
    "etc": "et cetera",
}


def build_tokenizer(merges: list[Merge]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    spelled_merges: dict[Merge, None] = {}
    for left, right in all_spellings(merges):
        spelled_merges[left, right] = None
        vocabulary.setdefault(left + right, len(vocabulary))
    for role in ROLES:
        vocabulary.setdefault(role, len(vocabulary))

    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=list(spelled_merges), fuse_unk=False, ignore_merges=True
        )
    )
    tokenizer.normalizer = normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"[,.;:!?\-]+ ?| ?[A-Za-z']+| ?[^\sA-Za-z',.;:!?\-]+|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def all_spellings(merges: list[Merge]) -> list[Merge]:
    """The merges in lower case, capitalised and in capitals, each with and without a space."""
    spelled = [(SPACE, letter) for letter in LETTERS + LETTERS.upper()]
    for left, right in merges:
        capital = left[0].upper() + left[1:]
        for pair in ((left, right), (capital, right), (left.upper(), right.upper())):
            spelled.append(pair)
            if left[0].isalpha():
                spelled.append((SPACE + pair[0], pair[1]))
    return spelled


def in_capitals(tokenizer: Tokenizer) -> dict[int, int]:
    """For each token with small letters the token of the same letters in capitals."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    capitals = {}
    for token, index in vocabulary.items():
        upper = token.upper()
        spelling = token.lstrip(SPACE).replace("'", "")
        is_text = spelling.isalpha() and spelling.isascii() and token not in ROLES
        if is_text and upper != token and upper in vocabulary:
            capitals[index] = vocabulary[upper]
    return capitals


def normalizer() -> normalizers.Normalizer:
    """Text as it is said: "I have 42 cats & a TV" becomes "I have forty two cats and a T.V."."""

    def rule(pattern: str, spoken: str) -> normalizers.Normalizer:
        return normalizers.Replace(Regex(pattern), spoken)

    steps = [
        normalizers.NFKD(),
        normalizers.StripAccents(),
        *(normalizers.Replace(sign, spoken) for sign, spoken in _SIGNS.items()),
        *(rule(rf"\b{short}\b\.?(?= )", long) for short, long in _ABBREVIATIONS.items()),
        *(rule(rf"\b{name}\b\.?", ".".join(name) + ".") for name in ACRONYMS),
        rule(r"(?<=\d),(?=\d{3})", ""),
        rule(r"(?<=\d)\.(?=\d)", " point "),
        rule(r"(?<=\d):(?=\d)", " "),
        rule(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])", " "),
        *number_rules(rule),
        rule(r"\s*[()\[\]{}\"\u201c\u201d/\u2013\u2014]+\s*", " "),
        rule(r"\.{2,}", "."),
        rule(r"[^A-Za-z0-9 ,.?!'\n:;\-]+", ""),
        rule(r" +", " "),
    ]
    return normalizers.Sequence(steps)


def number_rules(
    rule: Callable[[str, str], normalizers.Normalizer],
) -> list[normalizers.Normalizer]:
    """Digits in words up to 9999; a longer number is read digit by digit.

    The rules know no arithmetic: they take the leading digit off, thousands first.
    """
    rules = []
    for digit in range(1, 10):
        rules.append(rule(rf"(?<!\d){digit}000(?!\d)", f"{ONES[digit]} thousand"))
        rules.append(rule(rf"(?<!\d){digit}(?=\d{{3}}(?!\d))", f"{ONES[digit]} thousand "))
    rules.append(rule(r"(?<= thousand )0+(?=[1-9])", ""))
    for digit in range(1, 10):
        rules.append(rule(rf"(?<!\d){digit}00(?!\d)", f"{ONES[digit]} hundred"))
        rules.append(rule(rf"(?<!\d){digit}(?=\d\d(?!\d))", f"{ONES[digit]} hundred "))
    rules.append(rule(r"(?<= hundred )0+(?=[1-9])", ""))
    rules += [rule(rf"(?<!\d){number}(?!\d)", ONES[number]) for number in range(10, 20)]
    for digit in range(2, 10):
        rules.append(rule(rf"(?<!\d){digit}0(?!\d)", TENS[digit]))
        rules.append(rule(rf"(?<!\d){digit}(?=[1-9](?!\d))", TENS[digit] + " "))
    rules += [rule(rf"(?<=\d){digit}", f" {ONES[digit]}") for digit in range(10)]
    rules += [rule(str(digit), ONES[digit]) for digit in range(10)]
    return rules


def main() -> None:
    options = argument_parser(__doc__ or "").parse_args()
    workspace = open_workspace(options)
    merges = [(left, right) for left, right in json.loads(workspace.merges.read_text())]
    tokenizer = build_tokenizer(merges)
    with published(workspace.tokenizer) as path:
        tokenizer.save(str(path))
    print(f"{len(merges)} merges, {tokenizer.get_vocab_size()} tokens")
    for text in ("I have 42 cats & a TV in 1984.", "HELLO, hello, Hello! Thought, THOUGHT."):
        print(tokenizer.encode(text).tokens)


if __name__ == "__main__":
    main()
