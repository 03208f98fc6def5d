"""Log-likelihoods of a model that is a table: logits depend on the last byte alone.

Shapes: B requests, T tokens, V vocabulary.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.devices.cpu import CpuDevice
from assay.errors import UsageError
from assay_bench.language_model import AssayLM

VOCABULARY = 260
BEGIN, END, PAD = 256, 257, 258
WEIGHT = 3.0


class Table:
    """After byte x, byte x + 1 is e**3 times as likely as any other."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        assert ((input_ids == PAD) == (attention_mask == 0)).all()
        self.lengths.append(input_ids.shape[1])
        logits_BTV = torch.zeros(*input_ids.shape, VOCABULARY)
        following = (input_ids + 1).clamp(max=VOCABULARY - 1)
        return SimpleNamespace(logits=logits_BTV.scatter(-1, following[..., None], WEIGHT))


def language_model(model: Any, max_positions: int | None = None) -> AssayLM:
    loaded: Any = SimpleNamespace(
        model=model,
        encode=lambda text: [BEGIN, *text.encode()],
        eos_token_ids=(END,),
        pad_token_id=PAD,
        max_positions=max_positions,
    )
    return AssayLM(loaded, CpuDevice())


def ask(lm: AssayLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])


NORMALISER = math.log(VOCABULARY - 1 + math.exp(WEIGHT))
LIKELY, OTHER = WEIGHT - NORMALISER, -NORMALISER


def test_a_likelihood_is_that_of_the_continuation_alone() -> None:
    answers = ask(
        language_model(Table()), ("ab", "cd"), ("ab", "cx"), ("b", "xyz"), ("long text", "u")
    )
    assert [greedy for _, greedy in answers] == [True, False, False, True]
    assert [total for total, _ in answers] == pytest.approx(
        [2 * LIKELY, LIKELY + OTHER, OTHER + 2 * LIKELY, LIKELY]
    )


def test_many_requests_are_answered_in_their_order() -> None:
    pairs = [("a" * (1 + number % 7), "b" if number % 2 else "z") for number in range(100)]
    answers = ask(language_model(Table()), *pairs)
    assert [greedy for _, greedy in answers] == [bool(number % 2) for number in range(100)]


def test_what_is_too_long_loses_its_beginning() -> None:
    table = Table()
    ((total, greedy),) = ask(language_model(table, max_positions=4), ("abcdefgh", "ij"))
    assert table.lengths == [4]
    assert greedy
    assert total == pytest.approx(2 * LIKELY)


def test_an_empty_context_is_the_end_token() -> None:
    # 257 is followed by 258: the begin token that the text starts with is another.
    ((total, greedy),) = ask(language_model(Table()), ("", "ab"))
    assert not greedy
    assert total == pytest.approx(2 * OTHER + LIKELY)


def test_nan_is_counted() -> None:
    class Broken(Table):
        def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            answer = super().__call__(input_ids, attention_mask)
            answer.logits[0] = torch.nan
            return answer

    lm = language_model(Broken())
    answers = ask(lm, ("a", "b"), ("b", "c"))
    assert lm.num_non_finite == 1
    assert sum(math.isnan(total) for total, _ in answers) == 1


def test_other_kinds_of_tasks_are_refused() -> None:
    lm = language_model(Table())
    with pytest.raises(UsageError, match="generate are not there yet"):
        lm.generate_until([])
    with pytest.raises(UsageError, match="whole texts are not there yet"):
        lm.loglikelihood_rolling([])
