"""Captures of other libraries against transformers: no false alarm, and planted faults are named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import make_dump
from packages.core.tests.unit.comparison.small_llama import (
    LIBRARIES,
    dump_of,
    make_weights,
    transformers,
)

# By weight, the module that transformers names.
MODULES = {
    "1.q": "model.layers.1.self_attn.q_proj",
    "1.v": "model.layers.1.self_attn.v_proj",
    "2.o": "model.layers.2.self_attn.o_proj",
    "0.up": "model.layers.0.mlp.up_proj",
    "1.down": "model.layers.1.mlp.down_proj",
    "1.norm_2": "model.layers.1.post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}


def judge(library: str, weights: dict[str, Tensor] | None = None, **options: object) -> Verdict:
    comparison = CompareOptions("a", "b", **options)  # type: ignore[arg-type]
    dumps = dump_of(transformers), dump_of(LIBRARIES[library], weights)
    return compare_dumps(comparison, *dumps, SilentProgress()).verdict


@pytest.mark.parametrize("level", [None, "layer", "logits"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_correct_run_never_fails(library: str, level: str | None) -> None:
    verdict = judge(library, level=level)
    assert verdict.verdict is not Outcome.FAIL, verdict.headline
    assert verdict.levels["logits"].verdict is Outcome.PASS


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_correct_run_is_compared_in_every_projection(library: str) -> None:
    lacking = [one.partition(" ")[0] for one in judge(library).unmatched.expected]
    assert not any("_proj" in one or "norm" in one for one in lacking)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_weight_that_is_5_percent_too_large_is_named(library: str, name: str) -> None:
    weights = make_weights()
    weights[name] *= 1.05
    verdict = judge(library, weights)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == MODULES[name]


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": torch.neg, "reversed": lambda one: one.flip(0), "zero": lambda one: 0 * one,
}  # fmt: skip
WRONG_WEIGHTS = ("1.v", "1.down", "0.up")
# First with each library every change and every weight, and each change of each weight with some library.
WRONGLY = [
    pytest.param(
        library, name, change, marks=[pytest.mark.long] if (place - number - shift) % 3 else []
    )
    for number, library in enumerate(LIBRARIES)
    for place, name in enumerate(WRONG_WEIGHTS)
    for shift, change in enumerate(WRONG)
]


@pytest.mark.parametrize(("library", "name", "change"), WRONGLY)
def test_a_wholly_wrong_weight_fails(library: str, name: str, change: str) -> None:
    weights = make_weights()
    weights[name] = WRONG[change](weights[name])
    assert judge(library, weights).verdict is Outcome.FAIL


def test_modules_that_are_called_in_another_order_pair_by_their_values() -> None:
    given, first, second = torch.randn(3, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    ids = {("embed", "input.input_ids", 0): torch.arange(8)[None], ("embed", "output", 0): given}
    expected, actual = (
        make_dump(
            ids
            | {
                (name, port, 0): one
                for name, value in calls
                for port, one in (("input.0", given), ("output", value))
            }
        )
        for calls in (
            [("net.query_proj", first), ("net.key_proj", second)],
            [("body.k_linear", second), ("body.q_linear", first)],
        )
    )
    verdict = compare_dumps(CompareOptions("a", "b"), expected, actual, SilentProgress()).verdict
    assert verdict.verdict is Outcome.PASS
    assert verdict.compared == 6
