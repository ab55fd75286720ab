"""Made Qwen3-TTS checkpoints are whole, reproducible, and speak like something that is trained."""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.cli import main
from stretto.errors import CheckpointError
from stretto.models.tiny import CACHED_CHECKPOINTS, cached_checkpoint, make_checkpoint
from tests.models.conftest import Tts
from tests.reference_tts import reference_codes

FILES = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "speech_tokenizer/config.json", "speech_tokenizer/model.safetensors",
    "speech_tokenizer/preprocessor_config.json",
}  # fmt: skip


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Emptied after each test: a checkpoint has 100 MB, and pytest keeps what is in tmp_path."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def files_of(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def test_the_seed_decides_every_byte(tts: Tts, scratch: Path) -> None:
    kind = tts.spec.model_kind
    make_checkpoint(scratch / "same", arch="qwen3-tts", size="tiny", seed=0, kind=kind)
    assert files_of(tts.directory) == files_of(scratch / "same") == FILES
    same, different, unreadable = filecmp.cmpfiles(
        tts.directory, scratch / "same", sorted(FILES), shallow=False
    )
    assert (sorted(same), different, unreadable) == (sorted(FILES), [], [])


def test_another_seed_makes_other_weights_and_nothing_else(cache_dir: Path, scratch: Path) -> None:
    made = cached_checkpoint("tiny-tts", cache_dir=cache_dir)
    make_checkpoint(scratch / "other", arch="qwen3-tts", size="tiny", seed=1)
    _, different, _ = filecmp.cmpfiles(made, scratch / "other", sorted(FILES), shallow=False)
    assert sorted(different) == ["model.safetensors", "speech_tokenizer/model.safetensors"]


@pytest.mark.parametrize(
    ("arch", "size", "kind", "allowed"),
    [
        ("qwen3-tts", "huge", None, "unknown size 'huge' of qwen3-tts; there are: tiny"),
        ("qwen3-tts", "tiny", "singer", "there are: custom_voice, voice_design, base"),
        ("qwen3-omni", "tiny", "base", "unknown kind 'base' of qwen3-omni"),
        ("qwen4-tts", "tiny", None, "there are: qwen3-omni, qwen3-tts"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_can(
    scratch: Path, arch: str, size: str, kind: str | None, allowed: str
) -> None:
    with pytest.raises(CheckpointError, match=allowed):
        make_checkpoint(scratch / "new", arch=arch, size=size, seed=0, kind=kind)
    assert not (scratch / "new").exists()


def test_the_command_line_makes_them(
    scratch: Path, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    arguments = ["--arch", "qwen3-tts", "--size", "tiny", "--kind", "base"]
    assert main(["models", "make", str(scratch / "made"), *arguments]) == 0
    assert str(scratch / "made") in capsys.readouterr().out
    made = cached_checkpoint("tiny-tts-base", cache_dir=cache_dir)
    assert filecmp.cmp(scratch / "made" / "config.json", made / "config.json", shallow=False)


def test_cached_checkpoints_of_all_kinds_have_folders_of_their_own(tts: Tts) -> None:
    recipes = CACHED_CHECKPOINTS.values()
    assert len({recipe.folder for recipe in recipes}) == len(recipes)
    assert tts.spec.model_kind in tts.directory.name


def test_the_references_tokenizer_gives_the_ids_of_ours(tts: Tts) -> None:
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(tts.directory / "tokenizer.json"))
    for text in ("It's 7:45, isn't it?", "日本語 🙂", "<|im_start|>assistant\nYes.<|im_end|>\n"):
        (ids,) = tts.reference._tokenize_texts([text])
        assert ids[0].tolist() == own.encode(text, add_special_tokens=False).ids
    ids = own.encode("<|im_start|>assistant\n").ids
    assert (ids[0], ids[1], len(ids)) == (
        tts.spec.prompt_ids.im_start,
        tts.spec.prompt_ids.assistant,
        3,
    )


def test_what_is_said_depends_on_the_text_runs_in_no_circle_and_is_heard(tts: Tts) -> None:
    manner = {
        "custom_voice": {"speaker": "vivian"},
        "voice_design": {"instruct": "An old man."},
        "base": {
            "ref_audio": (np.random.default_rng(0).normal(0, 0.1, 30000).astype(np.float32), 24000)
        },
    }[tts.spec.model_kind]
    texts = ("She did not ask why.", "Nobody was there.")
    (codes, samples), (other, _) = (
        reference_codes(tts.reference, text, kind=tts.spec.model_kind, max_new_tokens=41, **manner)
        for text in texts
    )
    # No end of speech: the limit decides, less the code 0 that becomes no frame.
    assert codes.shape == other.shape == (40, 16)
    assert len({tuple(frame) for frame in codes.tolist()}) == 40
    assert all(len(set(codes[:, at])) > 20 for at in range(16))
    assert (codes != other).mean() > 0.8
    assert len(samples) == 40 * 1920
    assert 0.05 < samples.std() < 0.2
    assert np.abs(samples).max() < 1.0


def test_speakers_languages_and_instructions_are_heard(tts_custom: Tts) -> None:
    manners = (
        {"speaker": "vivian"}, {"speaker": "ryan"}, {"speaker": "ryan", "language": "German"},
        {"speaker": "dylan", "language": "Chinese"}, {"speaker": "ryan", "instruct": "Sadly."},
    )  # fmt: skip
    takes = set()
    for manner in manners:
        codes, _ = reference_codes(
            tts_custom.reference, "Hello.", kind="custom_voice", max_new_tokens=10, **manner
        )
        takes.add(codes.tobytes())
    assert len(takes) == len(manners)


def test_ends_are_as_good_as_never_drawn(tts: Tts) -> None:
    spec = tts.spec.talker
    rows = torch.randn(50, spec.decoder.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = tts.talker.logits(tts.talker.decoder.final_norm(rows))
    probabilities = logits.masked_fill(tts.talker.suppressed, -torch.inf).softmax(-1)
    assert probabilities[:, spec.codec_ids.eos].max() < 1e-3
    assert probabilities.max(-1).values.median() > 0.05
