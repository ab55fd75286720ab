"""transformers' decoder layers, computed the way that trains fastest on a CPU.

The modules and their parameters are transformers' own; only the arithmetic is arranged anew:
whole sequences, causal attention, all experts at once. With text alone the three parts of the
multimodal rotary positions are equal, so plain rotary embedding does. That the results are
those of `generate` is what tests/training checks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.parrot.architecture import HEAD_DIM, ROPE_THETA

_MAX_POSITIONS = 2048
EPSILON = 1e-6


def _rotary_table() -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, HEAD_DIM]."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.arange(_MAX_POSITIONS)[:, None] * frequencies
    angles = torch.cat([angles, angles], 1)
    return angles.cos(), angles.sin()


_COS, _SIN = _rotary_table()


def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), weight.to(hidden.dtype), EPSILON)


def rotated(heads: Tensor) -> Tensor:
    """Heads [..., positions, HEAD_DIM] with the rotary positions 0, 1, 2, ... put in."""
    length, half = heads.shape[-2], HEAD_DIM // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
    # In float32 also under autocast: bfloat16 angles would blur the positions.
    return heads * _COS[:length] + turned * _SIN[:length]


def queries_keys_values(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, positions, HEAD_DIM] each; queries and keys are normed and have positions."""
    batch, length, _ = hidden.shape
    projections = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    num_queries, num_keys = (len(weight) // HEAD_DIM for weight in projections[:2])
    heads = F.linear(hidden, torch.cat(projections)).view(batch, length, -1, HEAD_DIM)
    scales = torch.cat(
        [
            attention.q_norm.weight.expand(num_queries, -1),
            attention.k_norm.weight.expand(num_keys, -1),
        ]
    )
    turned = F.rms_norm(heads[:, :, : num_queries + num_keys], (HEAD_DIM,), None, EPSILON) * scales
    turned = rotated(turned.transpose(1, 2)).to(heads.dtype)
    values = heads[:, :, num_queries + num_keys :].transpose(1, 2)
    return turned[:, :num_queries], turned[:, num_queries:], values


def self_attention(attention: Any, hidden: Tensor) -> Tensor:
    """Causal attention over hidden [batch, positions, width].

    Written out: for sequences as short as these the fused kernel's backward takes far longer.
    """
    batch, length, _ = hidden.shape
    queries, keys, values = queries_keys_values(attention, hidden)
    num_queries, num_keys = queries.shape[1], keys.shape[1]
    # Queries that share a key head stand below each other: [batch, key heads, rows, HEAD_DIM].
    rows = num_queries // num_keys * length
    scores = queries.reshape(batch, num_keys, rows, HEAD_DIM) @ keys.mT
    scores = scores.view(batch, num_queries, length, length) + _future(length).to(scores.dtype)
    weights = (scores * HEAD_DIM**-0.5).softmax(-1).to(values.dtype)
    mixed = weights.view(batch, num_keys, rows, length) @ values
    mixed = mixed.view(batch, num_queries, length, HEAD_DIM).transpose(1, 2)
    projected: Tensor = attention.o_proj(mixed.reshape(batch, length, -1))
    return projected


def _future(length: int) -> Tensor:
    """-inf where a position would see a later one, [length, length]."""
    return torch.full((length, length), -torch.inf).triu(1)


def mixture_of_experts(mlp: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The experts' answer, and the loss that keeps all of them busy.

    Every expert computes every position and the router's weights, zero for most, choose:
    with four experts that is faster than sorting positions.
    """
    batch, length, width = hidden.shape
    flat = hidden.reshape(-1, width)
    experts = mlp.gate.num_experts
    probabilities = F.linear(flat, mlp.gate.weight).softmax(-1)
    top, chosen = probabilities.topk(mlp.gate.top_k, -1)
    top = top / top.sum(-1, keepdim=True)
    weights = torch.zeros_like(probabilities).scatter(1, chosen, top)
    balance = experts * ((weights > 0).float().mean(0) * probabilities.mean(0)).sum()

    gate_up = F.linear(flat, mlp.experts.gate_up_proj.reshape(-1, width))
    gate, up = gate_up.view(len(flat), experts, 2, -1).unbind(2)
    inner = F.silu(gate) * up * weights[..., None].to(gate.dtype)
    down = mlp.experts.down_proj.permute(1, 0, 2).reshape(width, -1)
    answer = F.linear(inner.reshape(len(flat), -1), down)
    if hasattr(mlp, "shared_expert"):
        answer = answer + torch.sigmoid(mlp.shared_expert_gate(flat)) * mlp.shared_expert(flat)
    return answer.view(batch, length, width), balance


def decoder_layer(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of Thinker or Talker; its output and its balance loss."""
    hidden = hidden + self_attention(
        layer.self_attn, rms_norm(hidden, layer.input_layernorm.weight)
    )
    answer, balance = mixture_of_experts(
        layer.mlp, rms_norm(hidden, layer.post_attention_layernorm.weight)
    )
    return hidden + answer, balance


def moe_decoder(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """All layers and the last norm; the balance loss is the layers' mean."""
    balances = []
    for layer in model.layers:
        hidden, balance = decoder_layer(layer, hidden)
        balances.append(balance)
    return rms_norm(hidden, model.norm.weight), torch.stack(balances).mean()


def dense_decoder(model: Any, hidden: Tensor) -> Tensor:
    """The code predictor's layers and last norm."""
    for layer in model.layers:
        hidden = hidden + self_attention(
            layer.self_attn, rms_norm(hidden, layer.input_layernorm.weight)
        )
        hidden = hidden + layer.mlp(rms_norm(hidden, layer.post_attention_layernorm.weight))
    return rms_norm(hidden, model.norm.weight)


def init_linears(module: nn.Module, generator: torch.Generator) -> None:
    """Linear layers, experts and routers of a decoder at a scale that trains without warm-up."""
    for part in module.modules():
        # The shared expert's gate, one output, stays near open.
        if isinstance(part, nn.Linear) and part.weight.shape[0] != 1:
            _fan_in(part.weight, generator)
    for name, weight in module.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            _fan_in(weight, generator)
        elif name.endswith("mlp.gate.weight"):
            nn.init.normal_(weight, 0, 0.02, generator=generator)


def _fan_in(weight: Tensor, generator: torch.Generator) -> None:
    nn.init.normal_(weight, 0, 0.7 / math.sqrt(weight.shape[-1]), generator=generator)
