"""Elements of Adam's updates whose gradient is near zero may have any sign."""

import math

import torch

from assay.offline.measuring.pair_values import excuse_sign_flips


def test_a_few_reversed_elements_are_excused_and_counted() -> None:
    reference = torch.ones(64, 4)
    update = reference.clone()
    update[5, 2] = -1.0

    excused, count = excuse_sign_flips(update, reference)

    assert count == 1
    assert torch.equal(excused, update)


def test_more_reversed_elements_stay_wrong() -> None:
    reference = torch.ones(64, 4)
    update = reference.clone()
    update[:5, 2] = -1.0

    excused, count = excuse_sign_flips(update, reference)

    assert count == 3
    assert int((excused != update).sum()) == 2


def test_errors_that_no_flip_explains_are_not_excused() -> None:
    reference = torch.ones(64, 4)
    wrong = reference.clone()
    wrong[5, 2] = -1.5
    for update in (reference * 1.1, wrong, torch.full((64, 4), math.nan)):
        excused, count = excuse_sign_flips(update, reference)
        assert (count, excused is reference or torch.equal(excused, reference)) == (0, True)


def test_small_parameters_have_no_excuse() -> None:
    reference = torch.ones(63)
    assert excuse_sign_flips(-reference, reference) == (reference, 0)
