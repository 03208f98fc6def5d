"""The verdict on two folders of weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.models.quantization.judging import (
    WeightComparison,
    WeightFault,
    WeightRegion,
    WeightResult,
)
from assay.offline.check import CompareOptions, compare
from assay.offline.judging.model_folders import judge_weights
from assay.runs import SilentProgress
from assay.verdicts import Outcome, find_contradiction
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.models.quantization.rounding import (
    Fault,
    no_fault,
    times,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    write_folder,
)

NAME = "model.layers.3.mlp.down_proj.weight"
PLACE = WeightRegion(range(7, 8), tuple(range(128, 256)))
FINDING = WeightFault(NAME, "scale", 0.147, 0.098, PLACE, 1.1)


def result(*findings: WeightFault) -> WeightResult:
    return WeightResult(NAME, "model.safetensors", 64, 0.1, 0.098, 1.5, 0.05, findings)


def test_wrong_scale_fails_and_is_described() -> None:
    verdict, rows = judge_weights(WeightComparison((result(FINDING),), (FINDING,)))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.headline == (
        "model.layers.3.mlp.down_proj.weight, row 7, columns 128-255: its scale is 1.1x the right one;"
        " relative error 0.147 = 1.5x the best that the format can reach (9.8e-2)."
    )
    assert verdict.location is not None
    assert (verdict.location.parameter, verdict.diagnosis) == (NAME, "weight-mismatch")
    assert [(row.module, row.port, row.ratio) for row in rows] == [
        ("model.layers.3.mlp.down_proj", "parameter.weight", 1.5)
    ]
    assert find_contradiction(verdict) is None


def test_sound_weights_pass_with_their_resolution() -> None:
    verdict, _ = judge_weights(WeightComparison((result(),), ()))
    assert (verdict.verdict, verdict.resolution) == (Outcome.PASS, 0.05)
    assert (
        verdict.headline == "The weights agree, as far as their formats allow: 1 weight, 64 groups."
    )
    unseen = f"an error of one scale below 5.0 % may be unseen (in {NAME})"
    assert verdict.levels["weights"].reason == unseen
    assert verdict.notes == [unseen]
    assert find_contradiction(verdict) is None


def test_missing_weight_is_not_a_pass() -> None:
    verdict, _ = judge_weights(
        WeightComparison((result(),), (), unmatched_expected=("lm_head.weight",))
    )
    assert verdict.verdict is Outcome.NOT_COMPARED


def test_nothing_compared_is_not_a_pass() -> None:
    verdict, _ = judge_weights(WeightComparison((), ()))
    assert (verdict.verdict, verdict.headline) == (
        Outcome.NOT_COMPARED,
        "Nothing could be compared.",
    )


def test_words_of_each_cause() -> None:
    other = WeightRegion(range(3), (0, 5))
    for cause, amount, partner, text in (
        ("zero-point", 1.0, None, "row 7, columns 128-255: its zero point is off by +1 steps"),
        ("swapped", 0.0, other, "it holds the values of rows 0-2, 2 columns from 0 to 5"),
        ("swapped-parameters", 0.0, other, "its scale and zero point are those of rows 0-2"),
        ("values", 0.0, None, "its values differ"),
    ):
        finding = WeightFault(NAME, cause, 1.4, 0.1, PLACE, amount, partner)  # type: ignore[arg-type]
        verdict, _ = judge_weights(WeightComparison((result(finding),), (finding,)))
        assert verdict.headline is not None
        assert text in verdict.headline
    stale = WeightFault("model-00002-of-00004.safetensors", "shard", 1.4, 0.1, None, 17)
    verdict, _ = judge_weights(WeightComparison((result(stale),), (stale,)))
    assert verdict.location is None
    assert verdict.headline == (
        "model-00002-of-00004.safetensors: 17 of its weights are other weights;"
        " relative error 1.4 = 14.0x the best that the format can reach (0.1)."
    )


def write_quantized(folder: Path, weight: Tensor, fault: Fault) -> Path:
    case = CASES["gptq4-64"]
    tensors, _ = case.write(weight, fault)
    return write_folder(folder, [{f"up.{key}": one for key, one in tensors.items()}], case.settings)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(no_fault, Outcome.PASS), (times(1.1, 3), Outcome.FAIL)]
)
def test_folder_of_float_weights_and_quantized_folder(
    fault: Fault, outcome: Outcome, tmp_path: Path
) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    expected = write_folder(tmp_path / "expected", [{"up.weight": weight}])
    actual = write_quantized(tmp_path / "actual", weight, fault)
    (tmp_path / "run").mkdir()
    verdict = compare(
        CompareOptions(str(expected), str(actual)), tmp_path / "run", SilentProgress()
    )
    assert verdict.verdict is outcome
    assert (tmp_path / "run" / "verdict.json").is_file()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "micro:llama"}, "--model"),
        ({"level": "logits"}, "--level"),
        ({"name_map": "names.toml"}, "--map"),
        ({"rank": 0}, "--rank"),
        ({"token_shift": 0}, "--token-shift"),
        ({"limits": "ascend"}, "--limits"),
        ({"stats": True}, "--stats"),
        ({"compat": True, "table": Path("x.csv")}, "--compat, a table as --output"),
        ({"table": Path("x.csv")}, "a table as --output"),
    ],
)
def test_options_that_quantized_weights_would_ignore_are_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    expected = write_folder(tmp_path / "expected", [{"up.weight": weight}])
    actual = write_quantized(tmp_path / "actual", weight, no_fault)
    with pytest.raises(UsageError) as caught:
        compare(CompareOptions(str(expected), str(actual), **options), tmp_path, SilentProgress())
    assert str(caught.value).endswith(f"leave out {named}")


def test_dump_with_weights_and_quantized_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 32, bias=False)
    network = nn.Sequential()
    network.add_module("up", linear)
    with torch.no_grad(), dumped(network, tmp_path / "dump", parameters=True):
        network(torch.ones(1, 256))
    weight = linear.weight.detach()
    actual = write_quantized(tmp_path / "actual", weight, times(1.1, 3))
    (tmp_path / "run").mkdir()
    verdict = compare(
        CompareOptions(str(tmp_path / "dump"), str(actual)), tmp_path / "run", SilentProgress()
    )
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.parameter == "up.weight"


def test_two_folders_of_an_unknown_method_are_compared_as_stored(tmp_path: Path) -> None:
    settings = {"quant_method": "aqlm"}
    for name, value in (("expected", 1), ("same", 1), ("other", 2)):
        stored = {"up.codes": torch.full((4, 4), value, dtype=torch.int32)}
        write_folder(tmp_path / name, [stored], settings)
    for name, outcome in (("same", Outcome.PASS), ("other", Outcome.FAIL)):
        (tmp_path / f"run-{name}").mkdir()
        comparison = CompareOptions(str(tmp_path / "expected"), str(tmp_path / name))
        assert compare(comparison, tmp_path / f"run-{name}", SilentProgress()).verdict is outcome
