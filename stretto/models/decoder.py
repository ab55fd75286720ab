"""One lean decoder for every autoregressive part: Thinker, Talkers, code predictor's layers.

A step runs over flat rows, whatever they are: prompt cells of some requests and single decode rows
of others, one behind the other.

    rows      [r0 r1 r2 r3 r4 | r5 | r6]        x: [rows, hidden]
    segments   └ request A ─┘   B    C          Segment(first_row, num_rows, start, kv_base)

The linear layers see all rows at once; attention runs per segment over that request's own run of
the KV cache. A run is contiguous, so keys and values are views: gathering blocks into a batch for
each layer costs 2 to 7 times as much on a CPU (docs/log.md, "KV layout").

The architecture is Qwen3's (pre-norm, q/k norm per head, rotary, SwiGLU or experts with an optional
shared one) as transformers' `modeling_qwen3_omni_moe` defines it; for text all three axes of its
multimodal rotary embedding are equal, which makes it the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.weights import ParameterSource


class DenseConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    intermediate_size: int


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    # A dense expert that every token passes, behind a sigmoid gate; None where there is none.
    shared_intermediate_size: int | None = None


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    mlp: DenseConfig | MoEConfig

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Segment:
    """Rows of one request in a step. Its keys lie at `kv_base + position` in the cache."""

    first_row: int
    num_rows: int
    # Position of the first row in its request.
    start: int
    kv_base: int


class KVCache:
    """Keys and values of all requests, one pool per layer, cut into blocks.

    keys, values: [layers, blocks * block_size, kv_heads, head_dim]. On a CPU the pool is mapped
    lazily: what no request has used yet takes no memory, so it must not be filled here. A run is
    read only where it was written.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (
            config.num_layers,
            num_blocks * block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Attention:
    """q, k, v stacked into one projection; q and k norms as one table [heads + kv_heads, D]."""

    norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor


@dataclass(frozen=True)
class DenseMLP:
    """SwiGLU; gate and up projections stacked, [2 I, H]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), self.down)


@dataclass(frozen=True)
class MoE:
    """Top-k experts. gate_up [E, 2 I, H], down [E, H, I], router [E, H]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    norm_topk_prob: bool
    shared: DenseMLP | None
    shared_gate: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        probs = F.softmax(F.linear(x, self.router), -1, dtype=torch.float32)
        weights, experts = probs.topk(self.top_k, -1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y = self._experts(x, weights.to(x.dtype), experts)
        if self.shared is not None and self.shared_gate is not None:
            y += torch.sigmoid(F.linear(x, self.shared_gate)) * self.shared(x)
        return y

    def _experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows sorted by expert, then one grouped product per projection."""
        by_expert, order = experts.reshape(-1).sort()
        num_experts = self.router.shape[0]
        ends = torch.bincount(by_expert, minlength=num_experts).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(
            x[order // self.top_k], self.gate_up.transpose(-2, -1), offs=ends
        ).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate).mul_(up), self.down.transpose(-2, -1), offs=ends)
        y *= weights.reshape(-1)[order, None]
        unsorted = torch.empty_like(y)
        unsorted[order] = y
        return unsorted.view(x.shape[0], self.top_k, -1).sum(1)


@dataclass(frozen=True)
class Layer:
    attention: Attention
    mlp_norm: Tensor
    mlp: DenseMLP | MoE


class Rotary:
    """cos and sin by position, [positions, D] each; rotate-half's sign is folded into sin."""

    def __init__(
        self,
        *,
        theta: float,
        head_dim: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), -1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), -1).to(device=device, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., D], with `Rotary`'s signed sin."""
    return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin


