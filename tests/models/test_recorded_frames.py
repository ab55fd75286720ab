"""Recorded frames are those of single steps, to the bit, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.engine.recorded_frames import MOST_RECORDS, SLOW_CALLS, RecordedFrames
from stretto.engine.sampler import Draw, DrawPlan, new_generator
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.recording import Frame, Recorder, Run, trace
from stretto.request import SamplingParams
from tests.models.small import CPU, MAX_ROWS

pytestmark = pytest.mark.usefixtures("no_gradients")

GREEDY = SamplingParams(temperature=0.0)
WIDE = SamplingParams(temperature=0.9, top_k=50)
NARROW = SamplingParams(temperature=1.3, top_k=50, top_p=0.8, min_p=0.01)
FEW = SamplingParams(temperature=1.0, top_k=5)


def again(run: Run, inputs: Sequence[Tensor]) -> Run:
    """What graphs of a device do: the same once more, on tensors of their own."""
    graphs: dict[int, tuple[list[Tensor], Frame]] = {}

    def replay(*given: Tensor) -> Frame:
        own, outputs = graphs.setdefault(
            len(given[0]), ([tensor.clone() for tensor in given], run(*given))
        )
        for mine, new in zip(own, given, strict=True):
            mine.copy_(new)
        codes, total = run(*own)
        return outputs[0].copy_(codes), outputs[1].copy_(total)

    return replay


class Speaker:
    """Frames of a talker, recorded and not."""

    def __init__(self, talker: Talker, record: Recorder) -> None:
        self.talker = talker
        self.recorded = RecordedFrames(talker.predictor, record)
        self.plain = RecordedFrames(talker.predictor, None)

    def check(self, params: list[SamplingParams], seed: int) -> None:
        talker, rows = self.talker, len(params)
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(rows, 256, generator=generator)
        first = talker.codec_rows(torch.randint(0, 2048, (rows,), generator=generator))
        steps = talker.spec.num_codebooks - 1
        frames = []
        for speaker in (self.recorded, self.plain):
            plan = a_plan(talker, params, seed)
            frames.append(speaker.generate(hidden, first, plan, plan.noise(steps)))
        (codes, total), (expected_codes, expected_total) = frames
        assert torch.equal(codes, expected_codes)
        assert torch.equal(total, expected_total)

    def prepare_all(self) -> int:
        pieces = 0
        while self.recorded.prepare():
            pieces += 1
        return pieces


def a_plan(talker: Talker, params: list[SamplingParams], seed: int) -> DrawPlan:
    draws = [
        Draw(own, None if own.greedy else new_generator(seed + row, CPU))
        for row, own in enumerate(params)
    ]
    return DrawPlan(draws, talker.spec.codebook_size, CPU)


@pytest.mark.parametrize("record", [trace, again])
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(
    batches=st.lists(
        st.lists(st.sampled_from([GREEDY, WIDE, NARROW, FEW]), min_size=1, max_size=MAX_ROWS),
        min_size=1,
        max_size=2,
    )
)
def test_recorded_frames_are_those_of_single_steps(
    talker: Talker, record: Recorder, batches: list[list[SamplingParams]]
) -> None:
    speaker = Speaker(talker, record)
    for params in batches:
        speaker.check(params, seed=0)
    speaker.prepare_all()
    for seed in (1, 2, 3):
        for params in batches:
            speaker.check(params, seed)


@pytest.mark.parametrize("record", [trace, again])
def test_a_record_holds_for_any_number_of_rows_and_other_values(
    talker: Talker, record: Recorder
) -> None:
    speaker = Speaker(talker, record)
    assert speaker.prepare_all() == 0
    speaker.check([WIDE, WIDE], seed=0)
    # The first is the warm-up's and is recorded at once.
    assert (speaker.recorded.num_records, speaker.prepare_all()) == (1, 0)
    for rows in range(1, MAX_ROWS + 1):
        speaker.check([SamplingParams(temperature=0.3, top_k=50)] * rows, seed=rows)
    assert speaker.prepare_all() == 0
    speaker.check([WIDE, FEW], seed=0)
    assert speaker.prepare_all() == 1 + SLOW_CALLS
    assert speaker.recorded.num_records == 2


def test_a_record_is_used_when_its_slow_calls_are_done(talker: Talker) -> None:
    calls = 0

    def counted(run: Run, inputs: Sequence[Tensor]) -> Run:
        def call(*given: Tensor) -> Frame:
            nonlocal calls
            calls += 1
            return run(*given)

        return call

    speaker = Speaker(talker, counted)
    speaker.check([WIDE], seed=0)
    # The warm-up's frame, which was waited for.
    assert calls == SLOW_CALLS + 1
    speaker.check([FEW], seed=0)
    for piece in range(1 + SLOW_CALLS):
        speaker.check([FEW], seed=piece)
        assert calls == SLOW_CALLS + 1 + max(0, piece - 1)
        assert speaker.recorded.prepare()
    calls = 0
    speaker.check([FEW], seed=0)
    assert calls == 1
    assert not speaker.recorded.prepare()


def test_records_are_not_without_number(talker: Talker) -> None:
    speaker = Speaker(talker, lambda run, inputs: run)
    for top_k in range(1, 2 * MOST_RECORDS):
        speaker.check([SamplingParams(temperature=1.0, top_k=top_k)], seed=top_k)
        speaker.prepare_all()
    assert speaker.recorded.num_records == MOST_RECORDS


def test_without_a_recorder_nothing_is_recorded(talker: Talker) -> None:
    plain = Speaker(talker, again).plain
    plan = a_plan(talker, [GREEDY], seed=0)
    hidden = torch.zeros(1, 256)
    plain.generate(hidden, hidden, plan, plan.noise(talker.spec.num_codebooks - 1))
    assert not plain.prepare()
