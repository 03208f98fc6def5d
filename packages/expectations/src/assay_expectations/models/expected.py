"""A model with its expectations, and with its outputs as a tuple."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.models import load_model
from assay.runs import SilentProgress
from assay.verdicts import Verdict
from assay_expectations.capturing import capture_expectation
from assay_expectations.records import Weight, read_expectation, weight_differences
from assay_expectations.requests import CaptureOptions
from assay_expectations.verifying import verify_expectations

_NUM_TOKENS = 8


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


def tuple_differences(model: str, run: str) -> list[str]:
    """List the bitwise differences between outputs with `return_dict=False` and outputs by name.

    Hidden states are included, so that there are several tensors.
    Raises: UsageError if the model cannot be loaded.
    """
    opened = parse_run(run)
    device = open_run(opened)
    loaded = load_model(model, dtype=opened.dtype, device=device.torch_device)
    ids = torch.arange(_NUM_TOKENS, device=device.torch_device)[None]
    with torch.no_grad(), device.execution(), device.deterministic():
        by_name = loaded.model(input_ids=ids, output_hidden_states=True)
        as_tuple = loaded.model(input_ids=ids, output_hidden_states=True, return_dict=False)
    if not isinstance(as_tuple, tuple):
        return [f"return_dict=False returns a {type(as_tuple).__name__}"]
    expected, actual = _tensors(by_name.to_tuple()), _tensors(as_tuple)
    if len(expected) != len(actual):
        return [f"{len(actual)} tensors in the tuple, {len(expected)} by name"]
    return [
        f"tensor {number} of the tuple, {list(one.shape)}, differs from the one by name"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True))
        if not torch.equal(one, other)
    ]


def _tensors(value: object) -> list[Tensor]:
    """Return all tensors of a nested tuple, in order, without caches."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
