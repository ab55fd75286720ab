"""The recipe of the demo voice, as far as it needs neither espeak-ng nor a trained model."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3OmniMoeForConditionalGeneration

from training.parrot import grammar
from training.parrot.architecture import SPEAKERS, TextIds, parrot_config
from training.parrot.assemble import assembled_model
from training.parrot.code2wav import init_code2wav, new_code2wav
from training.parrot.codec import (
    CODEBOOK_SIZE,
    NUM_CODEBOOKS,
    NUM_COMPONENTS,
    NUM_STAGES,
    Codec,
    chosen_codes,
    fit_codec,
    load_codec,
    move_centroids,
    save_codec,
)
from training.parrot.continuation import SHIPPED, SHIPPED_CODEC, take_apart
from training.parrot.durations import fitted_merges, merged
from training.parrot.held_out import OTHERS, SENTENCES, without_held_out, words
from training.parrot.layers import dense_decoder, moe_decoder
from training.parrot.melody import NUM_MELODIES, UNVOICED, fitted_melodies, pitch, pulses
from training.parrot.optimisation import Cosine, Muon, TrainingRun, orthogonal
from training.parrot.prediction import aligned
from training.parrot.quality import (
    Voice,
    ends_cleanly,
    pitch_distance,
    sentence_errors,
    warped_distances,
    word_errors,
)
from training.parrot.speech import (
    COLUMN_SAMPLES,
    COLUMNS_PER_FRAME,
    DELAY_FRAMES,
    FRAME_FEATURES,
    FRAME_SAMPLES,
    NUM_BANDS,
    NUM_MELS,
    SAMPLE_RATE,
    TAIL_FRAMES,
    Part,
    Stretch,
    analysed,
    fitted_borders,
    source_times,
    synthesised,
)
from training.parrot.spoken_numbers import in_words
from training.parrot.synthesis import Utterance
from training.parrot.talker import Line, Script, SpeechModel
from training.parrot.vocabulary import build_tokenizer, in_capitals, normalizer
from training.parrot.workspace import Workspace, load, save


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(
        [("t", "h"), ("o", "u"), ("g", "h"), ("ou", "gh"), ("'", "s"), ("i", "n")]
    )


# ---- text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("I have 42 cats.", "I have forty two cats."),
        ("In 1984, 305 men", "In one thousand nine hundred eighty four, three hundred five men"),
        ("2,000 and 7.5", "two thousand and seven point five"),
        ("at 10:30", "at ten thirty"),
        ("Tom & Ann", "Tom and Ann"),
        ("50% of it", "fifty percent of it"),
        ("The AI on TV.", "The A.I. on T.V."),
        ("Dr. No met Mr Bean", "Doctor No met Mister Bean"),
        ("Café “déjà vu”…", "Cafe deja vu ."),
        ("a — b", "a b"),
        ("It's HELLO, isn't it?", "It's HELLO, isn't it?"),
    ],
)
def test_text_is_written_as_it_is_said(written: str, spoken: str) -> None:
    assert normalizer().normalize_str(written) == spoken


@pytest.mark.parametrize("number", [0, 7, 10, 19, 20, 42, 100, 305, 999, 1000, 1984, 9999])
def test_digits_and_words_are_the_same_number(number: int) -> None:
    assert normalizer().normalize_str(str(number)) == in_words(number)


def test_no_line_is_a_held_out_sentence_however_it_is_written() -> None:
    held_out = [*SENTENCES, *OTHERS]
    assert len(SENTENCES) == len(OTHERS) == 100
    assert len({words(sentence) for sentence in held_out}) == 200
    disguised = [sentence.upper().rstrip(".") for sentence in held_out]
    inside = [f"He said, {sentence}" for sentence in held_out if len(words(sentence)) >= 4]
    assert without_held_out([*held_out, *disguised, *inside, "The cat sat."]) == ["The cat sat."]


def test_the_grammar_fills_every_slot() -> None:
    rng = random.Random(0)
    for template in grammar.SENTENCES:
        line = grammar.fill(template, rng)
        assert "{" not in line
        assert all(letter.isalpha() or letter in " ,.'?!-" for letter in line), line


def test_the_grammar_is_the_same_on_every_run() -> None:
    first, second = random.Random(5), random.Random(5)
    assert [grammar.sentence(first) for _ in range(20)] == [
        grammar.sentence(second) for _ in range(20)
    ]


# ---- tokens ------------------------------------------------------------------------------------


def test_merges_bring_token_counts_to_durations() -> None:
    # One frame a letter, but "th" is one sound.
    durations = {word: [0.08 * (len(word) - 1)] * 40 for word in ("the", "thin", "bath", "both")}
    durations |= {"map": [0.24] * 40, "red": [0.24] * 40}
    assert [merge for merge, _ in fitted_merges(durations)] == [("t", "h")]
    assert merged(list("ththe"), ("t", "h")) == ["th", "th", "e"]


@pytest.mark.parametrize("text", ["thought", "it's in the house", "thin"])
def test_capitals_take_as_many_frames(tokenizer: Tokenizer, text: str) -> None:
    small, capitals = tokenizer.encode(text), tokenizer.encode(text.upper())
    table = in_capitals(tokenizer)
    assert [table.get(token, token) for token in small.ids] == capitals.ids
    assert len(tokenizer.encode(text.capitalize()).ids) == len(small.ids)


# ---- sound -------------------------------------------------------------------------------------


def pulse_train(period: int, seconds: float) -> np.ndarray:
    wave = np.zeros(int(seconds * SAMPLE_RATE), np.float32)
    wave[::period] = 0.5
    return np.convolve(wave, np.hanning(31), "same").astype(np.float32)


def a_word(start: float, end: float, frames: int) -> Stretch:
    return Stretch((Part(start, end, 1.0),), frames, is_word=True)


def on_its_tokens(*stretches: Stretch) -> np.ndarray:
    """`source_times` with each stretch exactly on its tokens."""
    frames = [stretch.frames for stretch in stretches]
    return source_times(stretches, FRAME_SAMPLES * np.cumsum(frames, dtype=float))


@pytest.mark.parametrize("period", [225, 240, 252])
def test_a_drone_comes_out_with_a_pulse_at_each_place_of_the_grid(period: int) -> None:
    source = pulse_train(period, 0.6)
    times = on_its_tokens(Stretch((), 2), a_word(2400.0, 12000.0, 5))
    mels, voicing = analysed(source, times)
    assert mels.shape == (7 * COLUMNS_PER_FRAME, NUM_MELS)
    assert (voicing[3 * COLUMNS_PER_FRAME :] > 0.8).all()
    spoken = synthesised(mels, voicing, np.full(7, UNVOICED))
    assert len(spoken) == 7 * FRAME_SAMPLES
    assert np.abs(spoken[: 2 * FRAME_SAMPLES - COLUMN_SAMPLES]).max() < 1e-4
    places = spoken[3 * FRAME_SAMPLES :].reshape(-1, COLUMN_SAMPLES).argmax(1)
    assert np.ptp(places) <= 2


def test_noise_is_the_same_in_every_frame_and_brighter_than_its_source() -> None:
    source = 0.1 * np.random.default_rng(0).normal(size=48_000).astype(np.float32)
    mels, voicing = analysed(source, on_its_tokens(a_word(2400.0, 40_800.0, 20)))
    assert voicing.mean() < 0.2
    steady = np.tile(mels.mean(0), (len(mels), 1))
    melodies = np.full(20, UNVOICED)
    spoken = synthesised(steady, np.zeros_like(voicing), melodies)[FRAME_SAMPLES:-FRAME_SAMPLES]
    frames = spoken.reshape(-1, FRAME_SAMPLES)
    np.testing.assert_allclose(frames, frames[:1].repeat(len(frames), 0), atol=1e-5)
    # White noise up to 12 kHz: 1.25 times as loud, and 2 dB an octave from 1 kHz to 11, where the
    # voice ends.
    hz = np.linspace(0, 12_000, 1000)
    gain = 1.25 * np.maximum(hz / 1000, 1) ** (np.log2(10) / 10) * (hz < 11_000)
    assert float(spoken.std()) == pytest.approx(0.1 * np.sqrt((gain**2).mean()), rel=0.1)


def test_formants_are_softer_than_in_their_source() -> None:
    flat = np.full((COLUMNS_PER_FRAME, NUM_MELS), 2.0)
    formant = flat.copy()
    formant[:, 17:20] += np.log(100) * np.array([0.5, 1, 0.5])
    noise = np.zeros((COLUMNS_PER_FRAME, NUM_BANDS))
    there, before = (
        np.abs(np.fft.rfft(synthesised(mels, noise, np.array([UNVOICED])))) ** 2
        for mels in (formant, flat)
    )
    hz = np.arange(len(there)) * SAMPLE_RATE / FRAME_SAMPLES
    # The top of mel 18, which is 20 dB higher in the source.
    top = np.abs(hz - 990) < 40
    raised_db = 10 * np.log10(there[top].sum() / before[top].sum())
    assert 10 < raised_db < 17


def test_silence_stays_silent() -> None:
    mels, voicing = analysed(np.zeros(24_000, np.float32), on_its_tokens(a_word(0.0, 24_000.0, 9)))
    assert np.abs(synthesised(mels, voicing, np.full(9, UNVOICED))).max() < 1e-4


def steady_rates(*rates: float) -> np.ndarray:
    return np.repeat(np.array(rates)[:, None], 4, 1)


def test_a_melody_goes_where_the_pitch_goes_with_no_pulse_early_or_late() -> None:
    rates = steady_rates(*np.linspace(10.0, 7.0, 40))
    voiced = np.ones(40, bool)
    melodies = fitted_melodies(rates, voiced)
    spoken = pulses(melodies)
    heard = 1 / np.diff(spoken.times)
    wanted = np.interp(spoken.times[:-1], np.arange(40) + 0.5, rates[:, 0])
    assert np.abs(heard - wanted).max() < 0.5
    assert np.abs(np.diff(heard)).max() < 0.4
    np.testing.assert_allclose(spoken.periods[:-1], np.diff(spoken.times), rtol=0.05)


@pytest.mark.parametrize("melody", range(NUM_MELODIES))
def test_each_melody_has_its_pulses_inside_its_frame(melody: int) -> None:
    times = pulses(np.array([melody])).times
    assert 6 <= len(times) <= 11
    assert times[0] >= 0
    assert times[-1] < 1


def test_without_voice_there_is_no_melody_and_behind_it_a_period_begins() -> None:
    voiced = np.array([True, False, True, True])
    melodies = fitted_melodies(steady_rates(8.5, 8.5, 8.5, 8.5), voiced)
    assert melodies[1] == UNVOICED
    assert melodies[2] == melodies[0] != melodies[3]
    assert pulses(melodies[1:3]).times[8] == 1.0


def test_a_pitch_that_is_not_known_is_that_of_its_neighbours() -> None:
    rates = steady_rates(8.0, np.nan, 8.0, 16.0, 8.0)
    known = steady_rates(8.0, 8.0, 8.0, 8.0, 8.0)
    voiced = np.ones(5, bool)
    assert fitted_melodies(rates, voiced).tolist() == fitted_melodies(known, voiced).tolist()


@pytest.mark.parametrize("hz", [80, 100, 125])
@pytest.mark.parametrize("loudness", [1e-3, 1.0, 1e4])
def test_the_pitch_is_found_however_loud_the_voice_is(hz: int, loudness: float) -> None:
    voice = loudness * pulse_train(SAMPLE_RATE // hz, 0.5)
    found = pitch(voice, SAMPLE_RATE, np.arange(1200, 10_000, 480))
    np.testing.assert_allclose(found, hz, rtol=0.01)


def test_neither_noise_nor_silence_has_a_pitch() -> None:
    assert np.isnan(pitch(np.zeros(12_000), SAMPLE_RATE, np.array([3000, 6000]))).all()
    noise = np.random.default_rng(0).normal(size=12_000)
    assert np.isnan(pitch(noise, SAMPLE_RATE, np.array([3000, 6000]))).all()


@pytest.mark.parametrize("rate", [6.5, 8.0, 10.0])
def test_a_voice_is_as_loud_on_every_pitch(rate: float) -> None:
    mels, voicing = analysed(pulse_train(240, 1.0), on_its_tokens(a_word(2400.0, 21_600.0, 10)))
    melodies = fitted_melodies(steady_rates(*[rate] * 10), np.ones(10, bool))
    spoken = synthesised(mels, np.ones_like(voicing), melodies)[FRAME_SAMPLES:-FRAME_SAMPLES]
    level = synthesised(mels, np.ones_like(voicing), np.full(10, UNVOICED))
    assert float(spoken.std()) == pytest.approx(
        float(level[FRAME_SAMPLES:-FRAME_SAMPLES].std()), rel=0.05
    )


def test_vowels_give_way_before_plosives() -> None:
    burst, vowel = Part(0.0, 1920.0, 0.15), Part(1920.0, 5760.0, 1.0)
    times = on_its_tokens(Stretch((burst, vowel), 5))
    assert len(times) == 5 * COLUMNS_PER_FRAME
    assert (np.diff(times) > 0).all()
    in_burst = int((times < 1920).sum()) * COLUMN_SAMPLES
    assert 1920 < in_burst < 1920 * 5 / 3
    assert np.isnan(on_its_tokens(Stretch((), 1))).all()


def test_words_that_are_long_for_their_tokens_borrow_time_from_those_that_are_short() -> None:
    long, short = a_word(0.0, 6000.0, 2), a_word(6000.0, 11_000.0, 4)
    pause = Stretch((Part(11_000.0, 13_000.0, 1.0),), 1)
    borders = fitted_borders([Stretch((), 4), long, short, pause, a_word(13_000.0, 17_000.0, 2)])
    tokens = FRAME_SAMPLES * np.array([4.0, 6, 10, 11, 13])
    assert borders[0] == tokens[0]
    assert tokens[1] < borders[1] < tokens[1] + 2 * FRAME_SAMPLES
    assert borders[-1] <= tokens[-1]
    lengths = np.diff(borders)
    assert lengths[0] / 6000 > 0.85 > 2 * FRAME_SAMPLES / 6000
    assert lengths[1] / 5000 < 1.3 < 4 * FRAME_SAMPLES / 5000


def test_a_last_word_that_is_too_long_is_squeezed_rather_than_cut() -> None:
    words = [a_word(0.0, 3840.0, 2), a_word(3840.0, 11_840.0, 3)]
    borders = fitted_borders([Stretch((), 4), *words, Stretch((Part(11_840.0, 13_760.0, 1.0),), 1)])
    assert borders[2] == 9 * FRAME_SAMPLES
    assert borders[3] == 10 * FRAME_SAMPLES
    without_pause = fitted_borders([Stretch((), 4), *words])
    assert without_pause[2] <= 9 * FRAME_SAMPLES


def test_words_as_long_as_their_tokens_stay_where_they_are() -> None:
    words = [a_word(start, start + 3840.0, 2) for start in (0.0, 3840.0, 7680.0)]
    borders = fitted_borders([Stretch((), 4), *words])
    np.testing.assert_allclose(borders, FRAME_SAMPLES * np.array([4.0, 6, 8, 10]), atol=1e-6)


def test_predicted_frames_stand_where_they_are_about_the_true_sound() -> None:
    true = np.arange(3 * NUM_CODEBOOKS, dtype=np.uint8).reshape(3, NUM_CODEBOOKS)
    spoken = true + 1
    spoken[[0, 2], 0] = true[[0, 2], 0]
    expected = np.stack([spoken[0], true[1], spoken[2]])
    expected[:, NUM_STAGES] = true[:, NUM_STAGES]
    assert aligned(spoken, true).tolist() == expected.tolist()


def test_each_stage_of_the_codec_comes_nearer() -> None:
    torch.manual_seed(0)
    features = torch.randn(2000, 12) @ torch.randn(12, FRAME_FEATURES)
    features += torch.randn(2000, FRAME_FEATURES)
    codec = fit_codec(features)
    codes = codec.encode(features)
    assert codes.shape == (2000, NUM_STAGES)
    errors = [float((codec.decode(codes[:, :n]) - features).norm()) for n in (1, 2, 4, 15)]
    assert errors == sorted(errors, reverse=True)


def test_codes_chosen_together_are_nearer_than_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    components = torch.randn(500, 8, generator=generator)
    centroids = torch.randn(3, CODEBOOK_SIZE, 8, generator=generator)
    centroids *= torch.tensor([1.0, 0.3, 0.1])[:, None, None]

    def distance(codes: torch.Tensor) -> torch.Tensor:
        chosen = torch.stack([stage[code] for stage, code in zip(centroids, codes.T, strict=True)])
        return (components - chosen.sum(0)).pow(2).sum(1)

    residual, greedy = components, []
    for stage in centroids:
        greedy.append(torch.cdist(residual, stage).argmin(1))
        residual = residual - stage[greedy[-1]]
    together = chosen_codes(components, centroids)
    assert together[:, 0].equal(greedy[0])
    nearer = distance(torch.stack(greedy, 1)) - distance(together)
    assert nearer.mean() > 0
    assert (nearer > -1e-5).float().mean() > 0.95

    left = move_centroids(components, together, centroids)
    torch.testing.assert_close(left.pow(2).sum(1), distance(together), atol=1e-4, rtol=1e-4)
    assert left.norm() < 0.9 * residual.norm()


def test_a_codec_fitted_anew_keeps_what_its_codes_mean() -> None:
    torch.manual_seed(0)
    centres = 3 * torch.randn(CODEBOOK_SIZE, FRAME_FEATURES)
    features = centres.repeat(8, 1) + torch.randn(8 * CODEBOOK_SIZE, FRAME_FEATURES)
    old = fit_codec(features)
    shifted = features + 0.3 * torch.randn(FRAME_FEATURES)
    codes = old.encode(features)
    kept = (codes == fit_codec(shifted, start=old).encode(shifted)).float().mean(0)
    assert kept[0] > 0.95
    assert kept[1:4].min() > 0.5
    # A later stage can have most frames in one code, which two fits may number alike by chance.
    torch.manual_seed(1)
    anew = fit_codec(shifted).encode(shifted)
    assert (codes == anew).float().mean(0)[:4].max() < 0.1


def test_a_codec_of_other_features_is_refused(tmp_path: Path) -> None:
    codec = a_codec()
    save_codec(tmp_path / "codec.pt", codec)
    assert load_codec(tmp_path / "codec.pt").centroids.equal(codec.centroids)
    load_codec(SHIPPED_CODEC)
    content = load(tmp_path / "codec.pt")
    save(tmp_path / "lighter.pt", **{**content, "voicing_weight": 3.0})
    save_codec(tmp_path / "longer.pt", replace(codec, centroids=codec.centroids[[*range(15), 0]]))
    for name in ("lighter.pt", "longer.pt"):
        with pytest.raises(ValueError, match=r"must be \(12\.0, 15\)"):
            load_codec(tmp_path / name)


# ---- training ----------------------------------------------------------------------------------


def test_the_cosine_rises_and_ends_at_its_floor() -> None:
    cosine = Cosine(peak=1.0, steps=1000, warmup_steps=100, floor=0.02)
    rates = [cosine.at(step) for step in range(1001)]
    assert rates[0] < 0.02
    assert max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[100:] == sorted(rates[100:], reverse=True)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_a_muon_step_goes_equally_far_in_every_direction(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonal(matrices))
    assert singular.max() < 1.3
    assert singular.median() > 0.6


def test_a_muon_step_takes_a_convolution_as_one_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = torch.nn.Parameter(torch.zeros(8, 4, 7))
    kernel.grad = torch.randn(8, 4, 7, generator=generator)
    muon = Muon([kernel], scale=1.0, kernels=True)
    for group in muon.param_groups:
        group["lr"] = 1.0
    muon.step()
    singular = torch.linalg.svdvals(kernel.detach().flatten(1))
    assert singular.min() > 0.5 * singular.max() > 0


def trained(path: Path, name: str, stop_at: int) -> TrainingRun:
    """A model of one weight that learns to be the number of the step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.9))
    run = TrainingRun(path, name, model, {"adamw": adamw}, Cosine(0.1, 8, 2), stop_at=stop_at)
    while not run.is_done:
        loss = (model.weight - run.step).pow(2).sum()
        loss.backward()
        run.finish_step({"loss": loss.item()})
    return run


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    trained(tmp_path / "whole", "run", 8)
    for stop_at in (3, 3, 5, 8):
        assert trained(tmp_path / "parts", "run", stop_at).step == stop_at
    whole, parts = (load(tmp_path / name)["model"]["weight"] for name in ("whole", "parts"))
    assert torch.equal(whole, parts)


