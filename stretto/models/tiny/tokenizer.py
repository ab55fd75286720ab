"""A byte-pair tokenizer with Qwen's special tokens, trained on the spot on a page of prose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Rows of the text embeddings: room beyond what the tokenizer fills.
TEXT_VOCABULARY = 3072
BYTE_PAIR_VOCABULARY = 2944
ROLES = ("system", "user", "assistant")
# Qwen's, in its order, less those for filling in the middle of code.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
# One token each, and part of the text: a reader of the answer gets to see them.
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

PROSE = """\
The harbour was quiet before six in the morning. A woman in a grey coat walked along the wall,
counted the boats, and wrote the number in a small book. There were nineteen of them, one fewer
than on the day before. She did not ask why; she had learned that the sea answers slowly, and
that the people who live beside it answer more slowly still.

"You are early again," said the man who sold coffee from his van. "Would you like the usual?"
"Please," she said, "and something warm to eat, if there is anything left from yesterday."
He laughed. "Nothing is ever left from yesterday. But I can make you toast with honey."

They talked about the weather, as everybody did. It had rained for eleven days, then the wind had
turned, and now the light over the water was so clear that you could see the islands one by one.
The man thought it would hold until Sunday. The woman thought it would not, but she kept it to
herself, because it is pleasant to be wrong about rain, and unpleasant to be right.

What do we know about how children learn to speak? First they listen, for months, long before they
understand a single word. They hear where one sound ends and the next begins; they notice which
sounds come together often, and which never do. Then they try: one syllable, the same one, over and
over, until somebody answers. From there on it goes quickly. At two years they have a few hundred
words, at four they tell stories, at six they argue better than their parents.

A machine can be taught in a similar way, though it needs far more examples. We show it a great
number of sentences and ask it, each time, to guess what follows. Every wrong guess changes it a
little. After a while the guesses get better, and at some point they are good enough that we can
talk with it. It does not know what rain feels like. It knows what people say about rain.

To cook rice, wash it in cold water until the water stays clear, add one and a half times as much
water as rice, bring it to the boil, cover it, and leave it on the lowest heat for twelve minutes.
Do not lift the lid. Let it rest for ten more minutes; then open it, and stir it with a fork.

The train to the north leaves at 7:45 from platform 3 and arrives at 12:10. Tickets cost 42 euros,
or 28 if you book them a week ahead. Change once, at the junction, where you have nine minutes.
If you miss the connection, the next one goes an hour later, and your ticket is still good for it.

I'm not sure what you mean, but I'll do my best to help. Could you tell me a bit more? For example:
how large is the room, how many windows does it have, and which way do they face? It's important,
since the morning sun and the evening sun are quite different things, and we don't want to find out
in July that the bedroom can't be used before midnight.
"""

STEMS = """\
accept act add agree allow answer appear arrange arrive ask attend balance become begin believe
belong borrow bother bring build burn call carry catch change charge check choose claim clean clear
climb close collect come compare complete concern consider contain continue control cook copy
correct cost count cover create cross cut damage dance deal decide deliver depend describe design
destroy develop direct discover discuss divide draw dream dress drink drive drop eat encourage end
enjoy enter escape examine exist expect explain express fail fall feel fight fill find finish fit
fly follow force forget form gather give grow guess handle happen hear help hide hold hope hunt
hurry imagine improve include increase inform intend invite join jump keep kick know laugh lead
learn leave lend lift light like limit link listen live look lose love manage mark matter measure
meet mention mind miss mix move need notice obtain occur offer open operate order own paint pass pay
perform permit pick place plan plant play point pour practise prefer prepare present press prevent
print produce promise protect prove provide pull push put raise reach read realise receive record
reduce refer reflect refuse regard relate remain remember remove repair repeat replace reply report
represent require rest result return reveal ride ring rise roll run save say search seem sell send
separate serve settle shake share shine shoot shout show shut sing sit sleep smell smile solve sort
sound speak spell spend stand start state stay steal stick stop study succeed suffer suggest
supply support suppose surprise survive talk taste teach tell test thank think throw touch train
travel treat trust try turn understand use visit vote wait walk want warn wash waste watch wear
weigh win wish wonder work worry write
"""
ENDINGS = ("", "s", "ed", "ing", "er", "able", "ment", "ful", "ly", "ness", "ation")


def train_tokenizer() -> Tokenizer:
    """Byte pairs over all 256 bytes: any text survives encoding and decoding unchanged."""
    tokenizer = Tokenizer(models.BPE())
    # A newline always stands alone, so that `<|im_start|>assistant\n` is three tokens whatever
    # the answer begins with. No normaliser: NFC, which Qwen has, would change some texts.
    pieces = Regex(r"\n| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_PAIR_VOCABULARY,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def _training_texts() -> Iterator[str]:
    # Often enough that they are merged whole before the vocabulary is full.
    yield from ROLES * 100
    # Prose counts more than the words below, so that common words become single tokens.
    yield from [PROSE] * 10
    for stem, ending in itertools.product(STEMS.split(), ENDINGS):
        yield f" {stem}{ending}"


def tokenizer_config(*, processor_class: str, model_max_length: int) -> dict[str, Any]:
    """For a `tokenizer_config.json`; not complete without a chat template where one is needed."""
    return {
        # Qwen's own class would put its splitting and its normaliser in place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": processor_class,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": model_max_length,
    }
