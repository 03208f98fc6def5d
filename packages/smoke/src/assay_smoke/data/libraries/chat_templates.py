"""Chats and labels by transformers' apply_chat_template."""

import re
from collections.abc import Sequence
from typing import Any

from assay_smoke.data.protocols import IGNORED, Message, RenderedChat, Tokenizer
from assay_smoke.data.tokens.chats import template_messages
from assay_smoke.data.tokens.micro_tokenizer import micro_tokenizer


def marks_assistant(tokenizer: Tokenizer) -> bool:
    """Return whether the template marks the assistant's tokens. Without marks there is no mask."""
    template: object = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else [template]
    return any(re.search(r"{%[-+]? generation", str(one)) for one in templates)


def render_by_template(
    tokenizer: Tokenizer, messages: Sequence[Message], max_length: int | None
) -> RenderedChat:
    """Render by the template, with labels at transformers' assistant mask."""
    options: dict[str, Any] = {"return_assistant_tokens_mask": marks_assistant(tokenizer)}
    if max_length is not None:
        options |= {"truncation": True, "max_length": max_length}
    chat = template_messages(tokenizer, messages)
    encoded: Any = tokenizer.apply_chat_template(chat, return_dict=True, **options)
    ids = list(encoded["input_ids"])
    mask = encoded.get("assistant_masks", [0] * len(ids))
    labels = [id_ if marked else IGNORED for id_, marked in zip(ids, mask, strict=True)]
    return RenderedChat(input_ids=ids, labels=labels)


def micro_tokenizers() -> list[Tokenizer]:
    """Return tokenizers with and without BOS, padding with their own token and with EOS."""
    return [
        micro_tokenizer("own", "nobody"),
        micro_tokenizer("eos", "template"),
        micro_tokenizer("own", "both"),
    ]


def micro_tokenizers_by_case() -> dict[str, list[Tokenizer]]:
    """Return tokenizers by a description of their special feature, empty for usual ones."""
    cutting_left = micro_tokenizer()
    cutting_left.truncation_side = "left"
    in_two_blocks = micro_tokenizer()
    in_two_blocks.chat_template = str(in_two_blocks.chat_template).replace(
        " + '<|eos|>' }}{% endgeneration %}",
        " }}{% endgeneration %}{% generation %}{{ '<|eos|>' }}{% endgeneration %}",
        1,
    )
    return {
        "": micro_tokenizers(),
        ", truncation_side left": [cutting_left],
        ", text and end in two generation blocks": [in_two_blocks],
    }
