import math

import pytest
import torch

from assay.models.config_files import byte_tokenizer as plain
from assay_bench.task_worker import NanCalls, byte_tokenizer

TEXTS = ["", "a", "  two\n\n spaces ", "naïve — ☃ 漢字", "\x00\x7f\t", "<bos> is text"]


@pytest.mark.parametrize("starts_with_bos", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_match_assays_byte_tokenizer(text: str, starts_with_bos: bool) -> None:
    tokenizer = byte_tokenizer(258, starts_with_bos=starts_with_bos)
    expected = plain(starts_with_bos=starts_with_bos).encode(text)
    if text == "<bos> is text":
        assert tokenizer.encode("< bos >") == plain(starts_with_bos=starts_with_bos).encode(
            "< bos >"
        )
        return
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == text


class Echo(torch.nn.Module):
    def forward(self, logits_BTV: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": logits_BTV}


@pytest.mark.parametrize(
    ("value", "position", "expected"),
    [
        (math.nan, -1, 1),
        (math.inf, -1, 1),
        (-math.inf, -1, 0),  # a masked token
        (math.nan, 0, 0),  # a padded position
        (0.0, -1, 0),
    ],
)
def test_calls_that_give_nan_for_the_next_token_are_counted(
    value: float, position: int, expected: int
) -> None:
    model, counted = Echo(), NanCalls()
    logits_BTV = torch.zeros(2, 3, 5)
    logits_BTV[1, position, 2] = value
    with counted.of(model):
        model(logits_BTV)
        model(torch.zeros(2, 3, 5))
    model(logits_BTV)  # after the task
    assert counted.number == expected
