import pytest

from assay.errors import UsageError
from assay_smoke.matrix.expressions import compile_expression

IDS = ("fsdp-2-lora", "fsdp-4-offload", "ddp-2", "zero1-2-lora-offload")


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("fsdp", {0, 1}),
        ("FSDP", {0, 1}),
        ("fsdp-2", {0}),
        ("lora and offload", {3}),
        ("lora or offload", {0, 1, 3}),
        ("not lora", {1, 2}),
        ("not not lora", {0, 3}),
        # `and` binds closer than `or`, `not` closest.
        ("ddp or lora and offload", {2, 3}),
        ("(ddp or lora) and offload", {3}),
        ("not lora and not ddp", {1}),
        ("not (lora or ddp)", {1}),
        ("(fsdp)and(lora)", {0}),
        ("nothing", set()),
        ("  zero1  ", {3}),
    ],
)
def test_ids_are_chosen_as_pytest_chooses_names(expression: str, chosen: set[int]) -> None:
    matches = compile_expression(expression)
    assert {number for number, name in enumerate(IDS) if matches(name)} == chosen


@pytest.mark.parametrize(
    ("expression", "column", "problem"),
    [
        ("", 1, "a word of an id was expected"),
        ("lora and", 9, "a word of an id was expected"),
        ("and lora", 1, "a word of an id was expected"),
        ("(lora", 6, "a closing parenthesis was expected"),
        ("lora)", 5, "and, or, or the end was expected"),
        ("lora ddp", 6, "and, or, or the end was expected"),
        ("lora & ddp", 6, "'&' cannot be in an id"),
        ("()", 2, "a word of an id was expected"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_column(
    expression: str, column: int, problem: str
) -> None:
    with pytest.raises(UsageError) as raised:
        compile_expression(expression)
    assert str(raised.value).startswith(f"-k {expression!r}: {problem} at column {column};")