def test_another_run_takes_the_model_only(tmp_path: Path) -> None:
    trained(tmp_path / "state", "first", 8)
    weight = load(tmp_path / "state")["model"]["weight"]
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    adamw = torch.optim.AdamW(model.parameters())
    run = TrainingRun(tmp_path / "state", "second", model, {"adamw": adamw}, Cosine(0.1, 8, 2))
    assert run.step == 0
    assert torch.equal(model.weight, weight)
    assert not adamw.state_dict()["state"]


def an_utterance(tokenizer: Tokenizer, text: str) -> Utterance:
    ids = np.array(tokenizer.encode(text).ids)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, CODEBOOK_SIZE, (DELAY_FRAMES + len(ids) + TAIL_FRAMES, NUM_CODEBOOKS))
    return Utterance(text, ids, codes.astype(np.uint8))


def a_model(tokenizer: Tokenizer) -> SpeechModel:
    model = SpeechModel(tokenizer)
    model.init(tokenizer, a_codec(), seed=0)
    return model


def a_codec() -> Codec:
    generator = torch.Generator().manual_seed(0)
    centroids = torch.randn(NUM_STAGES, CODEBOOK_SIZE, NUM_COMPONENTS, generator=generator)
    projection = torch.eye(FRAME_FEATURES)[:, :NUM_COMPONENTS]
    return Codec(torch.zeros(FRAME_FEATURES), projection, centroids)


