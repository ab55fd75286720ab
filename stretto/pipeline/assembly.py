"""From a stage's description to a running engine: the model it serves, its scheduler, its edges.

The one place that knows which class stands behind which name of a deployment file.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto.bridges.bridge import Bridge, load_class
from stretto.bridges.prompt_inbox import PromptInbox
from stretto.bridges.talker_to_code2wav import TalkerToCode2Wav
from stretto.bridges.text_to_talker import TextToTalker
from stretto.bridges.thinker_to_talker import ThinkerToTalker
from stretto.config.async_output import choose_async_output
from stretto.config.deployment import CodecChunkConfig, EdgeConfig, StageConfig
from stretto.engine.ar_runner import TalkerRunner, ThinkerRunner
from stretto.engine.ar_scheduler import ARScheduler
from stretto.engine.block_manager import BlockManager
from stretto.engine.engine import StageEngine
from stretto.engine.generation_runner import GenerationRunner
from stretto.engine.generation_scheduler import GenerationScheduler
from stretto.engine.materializer import Materializer, StepKind
from stretto.engine.prefix_cache import PrefixCache
from stretto.engine.recorded_frames import RecordedFrames
from stretto.engine.runner import Runner
from stretto.engine.sampler import Sampler
from stretto.engine.scheduler import Scheduler
from stretto.errors import ConfigError
from stretto.events import Report, StageReady
from stretto.models.code2wav import Code2Wav
from stretto.models.decoder import Decoder, KVCache
from stretto.models.family import ModelSpec
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.qwen3_tts.spec import SPEECH_TOKENIZER, TtsSpec
from stretto.models.qwen3_tts.talker import Talker as TtsTalker
from stretto.models.recording import CudaGraphs, Recorder, trace
from stretto.models.talker import CodecTalker
from stretto.models.weights import Checkpoint
from stretto.request import StageRequest
from stretto.text import Decode, TextStream
from stretto.trace import Tracer
from stretto.transfer.adapter import ChunkTransferAdapter, Edge
from stretto.transfer.connector import OmniConnector
from stretto.transfer.shm_connector import SharedMemoryConnector

# Positions per KV block.
BLOCK_SIZE = 16

# Frames of a vocoder call on a CPU: more of them do not make a frame cheaper, and all wait for the
# last (docs/log.md, "Ten at once").
CPU_CALL_FRAMES = 24

# Of a device's free memory once the weights are there; the rest is for activations, and for other
# stages on the same device.
DEVICE_KV_SHARE = 0.4

BRIDGES: dict[tuple[str, str], Callable[..., Bridge]] = {
    ("qwen3_omni.thinker", "qwen3_omni.talker"): ThinkerToTalker,
    ("qwen3_omni.talker", "qwen3_omni.code2wav"): TalkerToCode2Wav,
    ("qwen3_tts.talker", "qwen3_tts.code2wav"): TalkerToCode2Wav,
}

# Entry stages whose upstream is the client, who may still be writing.
FED_BY_CLIENT = frozenset({"qwen3_tts.talker"})


class StageEdge(msgspec.Struct, frozen=True):
    """An edge as one of its stages needs it."""

    config: EdgeConfig
    from_model: str
    to_model: str
    from_id: int


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a stage process is told before it starts."""

    stage_id: int
    config: StageConfig
    model_dir: str
    model: ModelSpec
    async_chunk: bool
    chunk_timeout_s: float
    max_model_len: int
    # A `tokenizer.json`, for a stage that writes text.
    tokenizer_file: str
    # Where the stage leaves its part of a trace; None: no trace.
    trace_part: str | None = None
    upstream: StageEdge | None = None
    downstream: StageEdge | None = None


class Connectors(msgspec.Struct, frozen=True):
    upstream: OmniConnector | None
    downstream: OmniConnector | None


class BuiltStage(msgspec.Struct, frozen=True):
    engine: StageEngine
    ready: StageReady


