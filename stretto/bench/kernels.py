"""What one step of each model costs by itself, and what it cannot cost less than.

    code predictor    a frame's residual codes, recorded and not      rows 1, 4, 16
    talker, thinker   a decode step: layers, final norm, head         rows 1, 4, 16
    code2wav          a call of the vocoder, per frame                rows 1, 4, 16 x chunks

A floor is the larger of two times, both measured here beside the steps: reading the weights that a
step uses once (the sum of a buffer that is as large as they are), and as many products as the step
has (a product of matrices that lie in cache). Everything runs in this process, in turn, so that
what else the machine does hits all alike; figures are medians, floors are the best that was seen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stretto.bench.tables import Table, number
from stretto.errors import ConfigError
from stretto.models.code2wav import Code2Wav
from stretto.models.decoder import DecoderConfig, KVCache, MoEConfig, Segment
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.recording import trace
from stretto.models.weights import Checkpoint, ParameterSource
from stretto.pipeline.frontends import load_frontend
from stretto.pipeline.model import open_model

# Positions behind a decode step: prompt and half an answer of the other benches.
CONTEXT = 256
BLOCK = 16
# A stream's first frames are dearer than the others, and not counted.
VOCODER_LEAD_FRAMES = 4
# A product near the best rate of one core: small enough for its cache, large enough to be all work.
PRODUCT = (256, 512, 512)
FLOAT_BYTES = 4


class KernelPlan(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    rows: tuple[int, ...] = (1, 4, 16)
    chunks: tuple[int, ...] = (1, 4, 10, 25)
    repeats: int = 20
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.rows or not self.chunks or min(*self.rows, *self.chunks, self.repeats) < 1:
            raise ConfigError("rows, chunks and repeats are numbers from 1 on")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel at one batch. `frames` is per row, 0 where there are none; times of one call."""

    name: str
    rows: int
    frames: int
    ms: float
    weight_bytes: int
    flops: int
    read_ms: float
    product_ms: float

    @property
    def floor_ms(self) -> float:
        return max(self.read_ms, self.product_ms)

    @property
    def ms_per_frame(self) -> float:
        return self.ms / (self.rows * self.frames)


class KernelResult(msgspec.Struct, frozen=True, kw_only=True, tag="kernels", tag_field="kind"):
    """The last line of `stretto bench kernels`.

    `vocoder_small_over_large`: cost per frame of the smallest chunk over that of the largest, by
    rows. `vocoder_one_call_over_single`: a call with the most rows over as many calls of one, by
    chunk.
    """

    model: str
    machine: str
    threads: int
    read_gb_s: float
    product_gflop_s: float
    steps: list[Step]
    vocoder_small_over_large: dict[str, float]
    vocoder_one_call_over_single: dict[str, float]


class _Kernel:
    """Something to call again and again. A call reads `resident` bytes of weights, some of them
    more than once: `traffic` in all."""

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        *,
        rows: int,
        frames: int = 0,
        resident: int,
        traffic: int | None = None,
        counted: Callable[[], object] | None = None,
    ) -> None:
        self.name, self.rows, self.frames = name, rows, frames
        self.call = call
        self.resident = resident
        self.traffic = resident if traffic is None else traffic
        self.flops = _flops(counted or call)
        self.took_s: list[float] = []


