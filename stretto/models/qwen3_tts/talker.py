"""The Talker of Qwen3-TTS: it reads a text out by itself, one codec frame per step.

The same decoder as Qwen3-Omni's Talker, with dense layers, and a text embedding of its own, which
`text_projection` brings to its width. Positions of the reference's three rotary axes are always
equal, which makes its rotary embedding the plain one.
"""

from __future__ import annotations

from stretto.models.qwen3_tts.spec import TtsTalkerSpec
from stretto.models.talker import CodecTalker, Projection
from stretto.models.weights import ParameterSource


class Talker(CodecTalker):
    def __init__(self, source: ParameterSource, spec: TtsTalkerSpec) -> None:
        super().__init__(source, spec)
        text_hidden = spec.text_hidden_size
        projection = Projection(
            source,
            "talker.text_projection",
            size=text_hidden,
            inner=text_hidden,
            to=spec.decoder.hidden_size,
        )
        embedding = source.take(
            "talker.model.text_embedding.weight", spec.text_vocab_size, text_hidden
        )
        self.text_rows = projection(embedding)
