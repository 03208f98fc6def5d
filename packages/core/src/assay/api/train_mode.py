"""The mutually exclusive modes of `assay check train`: compare some steps, or overfit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.runs import Progress
    from assay.training.check import TrainCheck


@dataclass(frozen=True, slots=True)
class TrainMode:
    """The given options; None for others."""

    steps: int | None
    resume_at: int | None
    learning_rate: float | None
    overfit: bool
    overfit_steps: int | None
    track: str | None

    def check_consistency(self) -> None:
        """Raise UsageError for options that exclude each other."""
        of_steps = {"--steps": self.steps, "--resume-at": self.resume_at}
        of_overfit = {"--overfit-steps": self.overfit_steps, "--track": self.track}
        given = [name for name, value in of_steps.items() if value is not None]
        if self.overfit and given:
            raise UsageError(
                f"{' and '.join(given)} with --overfit: it trains for --overfit-steps, and resumes"
                " from no checkpoint"
            )
        given = [name for name, value in of_overfit.items() if value is not None]
        if not self.overfit and given:
            raise UsageError(f"{' and '.join(given)} without --overfit: nothing would come of it")

    def run(self, check: "TrainCheck", folder: Path, progress: "Progress") -> None:
        """Run the check, and write the verdict into `folder`."""
        from assay.training.check import check_train
        from assay.training.overfit.check import check_overfit, overfit_options

        if self.overfit:
            options = overfit_options(check.options, self.overfit_steps, self.learning_rate)
            check_overfit(replace(check, options=options), folder, progress, self.track)
            return
        given = {
            "steps": self.steps,
            "resume_at": self.resume_at,
            "learning_rate": self.learning_rate,
        }
        update = {name: value for name, value in given.items() if value is not None}
        if self.steps is not None and self.resume_at is None:
            update["resume_at"] = max(1, min(check.options.resume_at, self.steps - 1))
        options = check.options.model_copy(update=update)
        check_train(replace(check, options=options), folder, progress)
