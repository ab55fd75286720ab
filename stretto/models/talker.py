"""The part of a Talker that is the same in every model: codes in, codes out.

    code 0 of a frame          by the decoder and a head
    codes 1, 2, ...            by the code predictor
    what a frame is as input   the sum of its codes' embeddings

What a Talker sees of text is a projection of the text embedding: a function of the id alone. So it
is taken once for the whole vocabulary, and rows are looked up. Where text and codes stand in a
prompt is the bridges' knowledge.
"""

from __future__ import annotations

import abc

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.code_predictor import CodePredictor
from stretto.models.decoder import Decoder, transposed
from stretto.models.spec import NUM_SPECIAL_CODEC_IDS, CodecTalkerSpec
from stretto.models.weights import ParameterSource

# Vocabulary rows projected at a time at load: bounds the intermediate activation.
PROJECTION_ROWS = 8192


class CodecTalker(abc.ABC):
    """`text_rows` [text vocabulary, H] is the projected text of every id; a model's own to fill."""

    spec: CodecTalkerSpec
    text_rows: Tensor

    def __init__(self, source: ParameterSource, spec: CodecTalkerSpec) -> None:
        hidden = spec.decoder.hidden_size
        self.spec = spec
        self.decoder = Decoder(source, "talker.model", spec.decoder)
        self._codec_embedding = source.take(
            "talker.model.codec_embedding.weight", spec.vocab_size, hidden
        )
        self._head = transposed(source.take("talker.codec_head.weight", spec.vocab_size, hidden))
        self.predictor = CodePredictor(
            source,
            "talker.code_predictor",
            spec.predictor,
            num_codebooks=spec.num_codebooks,
            codebook_size=spec.codebook_size,
            talker_hidden_size=hidden,
        )
        first_special = spec.vocab_size - NUM_SPECIAL_CODEC_IDS
        self.suppressed = torch.arange(spec.vocab_size, device=self._head.device) >= first_special
        self.suppressed[spec.codec_ids.eos] = False

    def codec_rows(self, codec_ids: Tensor) -> Tensor:
        """Embeddings of code 0 or special codec ids, int64 [n] to [n, H]."""
        return F.embedding(codec_ids, self._codec_embedding)

    def frame_rows(self, codes: Tensor) -> Tensor:
        """What whole frames are as input, int64 [n, num_codebooks] to [n, H]."""
        return self.codec_rows(codes[:, 0]) + self.predictor.residual_rows(codes[:, 1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden rows [n, H] to float32 logits [n, V] of code 0 and the end."""
        return torch.mm(hidden, self._head).to(torch.float32)


class Projection:
    """Rows of one width to rows of another through a hidden layer: [n, from] to [n, to]."""

    def __init__(
        self, source: ParameterSource, prefix: str, *, size: int, inner: int, to: int
    ) -> None:
        self._w1 = source.take(f"{prefix}.linear_fc1.weight", inner, size)
        self._b1 = source.take(f"{prefix}.linear_fc1.bias", inner)
        self._w2 = source.take(f"{prefix}.linear_fc2.weight", to, inner)
        self._b2 = source.take(f"{prefix}.linear_fc2.bias", to)

    def __call__(self, rows: Tensor) -> Tensor:
        parts = [
            F.linear(F.silu(F.linear(part, self._w1, self._b1)), self._w2, self._b2)
            for part in torch.split(rows, PROJECTION_ROWS)
        ]
        return torch.cat(parts)
