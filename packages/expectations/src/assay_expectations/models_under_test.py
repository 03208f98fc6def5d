"""A model with its expectations, with its outputs as a tuple, and in another layout of the same weights.

The other layout fuses projections of one input, and splits all others in two. A device then multiplies matrices of
other sizes and must give the same output.
"""

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.hooks.tensors import iterate_tensors
from assay.models import load_model
from assay.runs import SilentProgress
from assay.verdicts import Verdict
from assay_expectations.capture_and_verify import capture_expectation, verify_expectations
from assay_expectations.observing import find_model
from assay_expectations.records import CaptureOptions, read_expectation

_NUM_TOKENS = 8


class FusedPart(nn.Module):
    """Rows `start` to `stop` of the product with fused weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.start, self.stop = start, stop

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply. Shapes: inputs (..., in); returns (..., stop - start)."""
        whole = functional.linear(inputs, self.weight, self.bias)
        return whole[..., self.start : self.stop]


class TwoParts(nn.Module):
    """A projection that multiplies its weights in two parts."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply. Shapes: inputs (..., in); returns (..., out)."""
        bias: Tensor | None = self.whole.bias
        weights = self.whole.weight.chunk(2)
        biases = (None,) * len(weights) if bias is None else bias.chunk(2)
        parts = [
            functional.linear(inputs, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return torch.cat(parts, dim=-1)


def other_layout(model: nn.Module) -> nn.Module:
    """Replace the projections of a model, in place. A setup function.

    Raises: UsageError if there are none.
    """
    groups = list(_projections_by_input(model))
    if not groups:
        raise UsageError(f"{type(model).__name__} has no torch.nn.Linear")
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        for name, other in zip(names, _laid_out_otherwise(linears), strict=True):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, other)
    return model


def _projections_by_input(model: nn.Module) -> Iterator[list[str]]:
    """Group the projections of each module that read the same tensor, by name."""
    seen: dict[tuple[str, int], list[str]] = {}
    kept: list[Tensor] = []  # keeps tensors alive, because ids of freed tensors are reused

    with ExitStack() as hooks:
        for name, part in model.named_modules():
            if type(part) is not nn.Linear:
                continue

            def note(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                kept.append(inputs[0])
                owner = name.rpartition(".")[0]
                if not any(name in names for names in seen.values()):  # some run several times
                    seen.setdefault((owner, id(inputs[0])), []).append(name)

            hooks.callback(part.register_forward_pre_hook(note).remove)
        device = next(model.parameters()).device
        with torch.no_grad():
            model(input_ids=torch.arange(_NUM_TOKENS, device=device)[None])
    yield from seen.values()


def _laid_out_otherwise(linears: list[nn.Module]) -> list[nn.Module]:
    found = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if len(found) == 1:
        return [TwoParts(found[0])]
    weight = torch.cat([linear.weight.detach() for linear in found])
    biases: list[Tensor | None] = [linear.bias for linear in found]
    bias = None
    if any(one is not None for one in biases):
        bias = torch.cat(
            [
                weight.new_zeros(linear.out_features) if one is None else one.detach()
                for linear, one in zip(found, biases, strict=True)
            ]
        )
    parts: list[nn.Module] = []
    start = 0
    for linear in found:
        stop = start + linear.out_features
        parts.append(FusedPart(weight, bias, start, stop))
        start = stop
    return parts


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
    place: str | None = None
    """Folder or name to load instead of `model`."""

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

    @property
    def source(self) -> str:
        """Return the model that is loaded."""
        return self.place or find_model(self.model, self.files()[0])

    def capture(self) -> Path:
        """Capture an expectation on this machine. Returns: the file."""
        options = CaptureOptions(model=self.model, run=self.run)
        return capture_expectation(options, self.folder, SilentProgress())

    def verify(self, setup: str | None = None) -> Verdict:
        """Verify the model's expectations.

        setup: FILE.py:FUNC to call with the model before it runs.
        """
        return verify_expectations(
            self.files(), self.run, self.scratch, SilentProgress(), setup, model=self.place
        )


def unused_files(folder: Path, models: list[str]) -> list[str]:
    """Describe the expectations in `folder` of models that are not in `models`."""
    found = {file: read_expectation(file).model for file in sorted(folder.glob("*.json"))}
    return [
        f"{file} is of {model}, which is not tested: add --expectation-model {shlex.quote(model)}"
        for file, model in found.items()
        if model not in models
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
    expected, actual = (
        [tensor for _, tensor in iterate_tensors(one, "")] for one in (by_name.to_tuple(), as_tuple)
    )
    if len(expected) != len(actual):
        return [f"{len(actual)} tensors in the tuple, {len(expected)} by name"]
    return [
        f"tensor {number} of the tuple, {list(one.shape)}, differs from the one by name"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True))
        if not torch.equal(one, other)
    ]
