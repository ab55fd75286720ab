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

Weights are kept transposed, [in, out], and residuals are added inside the product: half the time of
`F.linear` on weights that lie in cache, the same otherwise (docs/log.md, "Small steps").
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

    def copy_blocks(self, source: int, target: int, count: int) -> None:
        """Copies `count` blocks from block `source` on to block `target` on, in every layer."""
        size = self.block_size
        old = slice(source * size, (source + count) * size)
        new = slice(target * size, (target + count) * size)
        self.keys[:, new] = self.keys[:, old]
        self.values[:, new] = self.values[:, old]


def unit_pair(x: Tensor, eps: float) -> Tensor:
    """(n, -n) with n = x / rms(x), along the last axis: [..., D] to [..., 2 D].

    (x, -x) has mean 0 and variance mean(x^2), so its layer norm is the RMS norm. On a CPU that one
    kernel is several times faster than `F.rms_norm`, which is ten small ones there.
    """
    if x.is_cuda:
        n = F.rms_norm(x, x.shape[-1:], None, eps)
        return torch.cat((n, -n), -1)
    pair = torch.cat((x, -x), -1)
    return F.layer_norm(pair, pair.shape[-1:], None, None, eps)


def turn(pair: Tensor, cos: Tensor, minus_sin: Tensor) -> Tensor:
    """Rotary embedding of n from its pair (n, -n), [..., 2 D] to [..., D].

    The middle of the pair is n rotated by half, negated.
    """
    size = pair.shape[-1] // 2
    middle = pair[..., size // 2 : size // 2 + size]
    return torch.addcmul(pair[..., :size] * cos, middle, minus_sin)


class Norm:
    """RMS norm with a weight [H]; see `unit_pair`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._pair_weight = torch.cat((weight, weight))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        size = x.shape[-1]
        if x.is_cuda:
            return F.rms_norm(x, (size,), self.weight, self._eps)
        pair = torch.cat((x, -x), -1)
        return F.layer_norm(pair, (2 * size,), self._pair_weight, None, self._eps)[..., :size]


def transposed(weight: Tensor) -> Tensor:
    """[out, in] of a checkpoint to [in, out], contiguous."""
    return weight.t().contiguous()


@dataclass(frozen=True)
class Attention:
    """qkv [H, (heads + 2 kv_heads) D], out [heads D, H].

    `qk_weight` [heads + kv_heads, 2 D] is the weight of the heads' norm, twice, for their pairs.
    """

    norm: Norm
    qkv: Tensor
    qk_weight: Tensor
    out: Tensor


@dataclass(frozen=True)
class DenseMLP:
    """SwiGLU; gate_up [H, 2 I], down [I, H]."""

    gate_up: Tensor
    down: Tensor

    def inner(self, x: Tensor) -> Tensor:
        """[n, H] to [n, I]: what goes into `down`."""
        return _gated(torch.mm(x, self.gate_up))

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(residual, self.inner(x), self.down)


@dataclass(frozen=True)
class MoE:
    """Top-k experts, and where there is one a shared expert behind a sigmoid gate.

    gate_up [E, H, 2 I], down [E, I, H]; router [H, E], or [H, E + 1] with the shared expert's gate.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    norm_topk_prob: bool
    shared: DenseMLP | None

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        num_experts = self.gate_up.shape[0]
        logits = torch.mm(x, self.router)
        probs = logits[:, :num_experts].softmax(-1, dtype=torch.float32)
        weights, experts = probs.topk(self.top_k, -1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        residual = residual + self._experts(x, weights.to(x.dtype), experts)
        if self.shared is None:
            return residual
        inner = self.shared.inner(x).mul_(torch.sigmoid(logits[:, num_experts:]))
        return torch.addmm(residual, inner, self.shared.down)

    def _experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows sorted by expert, then one grouped product per projection."""
        by_expert, order = experts.reshape(-1).sort()
        num_experts = self.gate_up.shape[0]
        ends = torch.bincount(by_expert, minlength=num_experts).cumsum(0, dtype=torch.int32)
        inner = _gated(F.grouped_mm(x[order // self.top_k], self.gate_up, offs=ends))
        y = F.grouped_mm(inner, self.down, offs=ends)
        y *= weights.reshape(-1)[order, None]
        unsorted = torch.empty_like(y)
        unsorted[order] = y
        return unsorted.view(x.shape[0], self.top_k, -1).sum(1)


def _gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [n, 2 I]."""
    size = gate_up.shape[-1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])


@dataclass(frozen=True)
class Layer:
    attention: Attention
    mlp_norm: Norm
    mlp: DenseMLP | MoE


class Rotary:
    """cos and -sin by position, [positions, D] each, both halves alike."""

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
        angles = torch.cat((angles, angles), -1)
        self.cos = angles.cos().to(device=device, dtype=dtype)
        self.minus_sin = angles.sin().neg().to(device=device, dtype=dtype)


def load_layer(source: ParameterSource, prefix: str, config: DecoderConfig) -> Layer:
    """One layer by transformers' names, with projections stacked."""
    hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
    heads, kv_heads = config.num_heads, config.num_kv_heads
    attn = f"{prefix}.self_attn"
    q = source.take(f"{attn}.q_proj.weight", heads * head_dim, hidden)
    k = source.take(f"{attn}.k_proj.weight", kv_heads * head_dim, hidden)
    v = source.take(f"{attn}.v_proj.weight", kv_heads * head_dim, hidden)
    q_norm = source.take(f"{attn}.q_norm.weight", head_dim).expand(heads, -1)
    k_norm = source.take(f"{attn}.k_norm.weight", head_dim).expand(kv_heads, -1)
    return Layer(
        attention=Attention(
            norm=Norm(source.take(f"{prefix}.input_layernorm.weight", hidden), eps),
            qkv=transposed(torch.cat((q, k, v))),
            qk_weight=torch.cat((q_norm, k_norm)).repeat(1, 2),
            out=transposed(source.take(f"{attn}.o_proj.weight", hidden, heads * head_dim)),
        ),
        mlp_norm=Norm(source.take(f"{prefix}.post_attention_layernorm.weight", hidden), eps),
        mlp=_load_mlp(source, f"{prefix}.mlp", hidden, config.mlp),
    )


def _load_mlp(
    source: ParameterSource, prefix: str, hidden: int, config: DenseConfig | MoEConfig
) -> DenseMLP | MoE:
    if isinstance(config, DenseConfig):
        return load_dense(source, prefix, hidden, config.intermediate_size)
    gate_up, down = source.take_experts(
        f"{prefix}.experts",
        num_experts=config.num_experts,
        intermediate=config.intermediate_size,
        hidden=hidden,
    )
    router, shared = source.take(f"{prefix}.gate.weight", config.num_experts, hidden), None
    if config.shared_intermediate_size is not None:
        size = config.shared_intermediate_size
        shared = load_dense(source, f"{prefix}.shared_expert", hidden, size)
        gate = source.take(f"{prefix}.shared_expert_gate.weight", 1, hidden)
        router = torch.cat((router, gate))
    return MoE(
        router=transposed(router),
        gate_up=gate_up.transpose(1, 2).contiguous(),
        down=down.transpose(1, 2).contiguous(),
        top_k=config.num_experts_per_tok,
        norm_topk_prob=config.norm_topk_prob,
        shared=shared,
    )


def load_dense(source: ParameterSource, prefix: str, hidden: int, intermediate: int) -> DenseMLP:
    gate = source.take(f"{prefix}.gate_proj.weight", intermediate, hidden)
    up = source.take(f"{prefix}.up_proj.weight", intermediate, hidden)
    return DenseMLP(
        gate_up=transposed(torch.cat((gate, up))),
        down=transposed(source.take(f"{prefix}.down_proj.weight", hidden, intermediate)),
    )


class Decoder:
    """The layers and the final norm; embeddings and heads belong to the models around it."""

    def __init__(self, source: ParameterSource, prefix: str, config: DecoderConfig) -> None:
        self.config = config
        self.layers = [
            load_layer(source, f"{prefix}.layers.{index}", config)
            for index in range(config.num_layers)
        ]
        norm = source.take(f"{prefix}.norm.weight", config.hidden_size)
        self.final_norm = Norm(norm, config.rms_norm_eps)
        self.dtype, self.device = norm.dtype, norm.device
        self._rotary = Rotary(
            theta=config.rope_theta,
            head_dim=config.head_dim,
            positions=config.max_positions,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, x: Tensor, segments: list[Segment], cache: KVCache) -> Tensor:
        """Raw output of the last layer, [rows, H], for rows x [rows, H]; fills the cache.

        Rows are `segments` one behind the other. `final_norm` is separate: most prompt rows need
        none.
        """
        positions = _positions(segments, base=False).to(x.device)
        places = _positions(segments, base=True).to(x.device)
        cos = self._rotary.cos[positions, None]
        minus_sin = self._rotary.minus_sin[positions, None]
        masks = [_causal_mask(segment, x.device) for segment in segments]
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        for index, layer in enumerate(self.layers):
            weights = layer.attention
            qkv = torch.mm(weights.norm(x), weights.qkv).view(-1, heads + 2 * kv_heads, head_dim)
            pair = unit_pair(qkv[:, : heads + kv_heads], config.rms_norm_eps)
            qk = turn(pair * weights.qk_weight, cos, minus_sin)
            keys, values = cache.keys[index], cache.values[index]
            keys[places] = qk[:, heads:]
            values[places] = qkv[:, heads + kv_heads :]
            query = qk[:, :heads]
            attended = [
                _attend_segment(query, segment, mask, keys, values, config.group_size)
                for segment, mask in zip(segments, masks, strict=True)
            ]
            joined = attended[0] if len(attended) == 1 else torch.cat(attended)
            x = torch.addmm(x, joined, weights.out)
            x = layer.mlp.added_to(x, layer.mlp_norm(x))
        return x


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
