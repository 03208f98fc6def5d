"""Options of `assay check train` that exclude one another."""

import pytest

from assay.api.checks import refuse_other_mode
from assay.errors import UsageError

OF_STEPS = ("--steps", "--resume-at")
OF_OVERFIT = ("--overfit-steps", "--track")


def check_mode(given: dict[str, object], *, overfit: bool) -> None:
    of_steps, of_overfit = (
        {name: given.get(name) for name in names} for names in (OF_STEPS, OF_OVERFIT)
    )
    refuse_other_mode(of_steps, of_overfit, overfit=overfit)


@pytest.mark.parametrize(
    ("given", "overfit", "message"),
    [
        ({"--resume-at": 2}, True, "--resume-at with --overfit"),
        ({"--steps": 3, "--resume-at": 2}, True, "--steps and --resume-at with --overfit"),
        ({"--overfit-steps": 9}, False, "--overfit-steps without --overfit"),
        ({"--track": "wandb"}, False, "--track without --overfit"),
    ],
)
def test_option_without_effect_is_refused(
    given: dict[str, object], overfit: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_mode(given, overfit=overfit)


@pytest.mark.parametrize(
    ("given", "overfit"), [({}, False), ({"--steps": 4}, False), ({"--track": "wandb"}, True)]
)
def test_options_that_go_together_are_taken(given: dict[str, object], overfit: bool) -> None:
    check_mode(given, overfit=overfit)
