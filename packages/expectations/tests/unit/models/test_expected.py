"""Outputs of a model as a tuple and by name."""

from typing import Any

import pytest

from assay.models import load_model
from assay_expectations.models import expected as expected_module
from assay_expectations.models.expected import tuple_differences


@pytest.mark.parametrize("model", ["micro:llama", "micro:bert"])
def test_clean_models_return_the_same_tensors(model: str) -> None:
    assert tuple_differences(model, "cpu/float32") == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda given: (given[0] * 1.001, *given[1:]), ["tensor 0 of the tuple, [1, 8, 260], differs"]),
        (lambda given: given[:-1], ["1 tensors in the tuple, 6 by name"]),
        (list, ["return_dict=False returns a list"]),
    ],
    ids=["other-values", "one-is-missing", "no-tuple"],
)  # fmt: skip
def test_every_difference_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Any, expected: list[str]
) -> None:
    loaded = load_model("micro:bert", dtype="float32")
    forward = loaded.model.forward

    def changed(*args: Any, return_dict: bool = True, **inputs: Any) -> Any:
        given = forward(*args, return_dict=return_dict, **inputs)
        return given if return_dict else change(given)

    monkeypatch.setattr(loaded.model, "forward", changed)
    monkeypatch.setattr(expected_module, "load_model", lambda *_, **__: loaded)
    found = tuple_differences("micro:bert", "cpu/float32")
    assert [line[: len(one)] for line, one in zip(found, expected, strict=True)] == expected
