"""Training dumps: the verdict names the first phase of the first step that differs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.protocol import Dump, DumpedTensor
from assay.runs import SilentProgress
from assay.sites import CallSite, Phase, Site
from assay.verdicts import Outcome, Verdict

WIDTH, STEPS = 8, 3


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
    ]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(WIDTH, WIDTH)})


@dataclass
class Run:
    """A recorded training run. Faults replace its parts.

    keeps_phases: whether what happens between backward and the next forward is recorded, as by
        assay; msprobe records parameters, activations and gradients.
    """

    keeps_phases: bool = True
    model: Any = field(default_factory=build)
    max_norm: float = 0.01
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda model: torch.optim.Adam(
        model.parameters(), lr=0.01
    )
    dtype: torch.dtype = torch.float64
    label_shift: int = 0
    between: Callable[[dict[str, Any]], None] = lambda names: None
    values: dict[Site, Tensor] = field(default_factory=dict)

    def add(self, step: int, module: str, phase: Phase, port: str, value: Tensor) -> None:
        self.values[Site(CallSite(step, module, phase=phase), port)] = value.detach().clone()

    def record(self) -> Dump:
        model = self.model.to(self.dtype)
        optimizer = self.optimizer(model)
        names = dict(model.named_parameters())
        data = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            tokens = torch.randn(2, 4, WIDTH, generator=data, dtype=torch.float64).to(self.dtype)
            tokens.requires_grad_()
            labels = torch.arange(8).reshape(2, 4).roll(self.label_shift)
            self.add(step, "", "inputs", "labels", labels)
            handles = self.hook(step)
            hidden = tokens
            for block in model["layers"]:
                hidden = hidden + block(hidden)
            loss = nn.functional.cross_entropy(
                model["head"](hidden).flatten(0, 1), labels.flatten()
            )
            self.add(step, "", "forward", "loss", loss)
            optimizer.zero_grad()
            loss.backward()
            for handle in handles:
                handle.remove()
            self.add_gradients(step, "backward", names)
            self.between(names)
            total = nn.utils.clip_grad_norm_(names.values(), self.max_norm)
            before = {name: one.detach().clone() for name, one in names.items()}
            optimizer.step()
            if self.keeps_phases:
                self.add(step, "", "clip", "norm", total.reshape(1))
                self.add_gradients(step, "clip", names)
                for name, one in names.items():
                    module, _, short = name.rpartition(".")
                    self.add(step, module, "optimizer", f"update.{short}", one - before[name])
        return self.as_dump()

    def hook(self, step: int) -> list[Any]:
        handles = []
        for name, module in self.model.named_modules():
            if not isinstance(module, (nn.Linear, nn.Tanh, nn.Sequential)):
                continue

            def forward(module: Any, args: Any, output: Tensor, name: str = name) -> None:
                self.add(step, name, "forward", "input.0", args[0])
                self.add(step, name, "forward", "output", output)
                for short, one in module.named_parameters(recurse=False):
                    if not self.keeps_phases:
                        self.add(step, name, "forward", f"parameter.{short}", one)

            def backward(module: Any, passed: Any, arrived: Any, name: str = name) -> None:
                del module
                self.add(step, name, "backward", "output", arrived[0])
                if passed[0] is not None:
                    self.add(step, name, "backward", "input.0", passed[0])

            handles += [
                module.register_forward_hook(forward),
                module.register_full_backward_hook(backward),
            ]
        return handles

    def add_gradients(self, step: int, phase: Phase, names: dict[str, Tensor]) -> None:
        for name, one in names.items():
            module, _, short = name.rpartition(".")
            if one.grad is not None:
                self.add(step, module, phase, f"parameter.{short}", one.grad)

    def as_dump(self) -> Dump:
        tensors = [
            DumpedTensor(
                site, str(site), partial(self.values.__getitem__, site), order,
                dtype=str(one.dtype).removeprefix("torch."), shape=tuple(one.shape),
            )
            for order, (site, one) in enumerate(self.values.items())
        ]  # fmt: skip
        return Dump(format="memory", path=Path("memory"), tensors=tensors, rounded_to="float32")


def judge(actual: Run, *, keeps_phases: bool = True) -> Verdict:
    actual.keeps_phases = keeps_phases
    expected = Run(keeps_phases).record()
    comparison = CompareOptions("golden", "mine")
    return compare_dumps(comparison, expected, actual.record(), SilentProgress()).verdict


def scale_gradient(model: Any) -> Any:
    """Let one module pass on a gradient that is 2 % too large."""
    model["layers"][1][2].register_full_backward_hook(
        lambda module, passed, arrived: tuple(one * 1.02 for one in passed)
    )
    return model


def scale_weight_gradient(model: Any) -> Any:
    model["layers"][1][2].weight.register_hook(lambda gradient: gradient * 1.02)
    return model


def scale_output(model: Any) -> Any:
    model["layers"][1][2].register_forward_hook(lambda module, args, output: output * 1.02)
    return model


def with_beta(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999))


def without_a_block(model: Any) -> torch.optim.Optimizer:
    kept = [one for name, one in model.named_parameters() if not name.startswith("layers.1")]
    return torch.optim.Adam(kept, lr=0.01)


@pytest.mark.parametrize("keeps_phases", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_run_passes(dtype: torch.dtype, keeps_phases: bool) -> None:
    verdict = judge(Run(dtype=dtype), keeps_phases=keeps_phases)
    assert verdict.verdict is Outcome.PASS, verdict.headline
    assert verdict.levels["gradients"].verdict is Outcome.PASS
    assert verdict.levels["updates"].verdict is Outcome.PASS


@pytest.mark.parametrize("keeps_phases", [True, False])
@pytest.mark.parametrize(
    ("make_run", "diagnosis", "phase", "step", "module", "parameter"),
    [
        (lambda: Run(model=scale_output(build())), "module-error", "forward", 0, "layers.1.2", None),
        (lambda: Run(model=scale_gradient(build())), "module-error", "backward", 0, "layers.1.2", None),
        (lambda: Run(model=scale_weight_gradient(build())), "module-error", "backward", 0, "layers.1.2",
         "layers.1.2.weight"),
        (lambda: Run(label_shift=1), "inputs-differ", "inputs", 0, "", None),
        (lambda: Run(optimizer=without_a_block), "frozen-parameters", "optimizer", 0, "layers.1.0",
         "layers.1.0.weight"),
    ],
)  # fmt: skip
def test_the_first_phase_that_differs_is_named(
    make_run: Callable[[], Run], diagnosis: str, phase: Phase, step: int, module: str, parameter: str | None,
    keeps_phases: bool,
) -> None:  # fmt: skip
    verdict = judge(make_run(), keeps_phases=keeps_phases)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    found = verdict.location
    assert (verdict.diagnosis, found.phase, found.step) == (diagnosis, phase, step)
    assert (found.module, found.parameter) == (module, parameter)


def test_clipping_that_was_left_out_is_named() -> None:
    verdict = judge(Run(max_norm=1e9))
    assert verdict.diagnosis == "clip-norm"
    assert verdict.headline == "The clipping of gradients (clip, step 0) is the first that differs."


def test_gradient_that_changes_between_backward_and_the_optimizer_is_not_clipping() -> None:
    verdict = judge(Run(between=lambda names: names["layers.1.2.weight"].grad.mul_(1.5)))

    assert verdict.diagnosis == "missing-reduction"
    assert verdict.headline is not None
    assert verdict.headline.startswith("layers.1.2, parameter weight (clip, step 0)")
    assert verdict.levels["gradients"].reason is not None
    assert verdict.levels["gradients"].reason.endswith(
        "it agrees after backward, and clipping multiplies all gradients by one factor: something"
        " else changes it between backward and the optimizer step"
    )


@pytest.mark.parametrize("keeps_phases", [True, False])
def test_a_wrong_beta_shows_in_the_second_update(keeps_phases: bool) -> None:
    """Adam's first update is the same for all betas."""
    verdict = judge(Run(optimizer=with_beta), keeps_phases=keeps_phases)
    assert verdict.diagnosis == "optimizer-update"
    assert verdict.headline == "The optimizer step (optimizer, step 1) is the first that differs."
    assert verdict.levels["updates"].verdict is Outcome.FAIL


def test_gradients_of_later_micro_batches_and_steps_are_compared() -> None:
    run = Run(model=build())
    dump = run.record()
    last = max(site.at.step for site in run.values)
    site = Site(CallSite(last, "head", phase="backward"), "parameter.weight")
    run.values[site] = run.values[site] * 1.01
    expected = Run().record()
    verdict = compare_dumps(CompareOptions("g", "m"), expected, dump, SilentProgress()).verdict
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.step) == ("backward", last)
    assert verdict.location.parameter == "head.weight"


def test_noise_that_hides_a_tensor_of_zeros_forbids_a_pass() -> None:
    verdict = judge(Run(dtype=torch.bfloat16))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "so much expected noise that zeros would agree" in str(
        verdict.levels["completeness"].reason
    )


def test_equal_values_pass_whatever_noise_is_expected() -> None:
    expected, actual = (Run(dtype=torch.bfloat16).record() for _ in range(2))
    verdict = compare_dumps(CompareOptions("g", "m"), expected, actual, SilentProgress()).verdict
    assert verdict.verdict is Outcome.PASS
