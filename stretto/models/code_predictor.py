"""The residual codebooks of one frame: a short loop of its own, after every Talker step.

    in   hidden of the Talker, code 0                    (positions 0 and 1, one prefill of two)
    then code 1 ── embed ──> code 2 ── embed ──> ...      (one position each)

Four fifths of all the work of a spoken request are these steps (FACTS: 15 steps a frame), and one
step costs nearly the same for one request as for many: so it runs over all requests of a step at
once. Its few keys and values live as long as the frame. Nothing here depends on how many rows there
are, so that a record of it (`engine/recorded_frames.py`) holds for any number.

The architecture is transformers' `Qwen3OmniMoeTalkerCodePredictor`: dense layers of `decoder.py`,
one embedding and one head per residual codebook. In Qwen3-TTS the predictor may be narrower than
the Talker; the embeddings then have the Talker's width, which a projection brings to its own. Of
embeddings that is a function of the code, so it is taken once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.decoder import (
    DecoderConfig,
    DenseMLP,
    Layer,
    Norm,
    Rotary,
    load_layer,
    transposed,
    turn,
    unit_pair,
)
from stretto.models.weights import ParameterSource

# Picks ids [rows] from logits [rows, V] for residual step 0, 1, ...
Pick = Callable[[Tensor, int], Tensor]

# Keys and values of one layer, [rows, kv_heads, positions, D] each.
_Past = tuple[Tensor, Tensor]


class CodePredictor:
    """Codes 1 to `num_codebooks - 1` of a frame, for all rows of a batch."""

    def __init__(
        self,
        source: ParameterSource,
        prefix: str,
        config: DecoderConfig,
        *,
        num_codebooks: int,
        codebook_size: int,
        talker_hidden_size: int | None = None,
    ) -> None:
        """`talker_hidden_size` None: the same as the predictor's own."""
        self.config = config
        self.num_codebooks = num_codebooks
        hidden = config.hidden_size
        outer = talker_hidden_size or hidden
        self._layers = [
            load_layer(source, f"{prefix}.model.layers.{index}", config)
            for index in range(config.num_layers)
        ]
        norm = source.take(f"{prefix}.model.norm.weight", hidden)
        self._norm = Norm(norm, config.rms_norm_eps)
        residual = range(num_codebooks - 1)
        self._embeddings = [
            source.take(f"{prefix}.model.codec_embedding.{index}.weight", codebook_size, outer)
            for index in residual
        ]
        self._projection: _Projection | None = None
        # What the predictor takes for the embedding of a code.
        self._inputs = self._embeddings
        if outer != hidden:
            self._projection = _Projection(
                source, f"{prefix}.small_to_mtp_projection", outer, hidden
            )
            self._inputs = [self._projection(table) for table in self._embeddings]
        self._heads = [
            transposed(source.take(f"{prefix}.lm_head.{index}.weight", codebook_size, hidden))
            for index in residual
        ]
        rotary = Rotary(
            theta=config.rope_theta,
            head_dim=config.head_dim,
            positions=num_codebooks + 1,
            dtype=norm.dtype,
            device=norm.device,
        )
        self._turns = [_Turn(layer, rotary) for layer in self._layers]

    def generate(
        self, hidden: Tensor, first_embedding: Tensor, pick: Pick
    ) -> tuple[Tensor, Tensor]:
        """Residual codes [rows, num_codebooks - 1] and the sum of all code embeddings [rows, H].

        `hidden` is the Talker's normed output, `first_embedding` that of code 0; [rows, H] each.
        """
        x = torch.stack((hidden, first_embedding), 1).flatten(0, 1)
        if self._projection is not None:
            x = self._projection(x)
        pasts: list[_Past] = []
        for layer, turns in zip(self._layers, self._turns, strict=True):
            x, past = self._run_first(layer, turns, x)
            pasts.append(past)
        x = x.view(-1, 2, self.config.hidden_size)[:, 1]
        total = first_embedding
        codes = []
        last = len(self._heads) - 1
        for step, head in enumerate(self._heads):
            code = pick(torch.mm(self._norm(x), head), step)
            codes.append(code)
            embedded = F.embedding(code, self._embeddings[step])
            total = total + embedded
            if step < last:
                x = embedded
                if self._projection is not None:
                    x = F.embedding(code, self._inputs[step])
                for index, (layer, turns) in enumerate(zip(self._layers, self._turns, strict=True)):
                    x, pasts[index] = self._run(layer, turns, x, step + 2, pasts[index])
        return torch.stack(codes, 1), total

    def residual_rows(self, codes: Tensor) -> Tensor:
        """Sums of embeddings of codes 1, 2, ..., int64 [n, num_codebooks - 1] to [n, Talker H]."""
        rows = F.embedding(codes[:, 0], self._embeddings[0])
        for index in range(1, len(self._embeddings)):
            rows = rows + F.embedding(codes[:, index], self._embeddings[index])
        return rows

    def _run(
        self, layer: Layer, turns: _Turn, x: Tensor, position: int, past: _Past
    ) -> tuple[Tensor, _Past]:
        """One layer over one position of every row; x [rows, H]."""
        config, weights = self.config, layer.attention
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = torch.mm(weights.norm(x), weights.qkv).view(-1, heads + 2 * kv_heads, head_dim)
        pair = unit_pair(qkv[:, : heads + kv_heads], config.rms_norm_eps)
        qk = turn(pair, turns.cos[position], turns.minus_sin[position])
        keys = torch.cat((past[0], qk[:, heads:, None]), 2)
        values = torch.cat((past[1], qkv[:, heads + kv_heads :, None]), 2)
        # As in the decoder: a group's query heads stand where query positions would.
        query = qk[:, :heads].view(-1, kv_heads, config.group_size, head_dim)
        attended = F.scaled_dot_product_attention(query, keys, values)
        return _finish(layer, x, attended.reshape(-1, heads * head_dim)), (keys, values)

    def _run_first(self, layer: Layer, turns: _Turn, x: Tensor) -> tuple[Tensor, _Past]:
        """One layer over the first two positions of every row; x [rows * 2, H]."""
        config, weights = self.config, layer.attention
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = torch.mm(weights.norm(x), weights.qkv).view(-1, 2, heads + 2 * kv_heads, head_dim)
        pair = unit_pair(qkv[:, :, : heads + kv_heads], config.rms_norm_eps)
        qk = turn(pair, turns.first_cos, turns.first_minus_sin)
        keys = qk[:, :, heads:].transpose(1, 2)
        values = qkv[:, :, heads + kv_heads :].transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            qk[:, :, :heads].transpose(1, 2),
            keys,
            values,
            is_causal=True,
            enable_gqa=config.group_size > 1,
        )
        attended = attended.transpose(1, 2).reshape(-1, heads * head_dim)
        return _finish(layer, x, attended), (keys, values)


