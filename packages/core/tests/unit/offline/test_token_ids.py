import pytest
import torch
from torch import Tensor

from assay.offline.pairing.alignment import TokenComparison, align_passes, compare_ids, find_passes
from assay.offline.pairing.passes import Pass
from packages.core.tests.unit.offline.memory_dump import Values, make_dump


def compared(
    expected: list[list[list[int]]], actual: list[list[list[int]]],
    logits: tuple[Tensor, Tensor] | None = None,
) -> TokenComparison:  # fmt: skip
    def passes_of(side: list[list[list[int]]]) -> list[Pass]:
        ids = {("embed", "input.0", step): torch.tensor(one) for step, one in enumerate(side)}
        return find_passes(make_dump(ids))

    def logits_of(prompt: int, position: int) -> tuple[Tensor, Tensor] | None:
        del prompt, position
        return logits

    return compare_ids(align_passes(passes_of(expected), passes_of(actual)), logits_of)


def choosing(expected: int, actual: int) -> tuple[Tensor, Tensor]:
    """Logits (10,) by which each side chooses its token."""
    eye = torch.eye(10)
    return eye[expected], eye[actual]


def test_equal_ids_exclude_nothing() -> None:
    found = compared([[[1, 2]], [[3]]], [[[1, 2]], [[3]]])
    assert (found.num_prompt_tokens, found.num_generated) == (2, 1)
    assert not found.different


def test_another_prompt_is_not_a_generated_token() -> None:
    found = compared([[[1, 2], [5, 6]]], [[[1, 2], [5, 7]]])
    assert [str(one) for one in found.different_prompts] == [
        "prompt 1, position 1: token 7, expected 6"
    ]
    assert found.first_different == {1: 1}


def test_only_the_first_different_token_of_a_prompt_counts() -> None:
    found = compared(
        [[[1, 2], [5, 6]], [[3], [7]], [[4], [8]]], [[[1, 2], [5, 6]], [[3], [9]], [[4], [8]]]
    )
    assert [one.position for one in found.different_generated] == [2]
    assert found.first_different == {1: 2}


@pytest.mark.parametrize(
    ("logits", "is_near_tie"),
    [(choosing(3, 4), True), (choosing(3, 3), False), (None, None)],
)
def test_a_near_tie_needs_the_logits_of_both(
    logits: tuple[Tensor, Tensor] | None, is_near_tie: bool | None
) -> None:
    (different,) = compared([[[1, 2]], [[3]]], [[[1, 2]], [[4]]], logits).different_generated
    assert different.is_near_tie is is_near_tie


IDS, POSITIONS = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 2]])


@pytest.mark.parametrize(
    ("module", "port"),
    [
        ("model.embed_tokens", "input.input_"),  # vLLM 0.32
        ("base_model.embedding", "input.input"),  # ibm-fms 1.13
        ("", "input.x_in"),
        ("", "input.idx"),  # litgpt 0.5
        ("", "input.0"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_ids_are_the_integer_input_of_an_embedding_or_of_the_model(
    module: str, port: str, flat: bool
) -> None:
    others = {
        ("embed_positions", "input.0", 0): POSITIONS,
        ("rotary_emb", "input.args.0", 0): POSITIONS,
        ("", "input.input_pos", 0): POSITIONS,
        ("", "input.attention_mask", 0): torch.ones_like(IDS),
    }
    ids = IDS[0] if flat else IDS
    (found,) = find_passes(make_dump(others | {(module, port, 0): ids}))
    assert found.ids is not None
    assert found.ids.tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(
    "values",
    [
        {("", "input.0", 0): IDS, ("", "input.1", 0): POSITIONS},
        {("embed.wpe", "input.0", 0): POSITIONS},
        {("embed", "output", 0): IDS},
    ],
)
def test_integers_that_may_be_something_else_are_not_ids(values: Values) -> None:
    assert [one.ids for one in find_passes(make_dump(values))] == [None]
