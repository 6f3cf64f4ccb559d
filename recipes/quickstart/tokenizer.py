"""A character tokenizer with exactly as many tokens as the models have logits.

The count matters: verl masks logits beyond ``len(tokenizer)`` while the inference engine does not, so a larger
vocabulary would leave a constant gap between rollout and training log-probabilities.
"""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, TURN_START, TURN_END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
PLAIN_CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
OTHER_CHARACTERS = "äöüßéèñçåøá÷±≤≥≠√π→←✓✗…€£°²³"
VOCABULARY_SIZE = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ``<|im_end|>`` ends every turn and is the end-of-sequence token."""
    tokens = [PAD, UNKNOWN, TURN_START, TURN_END, *PLAIN_CHARACTERS, *OTHER_CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != VOCABULARY_SIZE:
        raise ValueError(f"the character set gives {len(vocabulary)} tokens instead of {VOCABULARY_SIZE}")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def chat_ids(tokenizer: PreTrainedTokenizerFast, user: str) -> list[int]:
    """Token ids of a chat that waits for the assistant's answer to ``user``."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": user}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def reply_ids(tokenizer: PreTrainedTokenizerFast, reply: str) -> list[int]:
    """Token ids of the assistant's ``reply``, with the token that ends it."""
    return [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
