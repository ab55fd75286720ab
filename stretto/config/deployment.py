"""How a pipeline is deployed: stages, edges, limits. Strict structs; no file, no environment.

Topology and policy of a kind of model stand in its bundled profile (`profiles/`); a deployment
file overrides what differs. Rules between fields are checked where the fields are.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import msgspec

from stretto.errors import InvalidRequest
from stretto.request import SamplingParams, merge_sampling

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Auto = Literal["auto"]


# The pipeline's own names: who submits, and who relays.
RESERVED_NAMES = {"client", "front"}


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage. `model` names an entry of the model registry."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*$")]
    worker_type: Literal["ar", "generation"]
    model: str
    # "auto" is the first CUDA device if there is one, else the CPU.
    devices: str = "auto"
    # "auto" is the checkpoint's own on CUDA and float32 on a CPU, where codes are gated.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_threads: Positive | Auto = "auto"
    max_num_seqs: Positive = 64
    # Prompt positions per step and request; prefill runs in cells of this size, so that where it
    # is cut does not depend on when rows arrive.
    prefill_chunk_tokens: Positive = 512
    # Keep the KV of finished requests and begin new ones behind what they share with them.
    enable_prefix_caching: bool = False
    # Positions kept for that at most, over all finished requests.
    prefix_cache_tokens: Positive = 32768
    # Build outputs behind the next step instead of before it; "auto" does where it is safe.
    async_output: Literal["auto", "off"] = "auto"
    # Record the code predictor's steps of a frame and replay them. "auto" does on a CPU; on CUDA,
    # where it means graphs, not until they have been seen to work on a device.
    record_frames: Literal["auto", "on", "off"] = "auto"
    # Positions per request at most; "auto" is what the checkpoint was made for.
    max_model_len: Positive | Auto = "auto"
    # A stage that speaks and has gone round in a circle for so many frames is cut; null: never.
    max_repeated_frames: Positive | None = None
    output: Literal["text", "audio"] | None = None
    default_sampling: dict[str, Any] = {}
    # The residual codebooks' sampling, for stages that have a code predictor.
    residual_sampling: dict[str, Any] = {}

    def __post_init__(self) -> None:
        samplings = {
            "default_sampling": self.default_sampling,
            "residual_sampling": self.residual_sampling,
        }
        for name, given in samplings.items():
            try:
                merge_sampling(SamplingParams(), given)
            except InvalidRequest as error:
                raise ValueError(f"stage {self.name}: {name}: {error}") from error


class ConnectorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Between processes; stages that run inline hand chunks over in memory whatever stands here.
    name: Literal["SharedMemoryConnector"] = "SharedMemoryConnector"
    # Larger payloads travel as shared memory, smaller ones in the message itself.
    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 32768


class CodecChunkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the codec stream is cut for the vocoder."""

    # 25 frames are two seconds of sound: the longest a listener waits behind one slow chunk.
    codec_chunk_frames: Positive = 25
    # "auto": chosen from the load at admission, small when idle.
    initial_codec_chunk_frames: Positive | Auto = "auto"

    # How much larger each chunk is than the one before, until codec_chunk_frames is reached; null
    # goes there at once. Below 1 / RTF the player never waits: 1.2 is enough up to an RTF of 0.8.
    codec_chunk_growth: Annotated[float, msgspec.Meta(ge=1.05, le=64)] | None = 1.2

    def __post_init__(self) -> None:
        initial = self.initial_codec_chunk_frames
        if initial != "auto" and initial > self.codec_chunk_frames:
            raise ValueError(
                f"initial_codec_chunk_frames ({initial}) is larger than codec_chunk_frames "
                f"({self.codec_chunk_frames}); the first chunk is the small one"
            )


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    from_stage: str
    to_stage: str
    spec: ConnectorSpec = ConnectorSpec()
    codec: CodecChunkConfig | None = None
    # A bridge of your own, "package.module.Class"; the model's own when absent.
    custom_process_next_stage_input_func: str | None = None

    @property
    def label(self) -> str:
        return f"{self.from_stage}->{self.to_stage}"


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    stages: Annotated[tuple[StageConfig, ...], msgspec.Meta(min_length=1)]
    connectors: tuple[EdgeConfig, ...] = ()
    # Hand on chunks as they come, or one chunk at the end of each stage.
    async_chunk: bool = True
    # A stage waits this long for the next chunk of a request before it fails it. The last resort:
    # dead or hung stages and lost chunks are noticed at once; without chunking, or behind a full
    # stage, the first chunk may rightly be minutes away.
    chunk_timeout_s: Seconds = 300.0
    # Loading and warm-up of all stages together.
    start_timeout_s: Seconds = 300.0
    # A step that runs longer, or a stage that answers no ping for as long, counts as hung; not
    # before the warm-up is through, in which kernels are compiled.
    step_timeout_s: Seconds = 60.0
    # Requests in flight at most; one more is refused.
    max_requests: Positive = 256

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two stages are called {name!r}")
        if RESERVED_NAMES & set(names):
            raise ValueError(f"a stage may not be called {' or '.join(sorted(RESERVED_NAMES))}")
        for stage in self.stages[1:]:
            if stage.enable_prefix_caching:
                raise ValueError(
                    f"stage {stage.name}: enable_prefix_caching: only the entry stage has a prompt "
                    "of ids; what the others have computed depends on what they drew"
                )
        want = list(itertools.pairwise(names))
        have = [(edge.from_stage, edge.to_stage) for edge in self.connectors]
        if have != want:
            shown = ", ".join(f"{a}->{b}" for a, b in want) or "none"
            given = ", ".join(edge.label for edge in self.connectors) or "none"
            raise ValueError(
                f"connectors must join the stages in their order ({shown}), given: {given}"
            )

    def stage(self, name: str) -> StageConfig:
        return next(stage for stage in self.stages if stage.name == name)
