"""The quality gate: how well a checkpoint speaks a hundred sentences that it never saw.

Four voices say the same sentences, so that each figure has something to be held against:

    espeak    espeak-ng as it is, with its intonation
    target    what the Talker is trained towards: espeak-ng on the frame grid
    codec     the target's codes through the checkpoint's Code2Wav: the best it could say
    parrot    the sentence as text through stretto

The judge is Moonshine (tiny, English), a speech recogniser whose weights come in its wheel; with
`--second-judge` PocketSphinx hears them too, so that the voice is not made for one pair of ears.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import soxr
import torch
from tokenizers import Tokenizer

from stretto.api import Omni
from stretto.audio import save_wav
from training.parrot.codec import DECIBELS, load_codec
from training.parrot.espeak import Espeak
from training.parrot.held_out import OTHERS, SENTENCES, words
from training.parrot.melody import pitch
from training.parrot.speech import (
    SAMPLE_RATE,
    GridSpeech,
    log_mels,
    speak_on_grid,
)
from training.parrot.workspace import Workspace, argument_parser, open_workspace, published

_RECOGNISER_RATE = 16_000
# A voice is compared in columns of 40 ms.
_POOLED_COLUMNS = 4
# Speech has ended when its last 40 ms are this much quieter than its loudest.
_ENDING_DB = 30.0
_FEWEST_SECONDS = 0.3


@dataclass(frozen=True)
class Voice:
    """What one system said: a wave float32 [n] at 24 kHz per sentence."""

    name: str
    sentences: list[str]
    waves: list[np.ndarray]
    ended_itself: list[bool]
    on_the_grid: bool = True
    seconds_of_work: float | None = None


@dataclass(frozen=True)
class Figures:
    """One row of the table. Shares and ratios are 1 for 100 %."""

    voice: str
    word_error_rate: float
    second_word_error_rate: float | None
    sentences_heard_right: float
    identified: float
    clean_endings: float
    duration_ratio: float
    mel_distance_db: float
    pitch_distance: float | None
    real_time_factor: float | None


class Recogniser(Protocol):
    """Hears speech, float32 [n] at 16 kHz with silence before and after it, as words."""

    def words_of(self, speech: np.ndarray) -> str: ...


class Moonshine:
    """Its tiny English model."""

    def __init__(self) -> None:
        import moonshine_voice

        folder = Path(moonshine_voice.__file__).parent / "assets" / "tiny-en"
        self._transcriber: Any = moonshine_voice.Transcriber(
            model_path=str(folder), model_arch=moonshine_voice.ModelArch.TINY
        )

    def words_of(self, speech: np.ndarray) -> str:
        transcript = self._transcriber.transcribe_without_streaming(
            speech.tolist(), _RECOGNISER_RATE
        )
        return " ".join(line.text for line in transcript.lines)


class PocketSphinx:
    """The US English models of its wheel: Gaussian mixtures, and another ear than Moonshine's."""

    def __init__(self) -> None:
        import pocketsphinx

        self._decoder: Any = pocketsphinx.Decoder(samprate=_RECOGNISER_RATE, loglevel="FATAL")

    def words_of(self, speech: np.ndarray) -> str:
        self._decoder.start_utt()
        samples = (32767 * speech).astype(np.int16)
        self._decoder.process_raw(samples.tobytes(), full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return "" if hypothesis is None else str(hypothesis.hypstr)


def word_errors(said: str, heard: str) -> int:
    """The fewest words to change, add or leave out."""
    truth, guess = words(said), words(spelled_alike(heard))
    row = list(range(len(guess) + 1))
    for i, word in enumerate(truth, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(guess, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def spelled_alike(text: str) -> str:
    """A transcript in the spelling of the held-out sentences: no hyphens, American."""
    text = text.replace("-", " ").replace("\u2019", "'")
    for british, american in (("favourite", "favorite"), ("neighbour", "neighbor")):
        text = text.replace(british, american).replace(british.title(), american.title())
    return text


def compared_mels(wave: np.ndarray) -> np.ndarray:
    """Mean log-mels per 40 ms between the first sound and the last: [columns, mels]."""
    mels = log_mels(wave)
    mels = mels[: len(mels) // _POOLED_COLUMNS * _POOLED_COLUMNS]
    pooled = mels.reshape(-1, _POOLED_COLUMNS, mels.shape[1]).mean(1)
    loud = np.nonzero(pooled.mean(1) > pooled.mean(1).max() - 6.0)[0]
    return np.asarray(pooled[loud[0] : loud[-1] + 1])


def warped_distances(spoken: np.ndarray, references: Sequence[np.ndarray]) -> np.ndarray:
    """Mean mel distance in dB along the best warping path to each reference (DTW).

    All references at once, one anti-diagonal of their tables after the other.
    """
    rows, longest = len(spoken), max(map(len, references))
    costs = np.full((len(references), rows, longest), np.inf, np.float32)
    for index, reference in enumerate(references):
        distance = torch.cdist(torch.from_numpy(spoken), torch.from_numpy(reference), p=1)
        costs[index, :, : len(reference)] = distance.numpy() / spoken.shape[1]
    total = np.full((len(references), rows + 1, longest + 1), np.inf, np.float32)
    total[:, 0, 0] = 0
    for diagonal in range(rows + longest - 1):
        row = np.arange(max(0, diagonal - longest + 1), min(rows, diagonal + 1))
        column = diagonal - row
        cost = costs[:, row, column]
        # A step along both axes counts twice, so that every path has the same weight.
        total[:, row + 1, column + 1] = np.minimum(
            np.minimum(total[:, row, column + 1], total[:, row + 1, column]) + cost,
            total[:, row, column] + 2 * cost,
        )
    lengths = np.array([len(reference) for reference in references])
    ends = total[np.arange(len(references)), rows, lengths]
    return np.asarray(ends / (rows + lengths) * DECIBELS)


def pitch_distance(wave: np.ndarray, reference: np.ndarray) -> float:
    """Mean distance in semitones where both waves, spoken at one pace, have a pitch; else NaN."""
    times = np.arange(0, min(len(wave), len(reference)), SAMPLE_RATE // 50)
    ours, theirs = (pitch(each, SAMPLE_RATE, times) for each in (wave, reference))
    apart = np.abs(12 * np.log2(ours / theirs))
    apart = apart[~np.isnan(apart)]
    return float(apart.mean()) if len(apart) else float("nan")


def ends_cleanly(wave: np.ndarray) -> bool:
    """Whether the voice has died away at the end instead of being cut."""
    block = SAMPLE_RATE // 25
    blocks = wave[len(wave) % block :].reshape(-1, block)
    if len(wave) < _FEWEST_SECONDS * SAMPLE_RATE:
        return False
    power = (blocks**2).mean(1)
    return bool(power[-1] < power.max() * 10 ** (-_ENDING_DB / 10))


def heard(recogniser: Recogniser, wave: np.ndarray) -> str:
    """What it makes of a wave float32 [n] at 24 kHz, however loud that is."""
    quiet = np.zeros(_RECOGNISER_RATE // 2, np.float32)
    speech = soxr.resample(wave, SAMPLE_RATE, _RECOGNISER_RATE)
    loudest = max(float(np.abs(speech).max(initial=0)), 1e-3)
    padded = np.concatenate([quiet, 0.6 * speech / loudest, quiet])
    return recogniser.words_of(padded.astype(np.float32))


def sentence_errors(voice: Voice, recogniser: Recogniser, transcript: Path) -> np.ndarray:
    """How many words of each sentence were misheard, int [sentences]; leaves what was heard."""
    errors, lines = [], []
    for sentence, wave in zip(voice.sentences, voice.waves, strict=True):
        text = heard(recogniser, wave)
        errors.append(word_errors(sentence, text))
        lines.append(f"{errors[-1]}\t{sentence}\t{text}\n")
    transcript.write_text("".join(lines))
    return np.array(errors)


def judge(
    voice: Voice, targets: Voice, first: Recogniser, second: Recogniser | None, folder: Path
) -> Figures:
    """Everything about one voice; its waves and what was heard are left in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    errors = sentence_errors(voice, first, folder / "heard.tsv")
    num_words = sum(map(len, map(words, voice.sentences)))
    second_rate = None
    if second is not None:
        second_errors = sentence_errors(voice, second, folder / "heard2.tsv")
        second_rate = float(second_errors.sum() / num_words)
    references = [compared_mels(wave) for wave in targets.waves]
    identified, endings = 0, 0
    distances, ratios, pitches = [], [], []
    for index, wave in enumerate(voice.waves):
        apart = warped_distances(compared_mels(wave), references)
        identified += int(apart.argmin()) == index
        distances.append(float(apart[index]))
        endings += voice.ended_itself[index] and ends_cleanly(wave)
        ratios.append(len(wave) / len(targets.waves[index]))
        pitches.append(pitch_distance(wave, targets.waves[index]))
        save_wav(folder / f"{index:02}.wav", wave, SAMPLE_RATE)
    spoken_s = sum(map(len, voice.waves)) / SAMPLE_RATE
    work = voice.seconds_of_work
    return Figures(
        voice=voice.name,
        word_error_rate=float(errors.sum() / num_words),
        second_word_error_rate=second_rate,
        sentences_heard_right=float((errors == 0).mean()),
        identified=identified / len(voice.sentences),
        clean_endings=endings / len(voice.sentences),
        duration_ratio=float(np.mean(ratios)),
        mel_distance_db=float(np.mean(distances)),
        pitch_distance=float(np.nanmean(pitches)) if voice.on_the_grid else None,
        real_time_factor=None if work is None else work / spoken_s,
    )


def espeak_voice(espeak: Espeak, sentences: list[str]) -> Voice:
    waves = [
        soxr.resample(
            espeak.say_intoned(sentence).samples.astype(np.float32) / 32768,
            espeak.sample_rate,
            SAMPLE_RATE,
        )
        for sentence in sentences
    ]
    return Voice("espeak", sentences, waves, [True] * len(waves), on_the_grid=False)


def target_speech(espeak: Espeak, tokenizer: Tokenizer, sentences: list[str]) -> list[GridSpeech]:
    spoken = []
    for sentence in sentences:
        speech = speak_on_grid(espeak, tokenizer, sentence)
        if speech is None:
            raise ValueError(f"held-out sentence cannot be put on the grid: {sentence!r}")
        spoken.append(speech)
    return spoken


def codec_voice(
    checkpoint: Path, workspace: Workspace, sentences: list[str], targets: list[GridSpeech]
) -> Voice:
    """The targets' true codes through the checkpoint's Code2Wav."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32
    )
    codec = load_codec(workspace.codec)
    waves = []
    for speech in targets:
        with torch.inference_mode():
            waves.append(model.code2wav(codec.codes_of(speech).T[None])[0, 0].numpy())
    return Voice("codec", sentences, waves, [True] * len(waves))


def parrot_voice(checkpoint: Path, cache: Path, sentences: list[str]) -> Voice:
    """The sentences through stretto, one after the other, greedily."""
    waves, ended = [], []
    with Omni(str(checkpoint), cache_dir=cache) as omni:
        began = time.monotonic()
        for sentence in sentences:
            answer = omni.generate(sentence)
            waves.append(answer.audio)
            ended.append(answer.finish_reason == "stop" and answer.text == sentence)
            if answer.text != sentence:
                print(f"{sentence!r} came back as {_difference(sentence, answer.text)}")
        seconds = time.monotonic() - began
    return Voice("parrot", sentences, waves, ended, seconds_of_work=seconds)


def _difference(said: str, text: str) -> str:
    changed = difflib.ndiff(said.split(), text.split())
    return " ".join(word for word in changed if word[0] in "+-")


def table(rows: Iterable[Figures]) -> str:
    def optional(figure: float | None, digits: int = 2) -> str:
        return "" if figure is None else f"{figure:.{digits}f}"

    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("voice", lambda row: row.voice),
        ("WER", lambda row: f"{row.word_error_rate:.3f}"),
        ("second judge's", lambda row: optional(row.second_word_error_rate, 3)),
        ("sentences right", lambda row: f"{row.sentences_heard_right:.0%}"),
        ("identified", lambda row: f"{row.identified:.0%}"),
        ("clean endings", lambda row: f"{row.clean_endings:.0%}"),
        ("duration", lambda row: f"{row.duration_ratio:.2f}"),
        ("mel distance", lambda row: f"{row.mel_distance_db:.2f} dB"),
        ("pitch", lambda row: optional(row.pitch_distance)),
        ("RTF", lambda row: optional(row.real_time_factor)),
    ]
    lines = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=None, help="default: the assembled one")
    parser.add_argument(
        "--other-codec", action="store_true", help="the model was not made in this work directory"
    )
    parser.add_argument(
        "--others", action="store_true", help="the hundred that the gate does not speak"
    )
    parser.add_argument(
        "--second-judge", action="store_true", help="PocketSphinx too, a second a sentence"
    )
    options = parser.parse_args()
    workspace = open_workspace(options)
    checkpoint: Path = options.model or workspace.checkpoint
    sentences = OTHERS if options.others else SENTENCES
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    espeak = Espeak()
    speeches = target_speech(espeak, tokenizer, sentences)
    waves = [each.samples() for each in speeches]
    targets = Voice("target", sentences, waves, [True] * len(waves))
    voices = [parrot_voice(checkpoint, workspace.root, sentences)]
    if not options.other_codec:
        voices.append(codec_voice(checkpoint, workspace, sentences, speeches))
        voices += [targets, espeak_voice(espeak, sentences)]
    first = Moonshine()
    second = PocketSphinx() if options.second_judge else None
    folder = workspace.quality / (checkpoint.name + ("-others" if options.others else ""))
    rows = [judge(voice, targets, first, second, folder / voice.name) for voice in voices]
    with published(folder / "figures.json") as path:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
