"""Talker and code predictor, held to transformers' `generate`: prompt rows, codes, sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configurations
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference_models

from stretto.bridges.thinker_to_talker import ThinkerToTalker
from stretto.config.deployment import EdgeConfig
from stretto.engine.ar_runner import TalkerRunner
from stretto.engine.recorded_frames import RecordedFrames
from stretto.engine.sampler import Sampler
from stretto.engine.scheduler import Admission, ARBatch, ScheduledRows
from stretto.models.code_predictor import CodePredictor
from stretto.models.decoder import DecoderConfig, DenseConfig, KVCache
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.recording import trace
from stretto.payloads import SpokenTokens, TextStep, ThinkerPrompt
from stretto.request import NO_CODEC, Place, SamplingParams, SpeechOptions, StageRequest
from tests.models.small import CPU, MAX_ROWS, load, save_as, scatter

pytestmark = pytest.mark.usefixtures("no_gradients")


def greedy(logits: Tensor, step: int) -> Tensor:
    return logits.argmax(-1)


# ---- the code predictor --------------------------------------------------------------------------


def reference_codes(predictor: Any, hidden: Tensor, first: Tensor) -> list[int]:
    """Codes of one frame by transformers, as its Talker asks for them."""
    result = predictor.generate(
        inputs_embeds=torch.stack((hidden, first))[None],
        max_new_tokens=len(predictor.lm_head),
        do_sample=False,
    )
    return [int(code) for code in result[0]]


@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
def test_residual_codes_are_transformers_for_every_row_of_a_batch(
    talker: Talker, tiny_reference: Any, num_rows: int
) -> None:
    predictor = tiny_reference.talker.code_predictor
    for round_ in range(3):
        generator = torch.Generator().manual_seed(round_)
        hidden = torch.randn(num_rows, 256, generator=generator)
        code0 = torch.randint(0, 2048, (num_rows,), generator=generator)
        first = talker.codec_rows(code0)
        codes, total = talker.predictor.generate(hidden, first, greedy)
        for row in range(num_rows):
            assert codes[row].tolist() == reference_codes(predictor, hidden[row], first[row])
        tables = predictor.get_input_embeddings()
        parts = [table(codes[:, at]) for at, table in enumerate(tables)]
        assert torch.allclose(total, first + torch.stack(parts).sum(0), atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_codebooks", [2, 3, 8])
def test_a_code_predictor_of_any_shape_is_transformers(
    num_kv_heads: int, num_codebooks: int, tmp_path: Path
) -> None:
    config = configurations.Qwen3OmniMoeTalkerCodePredictorConfig(
        vocab_size=30, hidden_size=40, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=num_kv_heads, head_dim=16,
        num_code_groups=num_codebooks, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model: Any = reference_models.Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration(
        config
    )
    model.eval()
    scatter(model, seed=4)
    save_as(tmp_path, model, "part.")
    own = DecoderConfig(
        hidden_size=40, num_layers=2, num_heads=4, num_kv_heads=num_kv_heads, head_dim=16,
        rms_norm_eps=config.rms_norm_eps, rope_theta=1e4, max_positions=64,
        mlp=DenseConfig(intermediate_size=24),
    )  # fmt: skip
    predictor = load(
        tmp_path,
        lambda source: CodePredictor(
            source, "part", own, num_codebooks=num_codebooks, codebook_size=30
        ),
    )
    for num_rows in (5, 1, 4):
        generator = torch.Generator().manual_seed(num_rows)
        hidden = torch.randn(num_rows, 40, generator=generator)
        first = torch.randn(num_rows, 40, generator=generator)
        codes, _ = predictor.generate(hidden, first, greedy)
        for row in range(num_rows):
            expected = reference_codes(model, hidden[row], first[row])
            assert codes[row].tolist() == expected


# ---- the Talker's prompt -------------------------------------------------------------------------

TALKS = {
    "one question": [("user", "Is it me?")],
    "a system prompt": [("system", "Be kind."), ("user", "Hello there.")],
    "several turns": [
        ("system", "Be brief, and kind."),
        ("user", "Who was here yesterday?"),
        ("assistant", "Nobody that I know of."),
        ("user", "And today?"),
    ],
    "two questions": [("user", "First."), ("user", "Second, a longer one.")],
    "an answer first": [("assistant", "Hello!"), ("user", "Hello yourself.")],
}


def prompt_of(tokenizer: Any, talk: list[tuple[str, str]]) -> list[int]:
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in talk)
    ids = tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False).ids
    return list(ids)


class Overheard(Exception):
    """Ends transformers' generate where the Talker would begin."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs


