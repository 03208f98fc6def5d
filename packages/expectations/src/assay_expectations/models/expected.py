"""A model with its expectations."""

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
    """A model that is verified by its expectations."""

    model: str
    run: str
    """DEVICE/DTYPE."""
    folder: Path
    """Folder of the expectations of all models."""
    scratch: Path
    """Folder for the files of runs."""

    def files(self) -> list[Path]:
        """List the model's expectations, on any machine. Raises: UsageError if there is none."""
        found = [
            file
            for file in sorted(self.folder.glob("*.json"))
            if read_expectation(file).model == self.model
        ]
        if not found:
            raise UsageError(
                f"{self.folder} has no expectation of {self.model}; on a trusted device:"
                f" --capture-expectation --expectation-folder DIR --assay-device {self.run}"
            )
        return found

    def capture(self) -> Path:
        """Capture an expectation on this machine. Returns: the file."""
        options = CaptureOptions(model=self.model, run=self.run)
        return capture_expectation(options, self.folder, SilentProgress())

    def verify(self, setup: str | None = None) -> Verdict:
        """Verify the model's expectations.

        setup: FILE.py:FUNC to call with the model before it runs.
        """
        return verify_expectations(self.files(), self.run, self.scratch, SilentProgress(), setup)

    def weight_differences(self) -> list[str]:
        """List the differences between stored and captured weights."""
        stored = load_model(self.model, dtype="float32").stored_weights
        here = {name: Weight.of(one) for name, one in stored.items()}
        return [
            f"{file.name}: {difference}"
            for file in self.files()
            for difference in weight_differences(read_expectation(file).key.content.weights, here)
        ]


def unused_files(folder: Path, models: list[str]) -> list[Path]:
    """List expectations in `folder` of models that are not in `models`."""
    return [
        file for file in sorted(folder.glob("*.json")) if read_expectation(file).model not in models
    ]
