"""When other values are another representation, and when they are an error."""

from pathlib import Path
from typing import Any

import pytest
import torch

from assay.comparing.judge import Judged
from assay.comparing.results import PortResult
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.generate.passes.passes import run_forced
from assay.generate.processes import equivalence
from assay.generate.processes.equivalence import (
    Equivalence,
    PortDifference,
    is_representation,
    run_equivalence,
)
from assay.generate.processes.golden import capture_golden
from assay.generate.processes.golden_folder import GoldenSection, read_golden
from assay.generate.processes.requests import EquivalenceRequest, GoldenRequest, InputOptions
from assay.noise import Ratio
from assay.runs import SilentProgress
from assay.stages import Stage
from assay.statistics import Statistic

STAGE = Stage("model.layers.1.mlp")


def failed(port: str, error: float, statistic: Statistic = "replay-tensor") -> Judged:
    """A port whose values are wrong by this share of themselves."""
    result = PortResult(STAGE.module, port, STAGE, 0, "bfloat16", "MLP")
    expected = torch.ones(4, 4, dtype=torch.float64)
    address = torch.zeros(4, dtype=torch.long)
    result.sums.add(expected * (1 + error), expected, address, address)
    return Judged(Ratio(statistic, error, 1e-3), 3.0, result)


def in_float64(port: str, error: float, different: int = 0) -> Equivalence:
    return Equivalence(agrees=True, errors={(STAGE.module, port): PortDifference(error, different)})


def test_values_that_differ_as_much_in_float64_are_a_representation() -> None:
    assert is_representation([failed("output", 1.0)], in_float64("output", 0.9))


def test_error_that_float64_does_not_have_is_one_of_precision() -> None:
    assert not is_representation([failed("output", 0.1)], in_float64("output", 0.001))
    assert not is_representation([failed("output", 0.1)], Equivalence(agrees=True))
    assert not is_representation([], Equivalence(agrees=False))


def test_every_port_that_failed_counts() -> None:
    both = [failed("output.0", 1.0), failed("output.1", 0.3)]

    first, second = in_float64("output.0", 1.0), in_float64("output.1", 0.3)

    assert not is_representation(both, first)
    assert is_representation(
        both, Equivalence(agrees=True, errors={**first.errors, **second.errors})
    )


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
    folder = tmp_path_factory.mktemp("captured") / "golden"
    request = GoldenRequest(
        model=MODEL,
        reference=parse_run("cpu/float32"),
        noise_for=["bfloat16"],
        inputs=InputOptions(max_new_tokens=2),
        folder=str(folder),
    )
    capture_golden(request, SilentProgress())
    return folder


@pytest.mark.parametrize(("factor", "batches_run"), [("1.0", "all"), ("1.001", "the first")])
def test_first_batch_that_differs_ends_the_run(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: str, batches_run: str
) -> None:
    setup = tmp_path / "setup.py"
    setup.write_text(f"def scale(model):\n    model.lm_head.weight.data.mul_({factor})\n")
    ran: list[Any] = []

    def count(*arguments: Any) -> Any:
        ran.append(arguments)
        return run_forced(*arguments)

    monkeypatch.setattr(equivalence, "run_forced", count)
    request = EquivalenceRequest(
        model=MODEL, golden=str(golden), dtype="bfloat16", setup=f"{setup}:scale"
    )

    found = run_equivalence(request, SilentProgress())

    num_batches = len(GoldenSection.open(golden, "bfloat16").batches)
    assert num_batches > 1
    assert found.agrees is (batches_run == "all")
    assert len(ran) == (num_batches if batches_run == "all" else 1)


def test_logits_of_a_float32_yardstick_are_not_compared_in_float64(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_golden(golden)
    section = manifest.sections["bfloat16"].model_copy(update={"yardstick_dtype": "float32"})
    changed = manifest.model_copy(update={"sections": {"bfloat16": section}})
    monkeypatch.setattr(equivalence, "read_golden", lambda _: changed)
    monkeypatch.delattr(equivalence, "load_model")
    request = EquivalenceRequest(model=MODEL, golden=str(golden), dtype="bfloat16")

    assert not run_equivalence(request, SilentProgress()).agrees


def test_a_model_that_does_not_fit_in_float64_is_not_loaded(golden: Path) -> None:
    request = EquivalenceRequest(
        model=MODEL, golden=str(golden), dtype="bfloat16", max_memory=700_000_000
    )

    with pytest.raises(
        MachineError, match=r"float64 needs about 7[0-4]\d\.\d MB of memory, and only 700\.0 MB"
    ):
        run_equivalence(request, SilentProgress())
