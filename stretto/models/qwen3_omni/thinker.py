"""The Thinker's text model: token ids to hidden rows, hidden rows to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.decoder import Decoder, transposed
from stretto.models.qwen3_omni.spec import ThinkerSpec
from stretto.models.weights import ParameterSource


class Thinker:
    def __init__(self, source: ParameterSource, spec: ThinkerSpec) -> None:
        hidden = spec.decoder.hidden_size
        self._embedding = source.take("thinker.model.embed_tokens.weight", spec.vocab_size, hidden)
        self.decoder = Decoder(source, "thinker.model", spec.decoder)
        self._head = transposed(source.take("thinker.lm_head.weight", spec.vocab_size, hidden))

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [n] to [n, H]."""
        return F.embedding(token_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden rows [n, H] to float32 logits [n, V]."""
        return torch.mm(hidden, self._head).to(torch.float32)