def build_stage(
    spec: StageSpec,
    connectors: Connectors,
    publish: Callable[[Report], None],
    *,
    threaded: bool,
) -> BuiltStage:
    """Loads the stage's model and puts its engine together.

    Raises:
        ConfigError: the deployment names what does not exist.
        CheckpointError: the checkpoint lacks tensors, or they have other shapes.
    """
    began_s = time.monotonic()
    num_threads = resolve_threads(spec.config)
    # For the whole process: a stage has one of its own, and inline stages run one at a time.
    torch.set_num_threads(num_threads)
    builder = _Builder(spec)
    scheduler, runner, kind = builder.build()
    wake = threading.Event()
    part = None if spec.trace_part is None else Path(spec.trace_part)
    tracer = Tracer(spec.config.name, part)
    adapter = ChunkTransferAdapter(
        inbound=_end(spec.upstream, connectors.upstream),
        outbound=_end(spec.downstream, connectors.downstream),
        chunk_timeout_s=spec.chunk_timeout_s,
        wake=wake.set,
        tracer=tracer,
        threaded=threaded,
    )
    output = choose_async_output(spec.config, async_chunk=spec.async_chunk)
    # The materializer is made before the engine that it reports errors to.
    engine: list[StageEngine] = []
    materializer = Materializer(
        kind=kind,
        is_output=spec.config.output is not None,
        bridge=_bridge(spec.downstream, spec) if spec.downstream is not None else None,
        adapter=adapter,
        publish=publish,
        on_error=lambda request_id: engine[0].post_error(request_id),
        tracer=tracer,
        threaded=threaded and output.enabled,
    )
    engine.append(
        StageEngine(
            scheduler=scheduler,
            runner=runner,
            adapter=adapter,
            materializer=materializer,
            wake=wake,
            tracer=tracer,
            has_upstream=spec.upstream is not None,
        )
    )
    ready = StageReady(time.monotonic() - began_s, num_threads)
    return BuiltStage(engine[0], ready)