def reference_inputs(
    reference: Any, prompt: list[int], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Tensor, Tensor]:
    """The Thinker's tokens, and what transformers hands its Talker: prompt rows, trailing text."""
    heard: dict[str, Any] = {}

    def listen(**kwargs: Any) -> None:
        raise Overheard(kwargs)

    thinker_generate = reference.thinker.generate

    def think(*args: Any, **kwargs: Any) -> Any:
        heard["text"] = thinker_generate(*args, **kwargs)
        return heard["text"]

    with monkeypatch.context() as patched:
        patched.setattr(reference.talker, "generate", listen)
        patched.setattr(reference.thinker, "generate", think)
        with pytest.raises(Overheard) as overheard:
            reference.generate(
                input_ids=torch.tensor([prompt]),
                speaker="Chelsie",
                thinker_max_new_tokens=num_tokens,
                thinker_do_sample=False,
                thinker_eos_token_id=reference.config.im_end_token_id,
            )
    given = overheard.value.kwargs
    answer = heard["text"].sequences[0, len(prompt) :].tolist()
    return answer, given["inputs_embeds"][0], given["trailing_text_hidden"][0]


@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS.keys())
@pytest.mark.parametrize("streaming", [True, False])
def test_the_talker_hears_and_speaks_the_rows_that_transformers_gives_its_own(
    talker: Talker,
    tiny_spec: OmniSpec,
    tiny_reference: Any,
    tiny_tokenizer: Any,
    talk: list[tuple[str, str]],
    streaming: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = prompt_of(tiny_tokenizer, talk)
    answer, prompt_rows, trailing = reference_inputs(tiny_reference, prompt, 9, monkeypatch)
    edge = EdgeConfig(from_stage="thinker", to_stage="talker")
    bridge = ThinkerToTalker(tiny_spec, edge, async_chunk=streaming)
    request = a_ticket("r", prompt=tuple(prompt), speaker="chelsie")
    stream, inbox = bridge.open(request), bridge.inbox(request)
    steps = [
        TextStep(len(prompt) if at == 0 else 0, token, "length" if at == 8 else None)
        for at, token in enumerate(answer)
    ]
    for payload in [*(p for step in steps for p in stream.push(step)), *stream.finish()]:
        inbox.push(payload)
    inbox.end()
    assert inbox.prompt_length == len(prompt_rows)
    rows = talker.text_rows[torch.tensor(inbox.text_ids(0, len(prompt_rows)))].clone()
    codec_ids = torch.tensor(inbox.codec_ids(0, len(prompt_rows)))
    rows[codec_ids != NO_CODEC] += talker.codec_rows(codec_ids[codec_ids != NO_CODEC])
    assert torch.allclose(rows, prompt_rows, atol=1e-5)
    beyond = len(prompt_rows) + len(trailing)
    spoken = talker.text_rows[torch.tensor(inbox.text_ids(len(prompt_rows), beyond))]
    assert torch.allclose(spoken, trailing, atol=1e-5)


# ---- frames --------------------------------------------------------------------------------------


def a_ticket(
    request_id: str,
    *,
    prompt: tuple[int, ...] = (),
    speaker: str = "ethan",
    sampling: SamplingParams | None = None,
) -> StageRequest:
    return StageRequest(
        request_id=request_id,
        sampling=sampling or SamplingParams(repetition_penalty=1.05, seed=1),
        max_positions=200,
        prompt_token_ids=prompt,
        speech=SpeechOptions(
            speaker=speaker,
            initial_codec_chunk_frames=1,
            residual_sampling=SamplingParams(temperature=1.0, top_k=50, top_p=0.8),
        ),
    )


class Speaker:
    """A Talker at work on requests whose text is all there."""

    def __init__(self, talker: Talker, spec: OmniSpec, *, suppressed: Tensor | None = None) -> None:
        self._spec = spec
        cache = KVCache(
            talker.decoder.config, num_blocks=100, block_size=16, dtype=torch.float32, device=CPU
        )
        sampler = Sampler(
            max_rows=MAX_ROWS, vocab_size=spec.talker.vocab_size, device=CPU,
            suppressed=talker.suppressed if suppressed is None else suppressed,
        )  # fmt: skip
        self.runner = TalkerRunner(
            talker,
            cache,
            sampler,
            max_rows=MAX_ROWS,
            stage_id=1,
            frames=RecordedFrames(talker.predictor, trace),
        )
        self._at: dict[str, int] = {}
        self._inboxes: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        self._admitted: tuple[Admission, ...] = ()

    def open(
        self, name: str, user: list[int], spoken: list[int], sampling: SamplingParams | None = None
    ) -> None:
        """Admits a request and runs its prompt; it then has drawn its first token."""
        bridge = ThinkerToTalker(
            self._spec, EdgeConfig(from_stage="a", to_stage="b"), async_chunk=True
        )
        request = a_ticket(name, sampling=sampling)
        inbox = bridge.inbox(request)
        inbox.push(ThinkerPrompt(np.array(user, np.int32), np.array([5, 6, 7], np.int32)))
        inbox.push(SpokenTokens(np.array(spoken, np.int32)))
        inbox.end()
        row = len(self._places)
        place = Place(row, row * 12, 12)
        self._places[name], self._inboxes[name], self._at[name] = place, inbox, 0
        self._admitted = (Admission(request, place),)

    def step(self, *names: str) -> Any:
        """The pending output of a step of these requests, prompt or decode."""
        items = []
        for name in names:
            start, inbox = self._at[name], self._inboxes[name]
            in_prompt = start == 0
            count = inbox.prompt_length if in_prompt else 1
            self._at[name] += count
            items.append(
                ScheduledRows(name, self._places[name], start, count, count if in_prompt else 0,
                              True, inbox)
            )  # fmt: skip
        admitted, self._admitted = self._admitted, ()
        return self.runner.execute(ARBatch(admitted, tuple(items)))


def frames_alone(
    talker: Talker, spec: OmniSpec, name: str, user: list[int], spoken: list[int], count: int,
    sampling: SamplingParams | None = None,
) -> list[list[int]]:  # fmt: skip
    speaker = Speaker(talker, spec)
    speaker.open(name, user, spoken, sampling)
    return [speaker.step(name).materialize().frames[0].tolist() for _ in range(count)]


TALK_A, TALK_B = ([11, 12, 13], [21, 22, 23, 24]), ([31] * 9, [41, 42])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.05, seed=1),
        SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=1),
    ],
    ids=["greedy", "sampled"],
)
def test_a_frame_does_not_depend_on_who_else_speaks(
    talker: Talker, tiny_spec: OmniSpec, sampling: SamplingParams
) -> None:
    alone_a = frames_alone(talker, tiny_spec, "a", *TALK_A, 8, sampling)
    alone_b = frames_alone(talker, tiny_spec, "b", *TALK_B, 5, sampling)
    speaker = Speaker(talker, tiny_spec)
    speaker.open("a", *TALK_A, sampling)
    got: dict[str, list[list[int]]] = {"a": [], "b": []}
    for at in range(8):
        names = ["a"] if at < 3 else ["a", "b"] if at % 2 else ["b", "a"]
        if at == 3:
            speaker.open("b", *TALK_B, sampling)
        for name, frame in zip(names, speaker.step(*names).materialize().frames, strict=True):
            got[name].append(frame.tolist())
    assert got == {"a": alone_a, "b": alone_b}
    assert alone_a[:5] != alone_b


