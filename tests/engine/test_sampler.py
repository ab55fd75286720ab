"""Draws follow transformers' distributions, and nobody's draw depends on who stands beside."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stretto.engine.sampler import Sampler
from stretto.request import SamplingParams

CPU = torch.device("cpu")
VOCAB = 23
NUM_ROWS = 2000

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.9, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
)


def a_sampler(
    params: list[SamplingParams],
    *,
    prompts: list[list[int]] | None = None,
    seeds: list[int] | None = None,
    suppressed: Tensor | None = None,
    vocab: int = VOCAB,
) -> Sampler:
    """Row i is that of request i."""
    sampler = Sampler(max_rows=len(params), vocab_size=vocab, device=CPU, suppressed=suppressed)
    for row, own in enumerate(params):
        seed = row if seeds is None else seeds[row]
        sampler.admit(row, own, seed=seed, prompt=[] if prompts is None else prompts[row])
    return sampler


def logits_of(seed: int, rows: int, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


def reference(
    logits: Tensor, params: SamplingParams, seen: list[int], suppressed: list[int]
) -> Tensor:
    """Probabilities [V] by transformers' own processors, in the order of its `generate`."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if suppressed:
        processors.append(SuppressTokensLogitsProcessor(suppressed, device="cpu"))
    if not params.greedy:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.tensor([seen], dtype=torch.int64)
    scores: Any = logits.clone()[None]
    return processors(cast(Any, ids), scores)[0].softmax(-1)


@settings(max_examples=40)
@given(sampling, st.integers(0, 1000), st.booleans())
def test_ids_are_drawn_as_often_as_transformers_would(
    params: SamplingParams, seed: int, suppress: bool
) -> None:
    seen, banned = [1, 1, 5, 9], [2, 3] if suppress else []
    suppressed = torch.zeros(VOCAB, dtype=torch.bool)
    suppressed[banned] = True
    logits = logits_of(seed, 1)
    expected = reference(logits[0], params, seen, banned)
    sampler = a_sampler(
        [params] * NUM_ROWS, prompts=[seen] * NUM_ROWS, suppressed=suppressed if banned else None
    )
    ids = sampler.sample(logits.repeat(NUM_ROWS, 1), list(range(NUM_ROWS)))
    drawn = torch.bincount(ids, minlength=VOCAB)
    assert not drawn[expected == 0].any(), "what transformers cuts off is never drawn"
    # Five standard deviations: the seeds are fixed, so this holds on every run or on none.
    deviation = (expected * (1 - expected) * NUM_ROWS).sqrt()
    assert ((drawn - expected * NUM_ROWS).abs() <= 5 * deviation + 3).all()


