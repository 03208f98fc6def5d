"""Options of `assay check train` that exclude one another."""

import pytest

from assay.api.train_mode import TrainMode
from assay.errors import UsageError

NONE = {
    "steps": None, "resume_at": None, "learning_rate": None, "overfit": False,
    "overfit_steps": None, "track": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overfit": True, "resume_at": 2}, "--resume-at with --overfit"),
        ({"overfit": True, "steps": 3, "resume_at": 2}, "--steps and --resume-at with --overfit"),
        ({"overfit_steps": 9}, "--overfit-steps without --overfit"),
        ({"track": "wandb"}, "--track without --overfit"),
    ],
)
def test_option_without_effect_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainMode(**{**NONE, **given}).check_consistency()  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"steps": 4}, {"overfit": True, "track": "wandb"}])
def test_options_that_go_together_are_taken(given: dict[str, object]) -> None:
    mode = TrainMode(**{**NONE, **given})  # type: ignore[arg-type]
    mode.check_consistency()
    assert mode.overfit is bool(given.get("overfit"))
