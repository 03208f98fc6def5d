"""Text and ids of a chat by a tokenizer's own template."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay_smoke.data.protocols import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_ids(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> tuple[int, ...]:
    """The ids that the template gives; none without a template."""
    if not tokenizer.chat_template:
        return ()
    encoded: Any = tokenizer.apply_chat_template(_plain(messages), return_dict=True)
    return tuple(encoded["input_ids"])


def generation_prompt(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> str:
    """What the template writes behind `messages` for the assistant to go on from; else empty."""
    if not tokenizer.chat_template:
        return ""
    without, with_prompt = (
        str(
            tokenizer.apply_chat_template(
                _plain(messages), tokenize=False, add_generation_prompt=added
            )
        )
        for added in (False, True)
    )
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]