@pytest.mark.parametrize("penalty", [1.05, 1.5, 0.8])
def test_greedy_with_a_repetition_penalty_is_transformers_token_for_token(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    prompts = [[3, 4], [], [5, 5, 6]]
    banned = [0, 20]
    suppressed = torch.zeros(VOCAB, dtype=torch.bool)
    suppressed[banned] = True
    sampler = a_sampler([params] * 3, prompts=prompts, suppressed=suppressed)
    seen = [list(prompt) for prompt in prompts]
    for step in range(40):
        logits = logits_of(step % 3, 3)
        expected = [
            int(reference(row, params, ids, banned).argmax())
            for row, ids in zip(logits, seen, strict=True)
        ]
        assert sampler.sample(logits.clone(), [0, 1, 2]).tolist() == expected
        for ids, token in zip(seen, expected, strict=True):
            ids.append(token)


def test_presence_and_frequency_count_what_was_output_and_not_the_prompt() -> None:
    base = torch.tensor([[2.0, 1.5, 0.7, 0.0]])
    presence = a_sampler([SamplingParams(presence_penalty=1.0)], prompts=[[0]], vocab=4)
    assert [int(presence.sample(base.clone(), [0])) for _ in range(4)] == [0, 1, 0, 0]
    frequency = a_sampler([SamplingParams(frequency_penalty=0.6)], prompts=[[0]], vocab=4)
    drawn = [int(frequency.sample(base.clone(), [0])) for _ in range(6)]
    # By then the counts have brought 2.0 down to 0.2 and 1.5 to 0.3.
    assert drawn == [0, 1, 0, 1, 0, 2]


mixed = st.lists(
    st.one_of(
        sampling,
        st.builds(
            SamplingParams,
            repetition_penalty=st.sampled_from([1.0, 1.2]),
            presence_penalty=st.sampled_from([0.0, 1.0]),
        ),
        st.builds(
            SamplingParams,
            temperature=st.just(0.8),
            frequency_penalty=st.sampled_from([-1.0, 0.7]),
            min_tokens=st.just(3),
            stop_token_ids=st.just((4, 7)),
        ),
    ),
    min_size=2,
    max_size=6,
)


def assert_alone_as_in_a_batch(
    params: list[SamplingParams], logits: list[Tensor], joins: list[int]
) -> None:
    """`joins[i]` is the step from which on request i is in the batch."""
    prompts = [[row, row + 1] for row in range(len(params))]
    together = a_sampler(params, prompts=prompts, seeds=[7] * len(params))
    drawn: list[list[int]] = [[] for _ in params]
    for step, at_step in enumerate(logits):
        rows = [row for row in range(len(params)) if step >= joins[row]]
        if rows:
            ids = together.sample(at_step[rows].clone(), rows).tolist()
            for row, token in zip(rows, ids, strict=True):
                drawn[row].append(token)
    for row, own in enumerate(params):
        alone = a_sampler([own], prompts=[prompts[row]], seeds=[7])
        mine = [int(alone.sample(x[row : row + 1].clone(), [0])) for x in logits[joins[row] :]]
        assert mine == drawn[row], own


@settings(max_examples=150)
@given(mixed, st.integers(0, 1000), st.data())
def test_a_seed_gives_one_answer_alone_or_among_others(
    params: list[SamplingParams], seed: int, data: st.DataObject
) -> None:
    joins = [data.draw(st.integers(0, 4)) for _ in params]
    assert_alone_as_in_a_batch(
        params, [logits_of(seed * 10 + step, len(params)) for step in range(8)], joins
    )


@settings(max_examples=100)
@given(mixed, st.integers(0, 1000))
def test_it_does_so_when_logits_are_equal_as_those_of_bfloat16_often_are(
    params: list[SamplingParams], seed: int
) -> None:
    logits = [(logits_of(seed * 10 + step, len(params), 400) / 3).round() for step in range(4)]
    prompts = [[row, row + 1] for row in range(len(params))]
    together = a_sampler(params, prompts=prompts, vocab=400)
    drawn = [together.sample(x.clone(), list(range(len(params)))).tolist() for x in logits]
    for row, own in enumerate(params):
        alone = a_sampler([own], prompts=[prompts[row]], seeds=[row], vocab=400)
        mine = [int(alone.sample(x[row : row + 1].clone(), [0])) for x in logits]
        assert mine == [ids[row] for ids in drawn], own


def test_another_seed_gives_another_answer_and_the_same_one_the_same() -> None:
    params = SamplingParams(temperature=1.0)

    def answer(seed: int) -> list[int]:
        sampler = a_sampler([params], seeds=[seed])
        return [int(sampler.sample(logits_of(step, 1), [0])) for step in range(20)]

    assert answer(1) == answer(1)
    assert len({tuple(answer(seed)) for seed in range(10)}) == 10


def test_a_row_forgets_who_had_it_before() -> None:
    heavy = SamplingParams(
        repetition_penalty=1.5, presence_penalty=2.0, min_tokens=9, stop_token_ids=(1,)
    )
    used = a_sampler([heavy], prompts=[[0, 1, 2]])
    for step in range(5):
        used.sample(logits_of(step, 1), [0])
    for params in (SamplingParams(), heavy, SamplingParams(temperature=0.7)):
        used.admit(0, params, seed=3, prompt=[4])
        fresh = a_sampler([params], prompts=[[4]], seeds=[3])
        for step in range(6):
            x = logits_of(step, 1)
            assert used.sample(x.clone(), [0]).tolist() == fresh.sample(x.clone(), [0]).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_is_drawn_before_the_least_number_of_tokens(temperature: float) -> None:
    ends = (3, 4)
    params = SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=ends)
    sampler = a_sampler([params])
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, list(ends)] = 20.0
    drawn = [int(sampler.sample(logits.clone(), [0])) for _ in range(8)]
    assert not set(drawn[:5]) & set(ends)
    assert set(drawn[5:]) <= set(ends)


def test_what_is_suppressed_is_never_drawn_whatever_its_logit() -> None:
    suppressed = torch.arange(VOCAB) >= 3
    params = [SamplingParams(), SamplingParams(temperature=50.0), SamplingParams(temperature=1.0)]
    sampler = a_sampler(params, suppressed=suppressed)
    for step in range(200):
        logits = logits_of(step, 3)
        logits[:, 3:] += 100
        assert int(sampler.sample(logits, [0, 1, 2]).max()) < 3


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-36, 1e-38, 1e-44, 1e-300])
def test_a_temperature_near_zero_is_as_good_as_greedy(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature), SamplingParams()]
    sampler = a_sampler(params)
    for step in range(30):
        row = logits_of(step, 1) + 10
        nearly, greedy = sampler.sample(row.repeat(2, 1), [0, 1]).tolist()
        assert nearly == greedy


@pytest.mark.parametrize(
    "given_fields",
    [
        {"stop_token_ids": (VOCAB,), "min_tokens": 1},
        {"stop_token_ids": (10**6,), "min_tokens": 1},
        {"stop_token_ids": (2**63,)},
    ],
)
def test_a_stop_id_that_the_vocabulary_has_not_does_no_harm(given_fields: dict[str, Any]) -> None:
    sampler = a_sampler([SamplingParams(**given_fields)])
    sampler.sample(logits_of(0, 1), [0])
