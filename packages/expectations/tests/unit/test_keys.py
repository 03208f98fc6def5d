"""Descriptions of differences between keys."""

from assay_expectations.records import (
    Weight,
    content_differences,
    machine_differences,
    value_differences,
)
from packages.expectations.tests.unit.sample_expectations import CONTENT, MACHINE, WEIGHT

OTHER_VALUES = WEIGHT.model_copy(update={"hash": "h2"})
TRANSPOSED = WEIGHT.model_copy(update={"shape": [3, 2], "hash": "h3"})


def with_weights(**weights: Weight) -> list[str]:
    """The differences from a checkpoint with the weights "a" and "b"."""
    named = {name: weights[name] for name in weights}
    expected = CONTENT.model_copy(update={"weights": {"a": WEIGHT, "b": OTHER_VALUES}})
    return content_differences(expected, CONTENT.model_copy(update={"weights": named}))


def test_equal_content_has_no_differences() -> None:
    assert content_differences(CONTENT, CONTENT.model_copy(deep=True)) == []


def test_renamed_weight_is_found_by_its_values() -> None:
    assert with_weights(a=WEIGHT, c=OTHER_VALUES) == ["renamed weights (1): b is now c"]


def test_missing_and_new_weights_are_named() -> None:
    assert with_weights(a=WEIGHT, c=TRANSPOSED) == [
        "missing weights (1): b",
        "new weights (1): c",
    ]


def test_changed_values_and_formats_are_distinguished() -> None:
    assert with_weights(a=TRANSPOSED, b=WEIGHT) == [
        "weights with a different dtype or shape (1): a is BF16 [3, 2], expected BF16 [2, 3]",
        "weights with different values (1 of 2): b",
    ]


def test_different_inputs_and_settings_are_named() -> None:
    settings = CONTENT.settings.model_copy(update={"seed": 1})
    other = CONTENT.model_copy(
        update={"tokenizer_hash": "x", "prompts_hash": "x", "settings": settings}
    )
    assert content_differences(CONTENT, other) == [
        "different tokenizer",
        "different prompts",
        "seed is 1, expected 0",
    ]


def test_machines_differ_in_named_parts() -> None:
    other = MACHINE.model_copy(update={"architecture": "a2"})
    assert machine_differences(MACHINE, other) == ["architecture is a2, expected a1"]
    assert machine_differences(MACHINE, MACHINE) == []


def test_values_of_only_one_side_are_absent_on_the_other() -> None:
    assert value_differences({"driver": "7", "torch": "1"}, {"runtime": "1", "torch": "1"}) == [
        "driver is absent, expected 7",
        "runtime is 1, expected absent",
    ]