def load_layer(source: ParameterSource, prefix: str, config: DecoderConfig) -> Layer:
    """One layer by transformers' names, with projections stacked."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    attn = f"{prefix}.self_attn"
    q = source.take(f"{attn}.q_proj.weight", heads * head_dim, hidden)
    k = source.take(f"{attn}.k_proj.weight", kv_heads * head_dim, hidden)
    v = source.take(f"{attn}.v_proj.weight", kv_heads * head_dim, hidden)
    q_norm = source.take(f"{attn}.q_norm.weight", head_dim).expand(heads, -1)
    k_norm = source.take(f"{attn}.k_norm.weight", head_dim).expand(kv_heads, -1)
    return Layer(
        attention=Attention(
            norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=torch.cat((q, k, v)),
            qk_norm=torch.cat((q_norm, k_norm)),
            out=source.take(f"{attn}.o_proj.weight", hidden, heads * head_dim),
        ),
        mlp_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=_load_mlp(source, f"{prefix}.mlp", hidden, config.mlp),
    )


def _load_mlp(
    source: ParameterSource, prefix: str, hidden: int, config: DenseConfig | MoEConfig
) -> DenseMLP | MoE:
    if isinstance(config, DenseConfig):
        return _load_dense(source, prefix, hidden, config.intermediate_size)
    gate_up, down = source.take_experts(
        f"{prefix}.experts",
        num_experts=config.num_experts,
        intermediate=config.intermediate_size,
        hidden=hidden,
    )
    shared = shared_gate = None
    if config.shared_intermediate_size is not None:
        shared = _load_dense(
            source, f"{prefix}.shared_expert", hidden, config.shared_intermediate_size
        )
        shared_gate = source.take(f"{prefix}.shared_expert_gate.weight", 1, hidden)
    return MoE(
        router=source.take(f"{prefix}.gate.weight", config.num_experts, hidden),
        gate_up=gate_up,
        down=down,
        top_k=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        shared=shared,
        shared_gate=shared_gate,
    )


def _load_dense(source: ParameterSource, prefix: str, hidden: int, intermediate: int) -> DenseMLP:
    gate = source.take(f"{prefix}.gate_proj.weight", intermediate, hidden)
    up = source.take(f"{prefix}.up_proj.weight", intermediate, hidden)
    return DenseMLP(
        gate_up=torch.cat((gate, up)),
        down=source.take(f"{prefix}.down_proj.weight", hidden, intermediate),
    )


class Decoder:
    """The layers and the final norm; embeddings and heads belong to the models around it."""

    def __init__(self, source: ParameterSource, prefix: str, config: DecoderConfig) -> None:
        self.config = config
        self.layers = [
            load_layer(source, f"{prefix}.layers.{index}", config)
            for index in range(config.num_layers)
        ]
        self.norm = source.take(f"{prefix}.norm.weight", config.hidden_size)
        self._rotary = Rotary(
            theta=config.rope_theta,
            head_dim=config.head_dim,
            positions=config.max_positions,
            dtype=self.norm.dtype,
            device=self.norm.device,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    def forward(self, x: Tensor, segments: list[Segment], cache: KVCache) -> Tensor:
        """Raw output of the last layer, [rows, H], for rows x [rows, H]; fills the cache.

        Rows are `segments` one behind the other. `final_norm` is separate: most prompt rows need
        none.
        """
        positions = _positions(segments, base=False).to(x.device)
        places = _positions(segments, base=True).to(x.device)
        cos = self._rotary.cos[positions, None]
        sin = self._rotary.sin[positions, None]
        masks = [_causal_mask(segment, x.device) for segment in segments]
        for index, layer in enumerate(self.layers):
            x = x + self._attend(
                index, layer.attention, x, cos, sin, places, segments, masks, cache
            )
            x = x + layer.mlp(self._norm(x, layer.mlp_norm))
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        return self._norm(x, self.norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _attend(
        self,
        index: int,
        weights: Attention,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Tensor,
        segments: list[Segment],
        masks: list[Tensor | None],
        cache: KVCache,
    ) -> Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(self._norm(x, weights.norm), weights.qkv).view(
            -1, heads + 2 * kv_heads, head_dim
        )
        qk = F.rms_norm(qkv[:, : heads + kv_heads], (head_dim,), None, config.rms_norm_eps)
        qk = rotate(qk * weights.qk_norm, cos, sin)
        keys, values = cache.keys[index], cache.values[index]
        keys[places] = qk[:, heads:]
        values[places] = qkv[:, heads + kv_heads :]
        query = qk[:, :heads]
        attended = [
            _attend_segment(query, segment, mask, keys, values, config.group_size)
            for segment, mask in zip(segments, masks, strict=True)
        ]
        return F.linear(attended[0] if len(attended) == 1 else torch.cat(attended), weights.out)


def _attend_segment(
    query: Tensor,
    segment: Segment,
    mask: Tensor | None,
    keys: Tensor,
    values: Tensor,
    group_size: int,
) -> Tensor:
    """Attention of one request's rows over its own run; [rows, heads * D]."""
    first, last = segment.first_row, segment.first_row + segment.num_rows
    run = slice(segment.kv_base, segment.kv_base + segment.start + segment.num_rows)
    k = keys[run].transpose(0, 1)[None]
    v = values[run].transpose(0, 1)[None]
    if segment.num_rows == 1:
        # The query heads of a group take the place of query positions: no KV head is repeated.
        q = query[first].view(1, -1, group_size, query.shape[-1])
        return F.scaled_dot_product_attention(q, k, v).reshape(1, -1)
    q = query[first:last].transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=group_size > 1
    )
    return out[0].transpose(0, 1).reshape(segment.num_rows, -1)


def _causal_mask(segment: Segment, device: torch.device) -> Tensor | None:
    """For rows that continue a run [rows, keys]; None where plain causal attention is right."""
    if segment.start == 0 or segment.num_rows == 1:
        return None
    keys = torch.arange(segment.start + segment.num_rows, device=device)
    rows = torch.arange(segment.num_rows, device=device)
    return keys[None] <= rows[:, None] + segment.start


def _positions(segments: list[Segment], *, base: bool) -> Tensor:
    parts = [
        torch.arange(s.start, s.start + s.num_rows).add_(s.kv_base if base else 0) for s in segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