def measure(
    plan: KernelPlan, *, machine: str, cache_dir: Path, on_progress: Callable[[str], None]
) -> KernelResult:
    """Raises ConfigError or CheckpointError when the model cannot be loaded."""
    torch.set_num_threads(plan.threads)
    on_progress(f"loading {plan.model}")
    with torch.inference_mode():
        kernels = _kernels(plan, cache_dir)
        reads = {kernel.resident: 0.0 for kernel in kernels}
        buffers = {size: torch.zeros(max(1, size // FLOAT_BYTES)) for size in reads}
        product_s: list[float] = []
        read_s: dict[int, list[float]] = {size: [] for size in reads}
        a, b = torch.randn(PRODUCT[0], PRODUCT[1]), torch.randn(PRODUCT[1], PRODUCT[2])
        for repeat in range(plan.repeats + 1):
            on_progress(f"repeat {repeat} of {plan.repeats}")
            for kernel in kernels:
                kernel.took_s.append(_seconds(kernel.call))
            for size, buffer in buffers.items():
                # Once to bring it as near as it fits: a step that reads it again finds it there.
                buffer.sum()
                read_s[size].append(_seconds(buffer.sum))
            product_s.append(_seconds(lambda: torch.mm(a, b)))
    # The first of each meets cold caches.
    per_flop_s = min(product_s[1:]) / (2 * PRODUCT[0] * PRODUCT[1] * PRODUCT[2])
    best_read_s = {size: min(took[1:]) for size, took in read_s.items()}
    steps = [_step(kernel, best_read_s, per_flop_s) for kernel in kernels]
    largest = max(reads)
    return KernelResult(
        model=plan.model,
        machine=machine,
        threads=plan.threads,
        read_gb_s=largest / best_read_s[largest] / 1e9,
        product_gflop_s=1e-9 / per_flop_s,
        steps=steps,
        vocoder_small_over_large=_small_over_large(steps, plan),
        vocoder_one_call_over_single=_one_call_over_single(steps, plan),
    )


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _step(kernel: _Kernel, read_s: dict[int, float], per_flop_s: float) -> Step:
    return Step(
        name=kernel.name,
        rows=kernel.rows,
        frames=kernel.frames,
        ms=statistics.median(kernel.took_s[1:]) * 1e3,
        weight_bytes=kernel.traffic,
        flops=kernel.flops,
        read_ms=read_s[kernel.resident] * kernel.traffic / kernel.resident * 1e3,
        product_ms=kernel.flops * per_flop_s * 1e3,
    )


# ---- kernels -------------------------------------------------------------------------------------


class _Noted:
    """A checkpoint that notes how many bytes were taken under which name."""

    def __init__(self, source: ParameterSource) -> None:
        self._source = source
        self._bytes: dict[str, int] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._source.take(name, *shape)
        self._bytes[name] = tensor.nbytes
        return tensor

    def take_experts(
        self, prefix: str, *, num_experts: int, intermediate: int, hidden: int
    ) -> tuple[Tensor, Tensor]:
        gate_up, down = self._source.take_experts(
            prefix, num_experts=num_experts, intermediate=intermediate, hidden=hidden
        )
        self._bytes[prefix] = gate_up.nbytes + down.nbytes
        return gate_up, down

    def bytes_of(self, *prefixes: str) -> int:
        return sum(size for name, size in self._bytes.items() if name.startswith(prefixes))

    def expert_bytes(self, prefix: str) -> int:
        return sum(
            size
            for name, size in self._bytes.items()
            if name.startswith(prefix) and name.endswith(".experts")
        )


def _kernels(plan: KernelPlan, cache_dir: Path) -> list[_Kernel]:
    model = open_model(plan.model, cache_dir=cache_dir, deploy_config=None, flags={})
    spec = load_frontend(model, cache_dir=cache_dir).spec
    if not isinstance(spec, OmniSpec):
        raise ConfigError(f"{plan.model}: kernels are measured of Qwen3-Omni models")
    checkpoint = Checkpoint(model.directory, dtype=torch.float32, device=torch.device("cpu"))
    noted = _Noted(checkpoint)
    talker = checkpoint.load(lambda _: Talker(noted, spec.talker))
    thinker = checkpoint.load(lambda _: Thinker(noted, spec.thinker))
    vocoder = checkpoint.load(lambda _: Code2Wav(noted, spec.code2wav))
    torch.manual_seed(0)

    def decoder_bytes(config: DecoderConfig, layers: str, head: str, rows: int) -> int:
        return noted.bytes_of(layers, head) - round(
            (1 - _reached(config, rows)) * noted.expert_bytes(layers)
        )

    return [
        *(
            _predictor_frame(talker, rows, noted, recorded=recorded)
            for recorded in (True, False)
            for rows in plan.rows
        ),
        *(
            _decode_step(
                "talker",
                talker,
                rows,
                decoder_bytes(
                    spec.talker.decoder, "talker.model.layers.", "talker.codec_head", rows
                ),
            )
            for rows in plan.rows
        ),
        *(
            _decode_step(
                "thinker",
                thinker,
                rows,
                decoder_bytes(
                    spec.thinker.decoder, "thinker.model.layers.", "thinker.lm_head", rows
                ),
            )
            for rows in plan.rows
        ),
        *(
            _vocoder_call(vocoder, rows, frames, noted)
            for rows in plan.rows
            for frames in plan.chunks
        ),
    ]


def _reached(config: DecoderConfig, rows: int) -> float:
    """The share of the experts that so many rows reach, were they drawn evenly."""
    if not isinstance(config.mlp, MoEConfig):
        return 1.0
    return 1.0 - (1.0 - config.mlp.num_experts_per_tok / config.mlp.num_experts) ** rows


def _predictor_frame(talker: Talker, rows: int, noted: _Noted, *, recorded: bool) -> _Kernel:
    predictor = talker.predictor
    hidden = torch.randn(rows, predictor.config.hidden_size)
    first = torch.randn(rows, predictor.config.hidden_size)

    def run(hidden: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return predictor.generate(hidden, first, lambda logits, _: logits.argmax(-1))

    call = trace(run, (hidden, first)) if recorded else run
    layers = noted.bytes_of("talker.code_predictor.model.layers.")
    heads = noted.bytes_of("talker.code_predictor.lm_head.")
    return _Kernel(
        "code predictor" if recorded else "code predictor, step by step",
        lambda: call(hidden, first),
        rows=rows,
        # What is read again and again lies nearer than all of it would.
        resident=layers,
        traffic=(predictor.num_codebooks - 1) * layers + heads,
        # What torch runs from a record is not counted.
        counted=lambda: run(hidden, first),
    )


def _decode_step(name: str, model: Talker | Thinker, rows: int, weight_bytes: int) -> _Kernel:
    decoder = model.decoder
    config = decoder.config
    blocks = -(-(CONTEXT + 1) // BLOCK)
    cache = KVCache(
        config,
        num_blocks=rows * blocks,
        block_size=BLOCK,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    cache.keys.normal_()
    cache.values.normal_()
    segments = [Segment(row, 1, CONTEXT, row * blocks * BLOCK) for row in range(rows)]
    x = torch.randn(rows, config.hidden_size)

    def call() -> Tensor:
        return model.logits(decoder.final_norm(decoder.forward(x, segments, cache)))

    return _Kernel(name, call, rows=rows, resident=weight_bytes)


def _vocoder_call(vocoder: Code2Wav, rows: int, frames: int, noted: _Noted) -> _Kernel:
    config = vocoder.config
    states = [vocoder.open() for _ in range(rows)]

    def feed(count: int) -> None:
        shape = (count, config.num_codebooks)
        vocoder.feed([torch.randint(config.codebook_size, shape) for _ in states], states)

    feed(VOCODER_LEAD_FRAMES)
    size = noted.bytes_of("code2wav.") - noted.bytes_of("code2wav.code_embedding.")
    return _Kernel("code2wav", lambda: feed(frames), rows=rows, frames=frames, resident=size)


def _flops(call: Callable[[], object]) -> int:
    """Of the products and convolutions of a call; attention over the cache is left out."""
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops}
    )
    with counter:
        call()
    return counter.get_total_flops()


def _grouped_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Of shapes [n, K] and [E, K, N]."""
    count: int = 2 * rows[0] * rows[1] * weights[2]
    return count


# ---- figures -------------------------------------------------------------------------------------


def _small_over_large(steps: list[Step], plan: KernelPlan) -> dict[str, float]:
    cost = {(step.rows, step.frames): step.ms_per_frame for step in steps if step.frames}
    small, large = min(plan.chunks), max(plan.chunks)
    return {str(rows): round(cost[rows, small] / cost[rows, large], 4) for rows in plan.rows}


def _one_call_over_single(steps: list[Step], plan: KernelPlan) -> dict[str, float]:
    cost = {(step.rows, step.frames): step.ms_per_frame for step in steps if step.frames}
    one, most = min(plan.rows), max(plan.rows)
    return {str(frames): round(cost[most, frames] / cost[one, frames], 4) for frames in plan.chunks}


def tables_of(result: KernelResult) -> list[Table]:
    steps = tuple(
        (
            step.name,
            str(step.rows),
            str(step.frames) if step.frames else "",
            number(step.ms, 2),
            number(step.ms_per_frame, 2) if step.frames else "",
            number(step.read_ms, 2),
            number(step.product_ms, 2),
            number(step.ms / step.floor_ms, 2),
        )
        for step in result.steps
    )
    return [
        Table(
            f"Steps, {result.threads} thread(s), medians; weights are read at "
            f"{result.read_gb_s:.1f} GB/s, products run at {result.product_gflop_s:.0f} GFLOP/s",
            (
                "step", "rows", "frames each", "ms", "ms per frame", "reading weights ms",
                "products ms", "over the floor",
            ),
            steps,
        ),
        _ratio_table(
            "Vocoder, cost per frame: smallest chunk over largest", "rows",
            result.vocoder_small_over_large,
        ),
        _ratio_table(
            "Vocoder: one call with the most rows over as many calls of one", "frames each",
            result.vocoder_one_call_over_single,
        ),
    ]  # fmt: skip


def _ratio_table(title: str, by: str, ratios: dict[str, float]) -> Table:
    return Table(title, (by, *ratios), (("ratio", *(number(r, 2) for r in ratios.values())),))
