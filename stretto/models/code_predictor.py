"""The residual codebooks of one frame: a short loop of its own, after every Talker step.

    in   hidden of the Talker, code 0                    (positions 0 and 1, one prefill of two)
    then code 1 ── embed ──> code 2 ── embed ──> ...      (one position each)

Four fifths of all the work of a spoken request are these steps (FACTS: 15 steps a frame), and one
step costs nearly the same for one request as for many: so it runs over all requests of a step at
once, on a KV cache of a fixed `num_codebooks + 1` positions that no frame outlives.

The architecture is transformers' `Qwen3OmniMoeTalkerCodePredictor`: dense layers of `decoder.py`,
one embedding and one head per residual codebook.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.decoder import DecoderConfig, DenseMLP, Layer, Rotary, load_layer, rotate
from stretto.models.weights import ParameterSource

# Picks ids [rows] from logits [rows, V] for residual step 0, 1, ...
Pick = Callable[[Tensor, int], Tensor]


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
        max_rows: int,
    ) -> None:
        self.config = config
        self.num_codebooks = num_codebooks
        hidden = config.hidden_size
        self._layers = [
            load_layer(source, f"{prefix}.model.layers.{index}", config)
            for index in range(config.num_layers)
        ]
        self._norm = source.take(f"{prefix}.model.norm.weight", hidden)
        residual = range(num_codebooks - 1)
        self._embeddings = [
            source.take(f"{prefix}.model.codec_embedding.{index}.weight", codebook_size, hidden)
            for index in residual
        ]
        self._heads = [
            source.take(f"{prefix}.lm_head.{index}.weight", codebook_size, hidden)
            for index in residual
        ]
        dtype, device = self._norm.dtype, self._norm.device
        rotary = Rotary(
            theta=config.rope_theta,
            head_dim=config.head_dim,
            positions=num_codebooks + 1,
            dtype=dtype,
            device=device,
        )
        self._cos, self._sin = rotary.cos[:, None], rotary.sin[:, None]
        shape = (
            config.num_layers,
            max_rows,
            config.num_kv_heads,
            num_codebooks + 1,
            config.head_dim,
        )
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    def generate(
        self, hidden: Tensor, first_embedding: Tensor, pick: Pick
    ) -> tuple[Tensor, Tensor]:
        """Residual codes [rows, num_codebooks - 1] and the sum of all code embeddings [rows, H].

        `hidden` is the Talker's normed output, `first_embedding` that of code 0; [rows, H] each.
        """
        rows = hidden.shape[0]
        x = torch.stack((hidden, first_embedding), 1)
        for index, layer in enumerate(self._layers):
            x = self._run_layer(index, layer, x, 0)
        x = x[:, 1:]
        total = first_embedding
        codes = []
        for step, head in enumerate(self._heads):
            normed = F.rms_norm(
                x.view(rows, -1), (x.shape[-1],), self._norm, self.config.rms_norm_eps
            )
            code = pick(F.linear(normed, head), step)
            codes.append(code)
            embedding = F.embedding(code, self._embeddings[step])
            total = total + embedding
            if step < len(self._heads) - 1:
                x = embedding[:, None]
                for index, layer in enumerate(self._layers):
                    x = self._run_layer(index, layer, x, step + 2)
        return torch.stack(codes, 1), total

    def _run_layer(self, index: int, layer: Layer, x: Tensor, start: int) -> Tensor:
        """x [rows, n, H] at positions start .. start + n - 1; n is 2 at the start, then 1."""
        config = self.config
        rows, length, hidden = x.shape
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        weights, eps = layer.attention, config.rms_norm_eps
        end = start + length
        qkv = F.linear(F.rms_norm(x, (hidden,), weights.norm, eps), weights.qkv)
        qkv = qkv.view(rows, length, heads + 2 * kv_heads, head_dim)
        qk = F.rms_norm(qkv[:, :, : heads + kv_heads], (head_dim,), None, eps) * weights.qk_norm
        qk = rotate(qk, self._cos[start:end], self._sin[start:end])
        keys, values = self._keys[index, :rows], self._values[index, :rows]
        keys[:, :, start:end] = qk[:, :, heads:].transpose(1, 2)
        values[:, :, start:end] = qkv[:, :, heads + kv_heads :].transpose(1, 2)
        if length == 1:
            # As in the decoder: a group's query heads stand where query positions would.
            query = qk[:, 0, :heads].view(rows, kv_heads, config.group_size, head_dim)
            out = F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end])
            attended = out.reshape(rows, 1, -1)
        else:
            out = F.scaled_dot_product_attention(
                qk[:, :, :heads].transpose(1, 2),
                keys[:, :, :end],
                values[:, :, :end],
                is_causal=True,
                enable_gqa=config.group_size > 1,
            )
            attended = out.transpose(1, 2).reshape(rows, length, -1)
        x = x + F.linear(attended, weights.out)
        assert isinstance(layer.mlp, DenseMLP)
        return x + layer.mlp(F.rms_norm(x, (hidden,), layer.mlp_norm, eps))
