"""The Talker of Qwen3-TTS, held to the reference's `generate`: hidden rows, logits, codes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.models.code_predictor import CodePredictor
from stretto.models.decoder import DecoderConfig, DenseConfig, KVCache, Segment
from stretto.models.qwen3_tts.talker import Talker
from tests.models.conftest import Tts
from tests.models.small import CPU, MAX_ROWS, load, save_as, scatter
from tests.reference_tts import load_reference, plain_rotary, reference_codes, reference_module

pytestmark = pytest.mark.usefixtures("no_gradients")

TEXT = "She counted the boats, and wrote the number in a small book."
# Sums in another order: 1e-5 was seen in hidden rows, 2e-5 in logits.
ROUNDING = 5e-5


def greedy(logits: Tensor, step: int) -> Tensor:
    return logits.argmax(-1)


def some_sound(duration_s: float) -> tuple[np.ndarray, int]:
    """A low tone that comes and goes, and a little noise."""
    at = np.arange(int(duration_s * 24000)) / 24000
    noise = np.random.default_rng(3).normal(0.0, 0.02, len(at))
    tone = np.sin(2 * np.pi * 180 * at) * (0.5 + 0.5 * np.sin(2 * np.pi * 2 * at))
    return (0.3 * tone + noise).astype(np.float32), 24000


# How each kind is asked to speak, three manners each.
MANNERS: dict[str, dict[str, dict[str, Any]]] = {
    "custom_voice": {
        "text first": {"speaker": "vivian"},
        "text by and by": {"speaker": "ryan", "language": "English", "non_streaming_mode": False},
        "a dialect, instructed": {"speaker": "dylan", "instruct": "Speak softly."},
    },
    "voice_design": {
        "text first": {"instruct": "An old man, out of breath."},
        "text by and by": {
            "instruct": "A child.", "language": "German", "non_streaming_mode": False,
        },
        "not instructed": {"instruct": "", "language": "Chinese"},
    },
    "base": {
        "a row alone": {"ref_audio": some_sound(1.5)},
        "with frames, text by and by": {"ref_audio": some_sound(1.5), "ref_text": "Hello there."},
        "with frames, text first": {
            "ref_audio": some_sound(2.0), "ref_text": "Hello there.", "non_streaming_mode": True,
        },
    },
}  # fmt: skip


# ---- parts ---------------------------------------------------------------------------------------


def test_rows_of_text_codes_and_frames_are_the_references(tts: Tts) -> None:
    theirs, ours = tts.reference.model.talker, tts.talker
    ids = torch.arange(tts.spec.talker.text_vocab_size)
    expected = theirs.text_projection(theirs.get_text_embeddings()(ids))
    assert torch.allclose(ours.text_rows, expected, atol=ROUNDING)
    codec_ids = torch.arange(tts.spec.talker.vocab_size)
    assert torch.equal(ours.codec_rows(codec_ids), theirs.get_input_embeddings()(codec_ids))
    codes = torch.randint(0, 2048, (7, 16), generator=torch.Generator().manual_seed(1))
    tables = [theirs.get_input_embeddings(), *theirs.code_predictor.get_input_embeddings()]
    parts = [table(codes[:, at]) for at, table in enumerate(tables)]
    frames = ours.frame_rows(codes)
    assert frames.shape == (7, tts.spec.talker.decoder.hidden_size)
    assert torch.allclose(frames, torch.stack(parts).sum(0), atol=1e-5)


def test_only_codes_and_the_end_can_be_drawn(tts: Tts) -> None:
    allowed = {*range(tts.spec.talker.codebook_size), tts.spec.talker.codec_ids.eos}
    assert {int(i) for i in (~tts.talker.suppressed).nonzero()} == allowed


def predicted_by_reference(predictor: Any, hidden: Tensor, first: Tensor) -> list[int]:
    result = predictor.generate(
        inputs_embeds=torch.stack((hidden, first))[None],
        max_new_tokens=len(predictor.lm_head),
        do_sample=False,
    )
    return [int(code) for code in result[0]]


@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
def test_residual_codes_are_the_references_for_every_row_of_a_batch(
    tts: Tts, num_rows: int
) -> None:
    predictor = tts.reference.model.talker.code_predictor
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, tts.spec.talker.decoder.hidden_size, generator=generator)
    code0 = torch.randint(0, 2048, (num_rows,), generator=generator)
    first = tts.talker.codec_rows(code0)
    codes, total = tts.talker.predictor.generate(hidden, first, greedy)
    for row in range(num_rows):
        assert codes[row].tolist() == predicted_by_reference(predictor, hidden[row], first[row])
    whole = tts.talker.frame_rows(torch.cat((code0[:, None], codes), 1))
    assert torch.allclose(total, whole, atol=1e-5)


@pytest.mark.parametrize("talker_hidden", [24, 40, 64])
@pytest.mark.parametrize("num_codebooks", [2, 5])
def test_a_predictor_narrower_or_wider_than_its_talker_is_the_references(
    talker_hidden: int, num_codebooks: int, tmp_path: Path
) -> None:
    configurations = reference_module("core.models.configuration_qwen3_tts")
    models = reference_module("core.models.modeling_qwen3_tts")
    config = configurations.Qwen3TTSTalkerCodePredictorConfig(
        vocab_size=30, hidden_size=40, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_code_groups=num_codebooks,
        max_position_embeddings=64, rope_theta=1e4,
    )  # fmt: skip
    around = configurations.Qwen3TTSTalkerConfig(hidden_size=talker_hidden)
    with plain_rotary():
        model = models.Qwen3TTSTalkerCodePredictorModelForConditionalGeneration(config, around)
    model.eval()
    scatter(model, seed=4)
    save_as(tmp_path, model, "part.")
    own = DecoderConfig(
        hidden_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        rms_norm_eps=1e-6, rope_theta=1e4, max_positions=64,
        mlp=DenseConfig(intermediate_size=24),
    )  # fmt: skip
    predictor = load(
        tmp_path,
        lambda source: CodePredictor(
            source, "part", own, num_codebooks=num_codebooks, codebook_size=30,
            talker_hidden_size=talker_hidden,
        ),
    )  # fmt: skip
    for num_rows in (4, 1):
        generator = torch.Generator().manual_seed(num_rows)
        hidden = torch.randn(num_rows, talker_hidden, generator=generator)
        first = torch.randn(num_rows, talker_hidden, generator=generator)
        codes, total = predictor.generate(hidden, first, greedy)
        assert total.shape == (num_rows, talker_hidden)
        assert torch.allclose(total, first + predictor.residual_rows(codes), atol=1e-5)
        for row in range(num_rows):
            assert codes[row].tolist() == predicted_by_reference(model, hidden[row], first[row])


# ---- whole takes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Take:
    """What the reference's Talker was given, and what it made of that."""

    prompt_rows: Tensor
    trailing_rows: Tensor
    pad_row: Tensor
    # By step: normed rows of the last position, and logits before anything is suppressed.
    hidden: Tensor
    logits: Tensor
    codes: np.ndarray


