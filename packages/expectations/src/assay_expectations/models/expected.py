"""One model and what was captured of it, on any machine."""

from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError
from assay.models import load_model
from assay.runs import SilentProgress
from assay.verdicts import Verdict
from assay_expectations.capturing import CaptureOptions, capture_expectation
from assay_expectations.records import Weight, read_expectation, weight_differences
from assay_expectations.verifying import verify_expectations


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """A model that is held to what was captured of it.

    run: as DEVICE/DTYPE; folder: of the expectations of all models; scratch: for the files of runs.
    """

    model: str
    run: str
    folder: Path
    scratch: Path

    def files(self) -> list[Path]:
        """Its expectations, those of other machines too. Raises: UsageError if there is none."""
        found = [
            file
            for file in sorted(self.folder.glob("*.json"))
            if read_expectation(file).model == self.model
        ]
        if not found:
            raise UsageError(
                f"there is no expectation of {self.model} in {self.folder}; where it is trusted:"
                f" --capture-expectation --expectation-folder DIR --assay-device {self.run}"
            )
        return found

    def capture(self) -> Path:
        """Write an expectation of this machine. Returns: the file."""
        options = CaptureOptions(model=self.model, run=self.run)
        return capture_expectation(options, self.folder, SilentProgress())

    def verify(self, setup: str | None = None) -> Verdict:
        """Hold its output to its expectations.

        setup: FILE.py:FUNC, called with the model before it runs.
        """
        return verify_expectations(self.files(), self.run, self.scratch, SilentProgress(), setup)

    def weight_differences(self) -> list[str]:
        """In what names, dtypes, shapes or values of its stored weights are not those captured."""
        stored = load_model(self.model, dtype="float32").stored_weights
        here = {name: Weight.of(one) for name, one in stored.items()}
        return [
            f"{file.name}: {difference}"
            for file in self.files()
            for difference in weight_differences(read_expectation(file).key.content.weights, here)
        ]


def unused_files(folder: Path, models: list[str]) -> list[Path]:
    """Expectations in `folder` of models that nobody tries."""
    return [
        file for file in sorted(folder.glob("*.json")) if read_expectation(file).model not in models
    ]
