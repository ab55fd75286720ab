"""A recording becomes the row and the frames that the reference makes of it, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from safetensors.torch import load_file, save_file

from stretto.errors import CheckpointError, InvalidRequest
from stretto.models.qwen3_tts.speaker_encoder import mel_filters
from stretto.models.qwen3_tts.voices import VoiceEncoder
from stretto.models.tiny import cached_checkpoint
from tests.models.conftest import Tts
from tests.reference_tts import reference_module

Sound = tuple[np.ndarray, int]


@pytest.fixture(scope="module")
def encoder(tts_base: Tts) -> VoiceEncoder:
    return VoiceEncoder(tts_base.directory, tts_base.spec)


def a_voice(duration_s: float, *, pitch: float = 140.0, rate: int = 24000) -> np.ndarray:
    """Harmonics with a vibrato, syllables, and breath."""
    at = np.arange(round(duration_s * rate)) / rate
    phase = 2 * np.pi * (pitch * at + 0.8 * np.sin(2 * np.pi * 5 * at))
    harmonics = sum(np.sin(k * phase) / k for k in range(1, 15))
    syllables = np.maximum(0.0, np.sin(2 * np.pi * 3 * at))
    breath = np.random.default_rng(2).normal(0.0, 0.01, len(at))
    return (0.15 * harmonics * syllables + breath).astype(np.float32)


def by_reference(reference: Any, sound: Sound) -> tuple[np.ndarray, np.ndarray]:
    (item,) = reference.create_voice_clone_prompt(ref_audio=sound, ref_text="Hello.")
    return item.ref_spk_embedding.numpy(), item.ref_code.numpy()


# Whole frames, a started one, one sample of one, and more than the window that the encoder's
# transformer would have if it were left as transformers makes it.
@pytest.mark.parametrize("duration_s", [1.0, 1.6, 2.13, 2.0 + 1 / 24000, 12.5, 30.0])
def test_row_and_frames_are_the_references(
    encoder: VoiceEncoder, tts_base: Tts, duration_s: float
) -> None:
    samples = a_voice(duration_s)
    row, codes = by_reference(tts_base.reference, (samples, 24000))
    voice = encoder.encode(samples, 24000)
    assert (voice.speaker_embedding.dtype, voice.speaker_embedding.shape) == (np.float32, (256,))
    np.testing.assert_allclose(voice.speaker_embedding, row, atol=1e-4)
    assert voice.ref_codes is not None
    assert (voice.ref_codes.dtype, voice.ref_codes.shape) == (np.int16, codes.shape)
    assert len(codes) == int(np.ceil(len(samples) / 1920))
    np.testing.assert_array_equal(voice.ref_codes, codes)
    assert len({tuple(frame) for frame in codes.tolist()}) > len(codes) // 2


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_any_rate_is_brought_to_the_models(encoder: VoiceEncoder, tts_base: Tts, rate: int) -> None:
    samples = a_voice(1.5, rate=rate)
    row, codes = by_reference(tts_base.reference, (samples, rate))
    voice = encoder.encode(samples, rate)
    np.testing.assert_allclose(voice.speaker_embedding, row, atol=1e-4)
    np.testing.assert_array_equal(voice.ref_codes, codes)
    resampled = encoder.encode(soxr.resample(samples, rate, 24000), 24000)
    np.testing.assert_array_equal(resampled.speaker_embedding, voice.speaker_embedding)


def test_frames_are_made_only_if_wanted_and_the_row_is_the_same(encoder: VoiceEncoder) -> None:
    samples = a_voice(1.5)
    alone = encoder.encode(samples, 24000, with_codes=False)
    assert alone.ref_codes is None
    both = encoder.encode(samples, 24000)
    np.testing.assert_array_equal(alone.speaker_embedding, both.speaker_embedding)


def test_voices_differ_and_loudness_does_not_make_one(encoder: VoiceEncoder) -> None:
    def row(samples: np.ndarray) -> np.ndarray:
        return encoder.encode(samples, 24000, with_codes=False).speaker_embedding

    low, high = row(a_voice(2.0, pitch=90.0)), row(a_voice(2.0, pitch=330.0))
    softer = row(0.7 * a_voice(2.0, pitch=90.0))
    assert np.abs(low - softer).max() < 0.3 * np.abs(low - high).max()


def test_the_mel_filters_are_those_of_librosa(tts_base: Tts) -> None:
    """As transformers computes them, and as few libraries agree to: on Slaney's scale and norm."""
    theirs = reference_module("core.models.modeling_qwen3_tts").librosa_mel_fn
    expected = theirs(sr=24000, n_fft=1024, n_mels=128, fmin=0, fmax=12000)
    np.testing.assert_allclose(mel_filters(24000, 128), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("samples", "rate", "told"),
    [
        (a_voice(0.99), 24000, "0.99 s long; 1 to 30 s"),
        (a_voice(30.1), 24000, "30.10 s long; 1 to 30 s"),
        (np.zeros(0, np.float32), 24000, "0.00 s long"),
        (np.full(24000, np.nan, np.float32), 24000, "finite"),
        (np.append(a_voice(1.2), np.float32(np.inf)), 24000, "finite"),
        (np.zeros((24000, 2), np.float32), 24000, "2 axes"),
        (a_voice(1.2), 0, "0 samples a second"),
        (a_voice(1.2), -24000, "samples a second"),
        (a_voice(1.2), 10**9, "samples a second"),
    ],
)
def test_what_is_no_voice_is_refused(
    encoder: VoiceEncoder, samples: np.ndarray, rate: int, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        encoder.encode(samples, rate)
    assert refused.value.param == "ref_audio"


def test_silence_and_a_clipped_recording_give_finite_rows(encoder: VoiceEncoder) -> None:
    for samples in (np.zeros(24000), np.sign(a_voice(1.0)) * 5.0):
        voice = encoder.encode(samples.astype(np.float32), 24000)
        assert np.isfinite(voice.speaker_embedding).all()


@pytest.mark.parametrize("tts", ["tiny-tts", "tiny-tts-design"], indirect=True)
def test_a_checkpoint_that_clones_no_voices_says_so(tts: Tts) -> None:
    with pytest.raises(CheckpointError, match=f"a {tts.spec.model_kind} checkpoint"):
        VoiceEncoder(tts.directory, tts.spec)


def test_missing_tensors_of_either_encoder_are_named(
    cache_dir: Path, tts_base: Tts, tmp_path: Path
) -> None:
    made = cached_checkpoint("tiny-tts-base", cache_dir=cache_dir)
    (tmp_path / "speech_tokenizer").mkdir()
    speaker = {
        name: tensor
        for name, tensor in load_file(made / "model.safetensors").items()
        if name.startswith("speaker_encoder.")
    }
    codec = {
        name: tensor
        for name, tensor in load_file(made / "speech_tokenizer" / "model.safetensors").items()
        if name.startswith("encoder.")
    }
    del codec["encoder.downsample.conv.weight"]
    save_file(speaker, tmp_path / "model.safetensors")
    save_file(codec, tmp_path / "speech_tokenizer" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.downsample\.conv\.weight .* is missing"):
        VoiceEncoder(tmp_path, tts_base.spec).encode(a_voice(1.0), 24000)
    del speaker["speaker_encoder.fc.bias"]
    save_file(speaker, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"speaker_encoder\.fc\.bias \[256\] is missing"):
        VoiceEncoder(tmp_path, tts_base.spec)
