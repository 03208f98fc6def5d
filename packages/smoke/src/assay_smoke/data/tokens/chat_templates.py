"""Text and ids of a chat by a tokenizer's own template."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay_smoke.data.protocols import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "Is this text?"


def template_ids(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> tuple[int, ...]:
    """Return the ids of the template's text, empty without a template."""
    if not tokenizer.chat_template:
        return ()
    encoded: Any = tokenizer.apply_chat_template(
        template_messages(tokenizer, messages), return_dict=True
    )
    return tuple(encoded["input_ids"])


def generation_prompt(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """Return the text that the template appends to `messages` for generation, or an empty string."""
    if not tokenizer.chat_template:
        return ""
    without, with_prompt = (
        str(
            tokenizer.apply_chat_template(
                template_messages(tokenizer, messages), tokenize=False, add_generation_prompt=added
            )
        )
        for added in (False, True)
    )
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


def template_messages(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> list[dict[str, Any]]:
    """Convert messages to the form that the template reads: content as text, or as a list of parts.

    Templates of vision models read parts. Given text, some of them write nothing.
    """
    if _reads_text(tokenizer):
        return [{"role": one["role"], "content": one["content"]} for one in messages]
    return [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]}
        for one in messages
    ]


def _reads_text(tokenizer: "PreTrainedTokenizerBase") -> bool:
    probe: list[dict[str, str]] = [{"role": "user", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:  # noqa: BLE001 - templates are code of the model's author
        return False
    return _PROBE in str(text)