def reference_take(
    tts: Tts, manner: dict[str, Any], num_frames: int, monkeypatch: pytest.MonkeyPatch
) -> Take:
    talker = tts.reference.model.talker
    generate = talker.generate
    heard: dict[str, Any] = {}

    def listen(**kwargs: Any) -> Any:
        heard["given"] = kwargs
        heard["made"] = generate(**kwargs, output_logits=True)
        return heard["made"]

    with monkeypatch.context() as patched:
        patched.setattr(talker, "generate", listen)
        codes, _ = reference_codes(
            tts.reference, TEXT, kind=tts.spec.model_kind, repetition_penalty=1.0,
            # The last code 0 that it draws never becomes a frame.
            max_new_tokens=num_frames + 1,
            **manner,
        )  # fmt: skip
    given, made = heard["given"], heard["made"]
    return Take(
        prompt_rows=given["inputs_embeds"][0],
        trailing_rows=given["trailing_text_hidden"][0],
        pad_row=given["tts_pad_embed"][0],
        hidden=torch.cat([step[0][-1][0, -1:] for step in made.hidden_states]),
        logits=torch.cat(made.logits),
        codes=codes,
    )


def own_take(
    talker: Talker, take: Take, num_frames: int, prompt_cut: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, logits and codes by step over the same rows, the prompt at once or in two."""
    cache = KVCache(
        talker.decoder.config, num_blocks=1, block_size=256, dtype=torch.float32, device=CPU
    )
    at, x = 0, take.prompt_rows[:0]
    for part in torch.tensor_split(take.prompt_rows, [] if prompt_cut is None else [prompt_cut]):
        x = talker.decoder.forward(part, [Segment(0, len(part), at, 0)], cache)
        at += len(part)
    hidden_rows, all_logits, frames = [], [], []
    for step in range(num_frames):
        hidden = talker.decoder.final_norm(x[-1:])
        logits = talker.logits(hidden)
        code0 = logits.masked_fill(talker.suppressed, -torch.inf).argmax(-1)
        residual, total = talker.predictor.generate(hidden, talker.codec_rows(code0), greedy)
        hidden_rows.append(hidden)
        all_logits.append(logits)
        frames.append(torch.cat((code0[:, None], residual), 1))
        is_text = step < len(take.trailing_rows)
        text = take.trailing_rows[step : step + 1] if is_text else take.pad_row
        x = talker.decoder.forward(total + text, [Segment(0, 1, at + step, 0)], cache)
    return torch.cat(hidden_rows), torch.cat(all_logits), torch.cat(frames)


NUM_FRAMES = 30


@pytest.mark.parametrize("manner", [0, 1, 2])
def test_every_step_of_a_take_is_the_references(
    tts: Tts, manner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = list(MANNERS[tts.spec.model_kind].values())[manner]
    take = reference_take(tts, how, NUM_FRAMES, monkeypatch)
    assert len(take.codes) == NUM_FRAMES
    hidden, logits, codes = own_take(tts.talker, take, NUM_FRAMES)
    assert codes.tolist() == take.codes.tolist()
    assert torch.allclose(hidden, take.hidden[:NUM_FRAMES], atol=ROUNDING)
    assert torch.allclose(logits, take.logits[:NUM_FRAMES], atol=2 * ROUNDING)
    _, _, in_two = own_take(tts.talker, take, NUM_FRAMES, prompt_cut=5)
    assert torch.equal(in_two, codes)


def test_positions_of_the_three_rotary_axes_are_the_plain_ones(tts_base: Tts) -> None:
    """A prompt of 300 rows: were the axes apart anywhere, it would show by then."""
    talker = tts_base.reference.model.talker
    size = (1, 300, tts_base.spec.talker.decoder.hidden_size)
    rows = torch.randn(size, generator=torch.Generator().manual_seed(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = talker(inputs_embeds=rows, attention_mask=torch.ones(1, 300)).logits[0]
    decoder = tts_base.talker.decoder
    cache = KVCache(decoder.config, num_blocks=2, block_size=256, dtype=torch.float32, device=CPU)
    hidden = decoder.final_norm(decoder.forward(rows[0], [Segment(0, 300, 0, 0)], cache))
    assert torch.allclose(tts_base.talker.logits(hidden), expected, atol=2 * ROUNDING)


def test_the_reference_says_how_to_install_it_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_QWEN_TTS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"make \.reference"):
        load_reference(tmp_path)
