"""Made checkpoints are whole, reproducible, and what transformers takes for the real thing."""

from __future__ import annotations

import filecmp
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from stretto.errors import CheckpointError
from stretto.models.tiny import cached_checkpoint, make_checkpoint


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Emptied after each test: a checkpoint has 180 MB, and pytest keeps what is in tmp_path."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "tiny"
        make_checkpoint(made, arch="qwen3-omni", size="tiny", seed=0)
        yield made


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, don't they look plain?",
        " leading,  doubled and trailing spaces ",
        "\n\nassistant\n\r\n\ttab",
        "日本語とEnglishと한국어",
        "👩‍👩‍👧 🙂🏽 🇩🇪",
        "e\u0301 is not é",
        "नमस्ते, שלום, ÿ",
        "\x00\x07\x7f\u200b\ufeff",
        "<|im_end|> and <think>",
        "".join(map(chr, range(0x250))),
    ],
)
def test_any_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("answer", ["", "Yes.", "\nYes.", " Yes."])
def test_the_head_of_an_answer_is_exactly_three_tokens(
    tokenizer: Any, checkpoint: Path, answer: str
) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Is it?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt + answer).input_ids
    head = [config.im_start_token_id, config.assistant_token_id, newline]
    assert ids[: len(ids) - len(tokenizer(answer).input_ids)][-3:] == head


def test_the_template_takes_strings_and_lists_and_several_turns(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
        {
            "role": "user",
            "content": [
                {"type": "input_audio", "input_audio": {"data": ""}},
                {"type": "image_url", "image_url": {"url": ""}},
                {"type": "video"},
                {"type": "text", "text": "What is it?"},
            ],
        },
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\n Hello\n<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\n"
        "<|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>"
        "What is it?<|im_end|>\n"
    )


def test_the_ids_in_the_config_are_the_tokenizers(tokenizer: Any, checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    ids = {
        "system": config.system_token_id,
        "user": config.user_token_id,
        "assistant": config.assistant_token_id,
        "<|im_start|>": config.im_start_token_id,
        "<|im_end|>": config.im_end_token_id,
        "<tts_pad>": config.tts_pad_token_id,
        "<tts_text_bos>": config.tts_bos_token_id,
        "<tts_text_eod>": config.tts_eos_token_id,
        "<|audio_pad|>": config.thinker_config.audio_token_id,
        "<|image_pad|>": config.thinker_config.image_token_id,
        "<|video_pad|>": config.thinker_config.video_token_id,
        "<|vision_start|>": config.thinker_config.vision_start_token_id,
    }
    assert {token: tokenizer(token).input_ids for token in ids} == {
        token: [token_id] for token, token_id in ids.items()
    }
    assert len(tokenizer) < 3000 <= config.thinker_config.text_config.vocab_size
    assert tokenizer.eos_token_id == config.im_end_token_id


def test_transformers_speaks_with_it_until_the_limits_and_is_heard(
    model: Any, tokenizer: Any
) -> None:
    config = model.config
    assert model.generation_config.eos_token_id == config.im_end_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    text_ids, waveform = model.generate(
        input_ids=prompt["input_ids"],
        return_audio=True,
        thinker_max_new_tokens=12,
        thinker_do_sample=False,
        thinker_eos_token_id=config.im_end_token_id,
        talker_max_new_tokens=9,
        talker_do_sample=False,
    )
    answer = text_ids[0, prompt["input_ids"].shape[1] :]
    assert len(answer) == 12
    assert len(set(answer.tolist())) > 6
    # One frame fewer than tokens; the vocoder's look-ahead costs 555 samples at the end.
    assert waveform.shape[-1] == 8 * 1920 - 555
    assert 0.05 < waveform.std() < 0.2
    assert waveform.abs().max() < 1.0


def test_ends_are_as_good_as_never_drawn(model: Any) -> None:
    ids = torch.arange(300, 340).unsqueeze(0)
    with torch.inference_mode():
        probabilities = model.thinker(input_ids=ids).logits.softmax(dim=-1)
    assert probabilities[..., model.config.im_end_token_id].max() < 1e-4
    assert probabilities.max(dim=-1).values.median() > 0.05


def test_the_seed_decides_every_byte(checkpoint: Path, scratch: Path) -> None:
    make_checkpoint(scratch / "same", arch="qwen3-omni", size="tiny", seed=0)
    names = sorted(path.name for path in checkpoint.iterdir())
    same, different, unreadable = filecmp.cmpfiles(
        checkpoint, scratch / "same", names, shallow=False
    )
    assert (sorted(same), different, unreadable) == (names, [], [])


def test_another_seed_makes_other_weights_and_nothing_else(checkpoint: Path, scratch: Path) -> None:
    make_checkpoint(scratch / "other", arch="qwen3-omni", size="tiny", seed=1)
    names = sorted(path.name for path in checkpoint.iterdir())
    _, different, unreadable = filecmp.cmpfiles(checkpoint, scratch / "other", names, shallow=False)
    assert (different, unreadable) == (["model.safetensors"], [])


@pytest.mark.parametrize(
    ("arch", "size", "allowed"),
    [("qwen4", "tiny", "qwen3-omni"), ("qwen3-omni", "huge", "tiny, small")],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    scratch: Path, arch: str, size: str, allowed: str
) -> None:
    with pytest.raises(CheckpointError, match=allowed):
        make_checkpoint(scratch / "new", arch=arch, size=size, seed=0)
    assert not (scratch / "new").exists()


def test_a_folder_with_content_is_refused_and_left_alone(scratch: Path) -> None:
    (scratch / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        make_checkpoint(scratch, arch="qwen3-omni", size="tiny", seed=0)
    assert [path.name for path in scratch.iterdir()] == ["notes.txt"]


def test_an_unknown_cached_checkpoint_is_refused_with_the_known_ones(scratch: Path) -> None:
    with pytest.raises(CheckpointError, match="tiny, small"):
        cached_checkpoint("huge", cache_dir=scratch)


def _ask(cache_dir: Path, both_are_ready: Barrier) -> None:
    both_are_ready.wait(timeout=60)
    cached_checkpoint("tiny", cache_dir=cache_dir)


def test_two_processes_that_ask_at_once_make_one_whole_checkpoint(scratch: Path) -> None:
    spawning = multiprocessing.get_context("spawn")
    both_are_ready = spawning.Barrier(2)
    cache_dir = scratch / "cache"
    other_process = spawning.Process(target=_ask, args=(cache_dir, both_are_ready))
    other_process.start()
    both_are_ready.wait(timeout=60)
    path = cached_checkpoint("tiny", cache_dir=cache_dir)
    other_process.join(timeout=60)
    assert other_process.exitcode == 0
    assert list(cache_dir.iterdir()) == [path]
    assert AutoConfig.from_pretrained(path).model_type == "qwen3_omni_moe"
    made = (path / "config.json").stat()
    assert cached_checkpoint("tiny", cache_dir=cache_dir) == path
    assert (path / "config.json").stat().st_mtime_ns == made.st_mtime_ns
