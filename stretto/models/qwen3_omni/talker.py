"""The Talker of Qwen3-Omni: text rows in, one codec frame out per step.

    prompt  user text, <|im_start|> assistant \\n, pad pad pad pad, bos,  first text
    codec                                        + nothink ... speaker pad bos
    step j  embeddings of frame j's codes + text row j + 1 (then eos, then pad)

What it sees of a text token is `text_projection` of the Thinker's embedding of it. The layout is
that of `Qwen3OmniMoeForConditionalGeneration._get_talker_assistant_parts` in transformers.
"""

from __future__ import annotations

from stretto.models.qwen3_omni.spec import TalkerSpec
from stretto.models.talker import CodecTalker, Projection
from stretto.models.weights import ParameterSource


class Talker(CodecTalker):
    def __init__(self, source: ParameterSource, spec: TalkerSpec) -> None:
        super().__init__(source, spec)

        def projection(name: str) -> Projection:
            return Projection(
                source,
                f"talker.{name}",
                size=spec.thinker_hidden_size,
                inner=spec.projection_size,
                to=spec.decoder.hidden_size,
            )

        embedding = source.take(
            "thinker.model.embed_tokens.weight", spec.thinker_vocab_size, spec.thinker_hidden_size
        )
        self.text_rows = projection("text_projection")(embedding)
        # For the rows of audio, image and video positions, which are not functions of their ids.
        self.hidden_projection = projection("hidden_projection")
