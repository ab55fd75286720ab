"""The Talker: text rows in, one codec frame out per step.

    prompt  user text, <|im_start|> assistant \\n, pad pad pad pad, bos,  first text
    codec                                        + nothink ... speaker pad bos
    step j  embeddings of frame j's codes + text row j + 1 (then eos, then pad)

What the Talker sees of a text token is `text_projection` of the Thinker's embedding of it: a
function of the id alone. So it is taken once for the whole vocabulary, and rows are looked up.
The layout is that of `Qwen3OmniMoeForConditionalGeneration._get_talker_assistant_parts` in
transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.code_predictor import CodePredictor
from stretto.models.decoder import Decoder, transposed
from stretto.models.qwen3_omni.spec import NUM_SPECIAL_CODEC_IDS, TalkerSpec
from stretto.models.weights import ParameterSource

# Vocabulary rows projected at a time at load: bounds the intermediate activation.
PROJECTION_ROWS = 8192


class Talker:
    """`text_rows` [thinker vocabulary, H] is the projected text of every id."""

    def __init__(self, source: ParameterSource, spec: TalkerSpec, *, max_rows: int) -> None:
        hidden, thinker_hidden = spec.decoder.hidden_size, spec.thinker_hidden_size
        vocab = spec.thinker_vocab_size
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
            max_rows=max_rows,
        )
        embedding = source.take("thinker.model.embed_tokens.weight", vocab, thinker_hidden)
        self.text_rows = _Projection(source, "talker.text_projection", spec)(embedding)
        # For the rows of audio, image and video positions, which are not functions of their ids.
        self.hidden_projection = _Projection(source, "talker.hidden_projection", spec)
        first_special = spec.vocab_size - NUM_SPECIAL_CODEC_IDS
        self.suppressed = torch.arange(spec.vocab_size, device=self._head.device) >= first_special
        self.suppressed[spec.codec_ids.eos] = False

    def codec_rows(self, codec_ids: Tensor) -> Tensor:
        """Embeddings of code 0 or special codec ids, int64 [n] to [n, H]."""
        return F.embedding(codec_ids, self._codec_embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden rows [n, H] to float32 logits [n, V] of code 0 and the end."""
        return torch.mm(hidden, self._head).to(torch.float32)


class _Projection:
    """Rows of the Thinker [n, thinker H] to rows of the Talker [n, H]."""

    def __init__(self, source: ParameterSource, prefix: str, spec: TalkerSpec) -> None:
        hidden, inner = spec.decoder.hidden_size, spec.projection_size
        self._w1 = source.take(f"{prefix}.linear_fc1.weight", inner, spec.thinker_hidden_size)
        self._b1 = source.take(f"{prefix}.linear_fc1.bias", inner)
        self._w2 = source.take(f"{prefix}.linear_fc2.weight", hidden, inner)
        self._b2 = source.take(f"{prefix}.linear_fc2.bias", hidden)

    def __call__(self, rows: Tensor) -> Tensor:
        parts = [
            F.linear(F.silu(F.linear(part, self._w1, self._b1)), self._w2, self._b2)
            for part in torch.split(rows, PROJECTION_ROWS)
        ]
        return torch.cat(parts)
