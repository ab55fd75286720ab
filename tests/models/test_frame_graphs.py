"""Frames from recorded steps: the same codes as without, whoever comes and goes.

The recording itself needs a device. Here a record is a function that is called again on the tensors
that were recorded, which is what a graph does.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.frame_graphs import Frame, FrameGraphs, Run, generate_frame
from stretto.engine.sampler import Draw, DrawPlan, new_generator
from stretto.models.qwen3_omni.talker import Talker
from stretto.request import SamplingParams
from tests.models.small import CPU, MAX_ROWS

pytestmark = pytest.mark.usefixtures("no_gradients")

GREEDY = SamplingParams(temperature=0.0)
WIDE = SamplingParams(temperature=0.9, top_k=50)
NARROW = SamplingParams(temperature=1.3, top_k=50, top_p=0.8, min_p=0.01)
FEW = SamplingParams(top_k=5)


def again(run: Run) -> Run:
    codes, total = run()

    def replay() -> Frame:
        new_codes, new_total = run()
        return codes.copy_(new_codes), total.copy_(new_total)

    return replay


def a_plan(talker: Talker, params: list[SamplingParams], seed: int) -> DrawPlan:
    draws = [
        Draw(own, None if own.greedy else new_generator(seed + row, CPU))
        for row, own in enumerate(params)
    ]
    return DrawPlan(draws, talker.spec.codebook_size, CPU)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([GREEDY, WIDE, NARROW, FEW]), min_size=1, max_size=MAX_ROWS),
        min_size=1,
        max_size=5,
    )
)
def test_recorded_frames_are_those_that_were_not_recorded(
    talker: Talker, batches: list[list[SamplingParams]]
) -> None:
    graphs = FrameGraphs(talker.predictor, again)
    shapes = set()
    for seed, params in enumerate([*batches, *batches]):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(len(params), 256, generator=generator)
        first = talker.codec_rows(torch.randint(0, 2048, (len(params),), generator=generator))
        plan, same_plan = (a_plan(talker, params, seed) for _ in range(2))
        steps = talker.spec.num_codebooks - 1
        codes, total = graphs.generate(hidden, first, plan, plan.noise(steps))
        expected = generate_frame(
            talker.predictor, hidden, first, same_plan, same_plan.noise(steps)
        )
        assert torch.equal(codes, expected[0])
        assert torch.equal(total, expected[1])
        shapes.add(plan.shape)
    assert graphs.num_recorded == len(shapes)


def test_a_plan_is_recorded_once_for_all_values_of_its_parameters(talker: Talker) -> None:
    graphs = FrameGraphs(talker.predictor, again)
    hidden = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    first = talker.codec_rows(torch.tensor([7]))
    for temperature in (0.5, 0.7, 1.5):
        plan = a_plan(talker, [SamplingParams(temperature=temperature, top_k=20)], seed=1)
        graphs.generate(hidden, first, plan, plan.noise(talker.spec.num_codebooks - 1))
    assert graphs.num_recorded == 1