def test_the_outputs_of_a_step_are_what_it_gave_however_late_they_are_read(
    talker: Talker, tiny_spec: OmniSpec
) -> None:
    expected = frames_alone(talker, tiny_spec, "a", *TALK_A, 6)
    speaker = Speaker(talker, tiny_spec)
    speaker.open("a", *TALK_A)
    pending = [speaker.step("a") for _ in range(6)]
    assert [p.materialize().frames[0].tolist() for p in pending] == expected
    assert [p.sampled()[0] for p in pending] == [frame[0] for frame in expected]


def test_only_codes_and_the_end_can_be_drawn(talker: Talker, tiny_spec: OmniSpec) -> None:
    allowed = {*range(tiny_spec.talker.codebook_size), tiny_spec.talker.codec_ids.eos}
    assert {int(i) for i in (~talker.suppressed).nonzero()} == allowed


def test_the_step_that_draws_the_end_has_no_frame(talker: Talker, tiny_spec: OmniSpec) -> None:
    eos = tiny_spec.talker.codec_ids.eos
    # One code and the end are all that can be drawn, and are as likely.
    suppressed = torch.ones(tiny_spec.talker.vocab_size, dtype=torch.bool)
    suppressed[[7, eos]] = False
    speaker = Speaker(talker, tiny_spec, suppressed=suppressed)
    speaker.open("a", *TALK_A, SamplingParams(temperature=100.0, seed=3))
    drawn = set()
    for _ in range(12):
        pending = speaker.step("a")
        (token,), (frame,) = pending.sampled(), pending.materialize().frames
        drawn.add(token)
        if token == eos:
            assert frame is None
        else:
            assert (frame[0], frame.dtype, frame.shape) == (7, np.int16, (16,))
            assert (frame < tiny_spec.talker.codebook_size).all()
    assert drawn == {7, eos}