class _Projection:
    """Rows of the Talker [n, Talker H] to rows of the predictor [n, H]."""

    def __init__(self, source: ParameterSource, prefix: str, outer: int, hidden: int) -> None:
        self._weight = transposed(source.take(f"{prefix}.weight", hidden, outer))
        self._bias = source.take(f"{prefix}.bias", hidden)

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.addmm(self._bias, rows, self._weight)


class _Turn:
    """Rotary tables of one layer with the weight of its heads' norm folded in.

    By position, [heads + kv_heads, D] each; positions are the same few in every frame.
    """

    def __init__(self, layer: Layer, rotary: Rotary) -> None:
        weight = layer.attention.qk_weight
        size = weight.shape[-1] // 2
        cos = weight[:, :size] * rotary.cos[:, None]
        minus_sin = weight[:, size // 2 : size // 2 + size] * rotary.minus_sin[:, None]
        self.cos, self.minus_sin = cos.unbind(), minus_sin.unbind()
        self.first_cos, self.first_minus_sin = cos[:2], minus_sin[:2]


def _finish(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """The layer's second half: attention's output and the MLP, added to x."""
    assert isinstance(layer.mlp, DenseMLP)
    x = torch.addmm(x, attended, layer.attention.out)
    return layer.mlp.added_to(x, layer.mlp_norm(x))
