"""When other values are another representation, and when they are an error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.generate import float64_rerun
from assay.generate.capture import capture_golden
from assay.generate.float64_rerun import (
    Differences,
    FailedPorts,
    PortDifference,
    is_representation,
    record_equivalence,
    verify_equivalence,
)
from assay.generate.golden import GoldenSection
from assay.generate.passes import run_forced
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.judge.replays import Judged
from assay.judge.results import PortResult
from assay.models import load_model
from assay.runs import SilentProgress
from assay.stages import Stage
from assay.statistics import Statistic
from assay.verdicts import Ratio

STAGE = Stage("model.layers.1.mlp")


def failed(port: str, error: float, statistic: Statistic = "replay-tensor") -> Judged:
    """A port whose values are wrong by this share of themselves."""
    result = PortResult(STAGE.module, port, STAGE, 0, "bfloat16", "MLP")
    expected = torch.ones(4, 4, dtype=torch.float64)
    address = torch.zeros(4, dtype=torch.long)
    result.sums.add(expected * (1 + error), expected, address, address)
    return Judged.of(Ratio(statistic, error, 1e-3), 3.0, result)


def in_float64(port: str, error: float, different: int = 0) -> Differences:
    return {(STAGE.module, port): PortDifference(error, different)}


def test_values_that_differ_as_much_in_float64_are_a_representation() -> None:
    assert is_representation([failed("output", 1.0)], in_float64("output", 0.9))


def test_error_that_float64_does_not_have_is_one_of_precision() -> None:
    assert not is_representation([failed("output", 0.1)], in_float64("output", 0.001))
    assert not is_representation([failed("output", 0.1)], {})
    assert not is_representation([], None)


def test_larger_error_in_float64_does_not_explain_a_smaller_one() -> None:
    assert not is_representation([failed("output", 0.02)], in_float64("output", 1.4))


def test_every_port_that_failed_counts() -> None:
    both = [failed("output.0", 1.0), failed("output.1", 0.3)]

    first, second = in_float64("output.0", 1.0), in_float64("output.1", 0.3)

    assert not is_representation(both, first)
    assert is_representation(both, first | second)


@pytest.mark.parametrize(("different", "excused"), [(3, True), (0, False)])
def test_indices_are_excused_by_indices_alone(different: int, excused: bool) -> None:
    item = failed("output", 1.0, "exact")

    assert is_representation([item], in_float64("output", 1.0, different)) is excused


def test_errors_are_not_excused_by_indices() -> None:
    assert not is_representation([failed("output", 0.3)], in_float64("output", 0.0, different=3))


def test_nothing_excuses_what_is_not_finite() -> None:
    item = failed("output", 0.3, "non-finite")

    assert not is_representation([item], in_float64("output", 1.0, different=3))


MODEL = "micro:llama?trained=0"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(MODEL, tmp_path_factory.mktemp("captured") / "golden")


def capture(model: str, folder: Path) -> Path:
    prompts = folder.with_name("prompts.jsonl")
    prompts.write_text('{"ids": [65, 66, 67]}\n' * 3)
    spec = GoldenSpec(
        model=model,
        reference=parse_run("cpu/float32"),
        noise_for=["bfloat16"],
        inputs=InputOptions(max_new_tokens=2, prompts=str(prompts), batch_size=2),
        folder=folder,
    )
    capture_golden(spec, SilentProgress())
    return folder


SETUPS = '''
import torch

ROTARY, DOWN = "model.rotary_emb", "model.layers.1.mlp.down_proj"


def same(model): pass


def head_1001(model): model.lm_head.weight.data.mul_(1.001)


def positions_shifted(model):
    rotary = model.get_submodule(ROTARY)
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids + 7)


def units_permuted(model):
    mlp = model.get_submodule("model.layers.1.mlp")
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data.copy_(linear.weight.data.flip(0))
    mlp.down_proj.weight.data.copy_(mlp.down_proj.weight.data.flip(1))


def scaled_while_watched(model):
    """Its logits agree in float64: the fault is in the run with hooks alone."""
    linear = model.get_submodule(DOWN)
    forward = linear.forward
    linear.forward = lambda x: forward(x) * (1.02 if linear._forward_hooks else 1.0)


def up_projection_105(model):
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    linear.register_forward_hook(lambda module, inputs, output: output * 1.05)


def differences_are_zero(model):
    head_1001(model)
    torch.Tensor.__sub__ = lambda one, other: torch.zeros_like(one)
'''
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def request_for(golden: Path, tmp_path: Path) -> Callable[..., FailedPorts]:
    setups = tmp_path / "setups.py"
    setups.write_text(SETUPS)

    def make(setup: str, module: str = DOWN, **options: Any) -> FailedPorts:
        check = GenerateCheck(
            model=MODEL,
            candidate=parse_run("cpu/bfloat16"),
            golden=golden,
            folder=tmp_path,
            setup=f"{setups}:{setup}",
            **options,
        )
        return FailedPorts(
            check, [(module, module, port) for port in ("output", "output.0", "output.1")]
        )

    return make


MakeRequest = Callable[..., FailedPorts]


@pytest.mark.parametrize(
    ("setup", "module", "error"),
    [("positions_shifted", "model.rotary_emb", 0.1), ("units_permuted", DOWN, 0.5)],
)
def test_recorded_values_and_weights_give_the_yardstick_its_logits(
    request_for: MakeRequest, setup: str, module: str, error: float
) -> None:
    request = request_for(setup, module)

    assert record_equivalence(request, SilentProgress())
    found = verify_equivalence(request, SilentProgress())

    assert found is not None
    assert max(one.relative_error for key, one in found.items() if key[0] == module) > error


def test_logits_of_the_candidate_do_not_acquit_its_values(request_for: MakeRequest) -> None:
    request = request_for("scaled_while_watched")

    assert record_equivalence(request, SilentProgress())
    assert verify_equivalence(request, SilentProgress()) is None


def test_logits_that_nothing_in_a_stage_changes_do_not_acquit_its_values(
    request_for: MakeRequest, tmp_path: Path
) -> None:
    """As codes of a codebook, which a small error leaves as they are."""
    model: Any = load_model(MODEL, dtype="float32").model
    nn.init.zeros_(model.get_submodule(DOWN).weight)
    model.save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    request = request_for("up_projection_105", "model.layers.1.mlp.up_proj")
    golden = capture(folder, tmp_path / "golden")
    request = request._replace(check=replace(request.check, model=folder, golden=golden))

    assert record_equivalence(request, SilentProgress())
    assert verify_equivalence(request, SilentProgress()) is None


def test_arithmetic_that_the_candidate_patched_does_not_acquit_it(
    request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for("differences_are_zero")
    monkeypatch.setattr(torch.Tensor, "__sub__", torch.Tensor.__sub__)

    assert record_equivalence(request, SilentProgress())
    monkeypatch.undo()  # as in the trusted process
    assert verify_equivalence(request, SilentProgress()) is None


@pytest.mark.parametrize(("setup", "batches_run"), [("same", "all"), ("head_1001", "the first")])
def test_first_batch_that_differs_ends_the_run(
    golden: Path,
    request_for: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    setup: str,
    batches_run: str,
) -> None:
    ran: list[Any] = []

    def count(*arguments: Any) -> Any:
        ran.append(arguments)
        return run_forced(*arguments)

    monkeypatch.setattr(float64_rerun, "run_forced", count)

    claimed = record_equivalence(request_for(setup), SilentProgress())

    num_batches = len(GoldenSection.open(golden, "bfloat16").batches)
    assert num_batches > 1
    assert claimed is (batches_run == "all")
    assert len(ran) == (num_batches if batches_run == "all" else 1)


def test_logits_of_a_float32_yardstick_are_not_compared_in_float64(
    golden: Path, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = GoldenSection.open(golden, "bfloat16")
    section.entry.yardstick_dtype = "float32"
    monkeypatch.setattr(GoldenSection, "open", lambda *_: section)
    monkeypatch.delattr(float64_rerun, "load_model")

    assert not record_equivalence(request_for("same"), SilentProgress())


@pytest.mark.parametrize("run", [record_equivalence, verify_equivalence])
def test_a_model_that_does_not_fit_in_float64_is_not_loaded(
    request_for: MakeRequest, run: Callable[..., object]
) -> None:
    request = request_for("same", max_memory=700_000_000)

    with pytest.raises(
        MachineError, match=r"float64 needs about 7[0-4]\d\.\d MB of memory, and only 700\.0 MB"
    ):
        run(request, SilentProgress())