def resolve_device(config: StageConfig) -> torch.device:
    """The device of a stage.

    Raises:
        ConfigError: `devices` names none that is there.
    """
    if config.devices == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.devices)
    except RuntimeError as error:
        raise ConfigError(f"stage {config.name}: devices: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"stage {config.name}: devices is {config.devices!r}; there is no CUDA")
    return device


def resolve_threads(config: StageConfig) -> int:
    """Intra-op threads: on few cores one per stage is best (docs/log.md, "Threads")."""
    return 1 if config.num_threads == "auto" else config.num_threads


def cpu_calls(*, max_rows: int, longest: int) -> list[tuple[int, int]]:
    """The vocoder's calls with portions of up to `longest` frames: (rows, frames)."""
    calls = [(1, frames) for frames in range(1, longest + 1)]
    rows = 2
    while rows <= min(max_rows, CPU_CALL_FRAMES):
        most = min(longest, CPU_CALL_FRAMES // rows)
        calls += [(rows, frames) for frames in range(1, most + 1)]
        rows *= 2
    return calls


def edge_connector(spec: StageSpec, edge: StageEdge, end: socket.socket) -> OmniConnector:
    """The connector on one end of an edge between processes."""
    return SharedMemoryConnector(
        end,
        inline_bytes=edge.config.spec.inline_bytes,
        send_timeout=spec.chunk_timeout_s,
    )


def _end(
    edge: StageEdge | None, connector: OmniConnector | None
) -> tuple[Edge, OmniConnector] | None:
    if edge is None:
        return None
    assert connector is not None
    return Edge(edge.config.from_stage, edge.config.to_stage, edge.from_id), connector


def _bridge(edge: StageEdge, spec: StageSpec) -> Bridge:
    custom = edge.config.custom_process_next_stage_input_func
    if custom is not None:
        make: Callable[..., Bridge] = load_class(custom)
    elif (edge.from_model, edge.to_model) in BRIDGES:
        make = BRIDGES[edge.from_model, edge.to_model]
    else:
        raise ConfigError(
            f"no bridge from {edge.from_model} to {edge.to_model}; name one in "
            f"custom_process_next_stage_input_func of {edge.config.label}"
        )
    return make(spec.model, edge.config, async_chunk=spec.async_chunk)


class _Builder:
    """Builds the model-specific half of a stage."""

    def __init__(self, spec: StageSpec) -> None:
        self._spec = spec
        self._device = resolve_device(spec.config)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        wanted = spec.config.dtype
        if wanted == "auto":
            # On a CPU float32: codes drawn in bfloat16 are not those of the reference (FACTS).
            dtype = torch.float32 if self._device.type == "cpu" else None
        else:
            dtype = dtypes[wanted]
        self._dtype = dtype

    def build(self) -> tuple[Scheduler, Runner, StepKind]:
        """Scheduler and runner of the stage's model, and what its steps give."""
        makers: dict[str, Callable[[], tuple[Scheduler, Runner, StepKind]]] = {
            "qwen3_omni.thinker": self._thinker,
            "qwen3_omni.talker": self._talker,
            "qwen3_omni.code2wav": self._code2wav,
            "qwen3_tts.talker": self._tts_talker,
            "qwen3_tts.code2wav": self._tts_code2wav,
        }
        model = self._spec.config.model
        if model not in makers:
            raise ConfigError(
                f"stage {self._spec.config.name}: unknown model {model!r}; there are "
                f"{', '.join(sorted(makers))}"
            )
        with torch.inference_mode():
            return makers[model]()

    def _checkpoint(self, part: str = "") -> Checkpoint:
        """The model's weights, or those in a directory inside of it."""
        directory = Path(self._spec.model_dir) / part
        return Checkpoint(directory, dtype=self._dtype, device=self._device)

    @property
    def _omni(self) -> OmniSpec:
        assert isinstance(self._spec.model, OmniSpec)
        return self._spec.model

    @property
    def _tts(self) -> TtsSpec:
        assert isinstance(self._spec.model, TtsSpec)
        return self._spec.model

    def _thinker(self) -> tuple[Scheduler, Runner, StepKind]:
        spec, omni = self._spec, self._omni
        model = self._checkpoint().load(lambda source: Thinker(source, omni.thinker))
        rows, vocab = spec.config.max_num_seqs, omni.thinker.vocab_size
        cache, blocks = self._kv(model.decoder)
        sampler = Sampler(max_rows=rows, vocab_size=vocab, device=self._device, suppressed=None)
        runner = ThinkerRunner(model, cache, sampler, max_rows=rows, stage_id=spec.stage_id)
        decode = load_decode(spec.tokenizer_file)
        scheduler = self._ar_scheduler(
            blocks,
            open_inbox=PromptInbox,
            open_text=lambda ticket: TextStream(decode, ticket.sampling.stop),
        )
        return scheduler, runner, "text"

    def _talker(self) -> tuple[Scheduler, Runner, StepKind]:
        spec, omni = self._spec, self._omni
        model = self._checkpoint().load(lambda source: Talker(source, omni.talker))
        assert spec.upstream is not None
        return self._speaking(model, _bridge(spec.upstream, spec).inbox)

    def _tts_talker(self) -> tuple[Scheduler, Runner, StepKind]:
        spec, tts = self._spec, self._tts
        if spec.config.enable_prefix_caching:
            raise ConfigError(
                f"stage {spec.config.name}: enable_prefix_caching is true; its prompts are rows, "
                "not ids"
            )
        model = self._checkpoint().load(lambda source: TtsTalker(source, tts.talker))
        return self._speaking(model, TextToTalker(tts).inbox)

    def _speaking(self, model: CodecTalker, inbox: Any) -> tuple[Scheduler, Runner, StepKind]:
        rows = self._spec.config.max_num_seqs
        cache, blocks = self._kv(model.decoder)
        sampler = Sampler(
            max_rows=rows,
            vocab_size=model.spec.vocab_size,
            device=self._device,
            suppressed=model.suppressed,
        )
        runner = TalkerRunner(
            model,
            cache,
            sampler,
            max_rows=rows,
            stage_id=self._spec.stage_id,
            frames=self._frames(model),
        )
        return self._ar_scheduler(blocks, open_inbox=inbox, open_text=None), runner, "speech"

    def _frames(self, model: CodecTalker) -> RecordedFrames:
        record: Recorder | None = None
        if self._spec.config.record_frames == "on" and self._device.type == "cuda":
            record = CudaGraphs()
        elif self._spec.config.record_frames != "off" and self._device.type == "cpu":
            record = trace
        return RecordedFrames(model.predictor, record)

    def _code2wav(self) -> tuple[Scheduler, Runner, StepKind]:
        omni = self._omni
        model = self._checkpoint().load(lambda source: Code2Wav(source, omni.code2wav))
        return self._sounding(model)

    def _tts_code2wav(self) -> tuple[Scheduler, Runner, StepKind]:
        tts = self._tts
        checkpoint = self._checkpoint(SPEECH_TOKENIZER)
        return self._sounding(checkpoint.load(lambda source: Code2Wav(source, tts.code2wav)))

    def _sounding(self, model: Code2Wav) -> tuple[Scheduler, Runner, StepKind]:
        spec = self._spec
        assert spec.upstream is not None
        inbox: Any = _bridge(spec.upstream, spec).inbox
        max_rows, max_frames = spec.config.max_num_seqs, None
        calls: list[tuple[int, int]] = []
        if self._device.type == "cpu":
            max_frames = CPU_CALL_FRAMES
            codec = spec.upstream.config.codec or CodecChunkConfig()
            calls = cpu_calls(max_rows=max_rows, longest=codec.codec_chunk_frames)
        scheduler = GenerationScheduler(
            max_num_seqs=max_rows, open_inbox=inbox, max_frames=max_frames
        )
        return scheduler, GenerationRunner(model, calls), "audio"

    def _kv(self, decoder: Decoder) -> tuple[KVCache, BlockManager]:
        num_blocks = self._num_blocks(decoder)
        cache = KVCache(
            decoder.config,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        return cache, BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE)

    def _num_blocks(self, decoder: Decoder) -> int:
        """Blocks of the KV pool: every place with a full context, or what a device has room for.

        Raises:
            ConfigError: not even one full context fits the device.
        """
        config, name = decoder.config, self._spec.config.name
        per_request = -(-self._spec.max_model_len // BLOCK_SIZE)
        wanted = self._spec.config.max_num_seqs * per_request
        if decoder.device.type == "cpu":
            return wanted
        positions = config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_SIZE
        block_bytes = 2 * positions * decoder.dtype.itemsize
        free_bytes, _ = torch.cuda.mem_get_info(decoder.device)
        affordable = int(free_bytes * DEVICE_KV_SHARE) // block_bytes
        if affordable < per_request:
            raise ConfigError(
                f"stage {name}: a context of {self._spec.max_model_len} positions (max_model_len) "
                f"needs {per_request * block_bytes / 2**30:.1f} GiB of KV; "
                f"{decoder.device} has {affordable * block_bytes / 2**30:.1f} GiB to spare"
            )
        return min(wanted, affordable)

    def _ar_scheduler(
        self,
        blocks: BlockManager,
        *,
        open_inbox: Any,
        open_text: Callable[[StageRequest], TextStream] | None,
    ) -> ARScheduler:
        config = self._spec.config
        prefix_cache = None
        if config.enable_prefix_caching:
            prefix_cache = PrefixCache(blocks, max_tokens=config.prefix_cache_tokens)
        return ARScheduler(
            max_num_seqs=config.max_num_seqs,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            blocks=blocks,
            max_repeated=config.max_repeated_frames,
            prefix_cache=prefix_cache,
            open_inbox=open_inbox,
            open_text=open_text,
        )


def load_decode(tokenizer_file: str) -> Decode:
    """Ids to text by a `tokenizer.json`, special tokens left out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)

    def decode(ids: Any) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text

    return decode