def test_code2wav_begins_with_speech_that_is_neither_silent_nor_clipped(
    tokenizer: Tokenizer,
) -> None:
    torch.manual_seed(0)
    model = new_code2wav(tokenizer)
    sample = torch.randint(CODEBOOK_SIZE, (2, NUM_CODEBOOKS, 12))
    init_code2wav(model, a_codec(), sample)
    with torch.no_grad():
        loudness = model(sample).std()
    assert 0.01 < loudness < 0.5


def test_decoders_compute_what_those_of_transformers_do(tokenizer: Tokenizer) -> None:
    talker = a_model(tokenizer).talker.eval()
    hidden = torch.randn(2, 11, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, _ = moe_decoder(talker.model, hidden)
        theirs = talker.model(inputs_embeds=hidden).last_hidden_state
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        predictor = talker.code_predictor.model
        theirs = predictor(inputs_embeds=hidden).last_hidden_state
        torch.testing.assert_close(dense_decoder(predictor, hidden), theirs, atol=2e-5, rtol=1e-4)


def test_the_talker_is_prompted_as_generate_prompts_it(tokenizer: Tokenizer) -> None:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model = a_model(tokenizer)
    whole = Qwen3OmniMoeForConditionalGeneration(parrot_config(tokenizer)).eval()
    whole.talker.load_state_dict(model.talker.state_dict())
    whole.thinker.model.embed_tokens.weight.data = model.text_embedding.weight.data.clone()
    prompts: list[torch.Tensor] = []
    whole.talker.model.register_forward_pre_hook(
        lambda module, args, kwargs: prompts.append(kwargs["inputs_embeds"].detach().clone()),
        with_kwargs=True,
    )
    ids = TextIds.of(tokenizer)
    user = ids.turn(ids.user, tokenizer.encode("Hello there.").ids)
    prompt = [*user, ids.im_start, ids.assistant, ids.newline]
    sequence, _ = whole.generate(
        input_ids=torch.tensor([prompt]),
        speaker="Ethan",
        thinker_max_new_tokens=6,
        talker_max_new_tokens=3,
        thinker_do_sample=False,
        talker_do_sample=False,
    )
    answer = sequence[0, len(prompt) :].tolist()
    spoken = [token for token in answer if token != ids.im_end][: 6 - (ids.im_end not in answer)]
    line = Line(user, np.array(spoken), np.zeros((9, NUM_CODEBOOKS), np.uint8), SPEAKERS["ethan"])
    batch = Script([], tokenizer, seed=0).batch([line])
    with torch.no_grad():
        ours = model.embed(batch.text, batch.control, batch.frames)[:, : line.prompt_length]
    torch.testing.assert_close(ours, prompts[0], atol=1e-5, rtol=1e-4)


def test_a_frame_is_the_target_of_the_position_before_it(tokenizer: Tokenizer) -> None:
    utterance = an_utterance(tokenizer, "the thin cat.")
    script = Script([utterance], tokenizer, seed=0)
    line = script.plain_line(utterance)
    batch = script.batch([line])
    row, position = (batch.target >= 0).nonzero(as_tuple=True)
    assert len(row) == len(utterance.codes) + 1
    assert batch.target[row[:-1], position[:-1]].tolist() == utterance.codes[:, 0].tolist()
    assert batch.frames[row[:-1], position[:-1] + 1].tolist() == utterance.codes.tolist()


# ---- the gate ----------------------------------------------------------------------------------


def test_word_errors_are_counted_in_words() -> None:
    assert word_errors("My favorite number is twenty seven.", "my favourite number: twenty-seven")
    assert word_errors("The cat sat.", "the cat sat") == 0
    assert word_errors("The cat sat.", "a cat sat down") == 2


class HearsACat:
    """Hears the same in all that is loud, and keeps it."""

    def __init__(self) -> None:
        self.speeches: list[np.ndarray] = []

    def words_of(self, speech: np.ndarray) -> str:
        self.speeches.append(speech)
        return "The cat sat."


def test_every_sentence_is_heard_equally_loud_between_silences(tmp_path: Path) -> None:
    waves = [loudness * pulse_train(240, 1.0) for loudness in (0.01, 1.0)]
    voice = Voice("a voice", ["The cat sat.", "A cat sat down."], waves, [True, True])
    recogniser = HearsACat()
    errors = sentence_errors(voice, recogniser, tmp_path / "heard.tsv")
    assert errors.tolist() == [0, 2]
    quiet, loud = recogniser.speeches
    np.testing.assert_allclose(quiet, loud, atol=1e-4)
    assert np.abs(loud).max() == pytest.approx(0.6)
    assert not loud[:8000].any()
    assert not loud[-8000:].any()
    second = (tmp_path / "heard.tsv").read_text().splitlines()[1]
    assert second == "2\tA cat sat down.\tThe cat sat."


def test_warping_finds_the_slower_reading_of_the_same_text() -> None:
    rng = np.random.default_rng(0)
    references = [rng.normal(size=(n, 64)).astype(np.float32) for n in (30, 42, 35)]
    for index, reference in enumerate(references):
        slower = np.repeat(reference, 2, axis=0) + 0.1 * rng.normal(size=(2 * len(reference), 64))
        distances = warped_distances(slower.astype(np.float32), references)
        assert int(distances.argmin()) == index
        assert warped_distances(reference, references)[index] == pytest.approx(0, abs=1e-4)


def test_a_pitch_is_a_semitone_away_from_the_next() -> None:
    low, high = pulse_train(254, 1.0), pulse_train(240, 1.0)
    assert pitch_distance(low, low) == 0
    assert pitch_distance(low, high) == pytest.approx(1.0, abs=0.1)
    assert np.isnan(pitch_distance(low, np.zeros_like(low)))


def test_a_voice_that_is_cut_off_does_not_end_cleanly() -> None:
    loud = pulse_train(240, 1.0)
    assert not ends_cleanly(loud)
    assert ends_cleanly(np.concatenate([loud, np.zeros(2400, np.float32)]))


def test_a_checkpoint_comes_apart_into_what_it_is_put_together_from(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    take_apart(SHIPPED, workspace)
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    again = assembled_model(workspace, tokenizer).state_dict()
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(SHIPPED, dtype="auto")
    shipped = model.state_dict()
    assert again.keys() == shipped.keys()
    for name, weight in shipped.items():
        assert torch.equal(again[name], weight), name
    assert workspace.tokenizer.read_text() == (SHIPPED / "tokenizer.json").read_text()
    with pytest.raises(FileExistsError, match=r"tokenizer\.json"):
        take_apart(SHIPPED, workspace)
    workspace.tokenizer.unlink()
    with pytest.raises(FileExistsError, match=r"talker\.pt"):
        take_apart(SHIPPED, workspace)
