"""Location of the first difference: in time, and without an order of calls."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.importing import number_single_passes
from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import Values, make_dump
from packages.core.tests.unit.comparison.small_dumps import judge as judge_folders

IDS = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def judge(expected: Values | Dump, actual: Values | Dump) -> Verdict:
    one, other = (
        side if isinstance(side, Dump) else make_dump(side) for side in (expected, actual)
    )
    return compare_dumps(CompareOptions("e", "a"), one, other, SilentProgress()).verdict


def sample(
    *, wrong_at: int = 99, module: str = "late", input_at: int = 99
) -> dict[tuple[str, str, int], Tensor]:
    """Return three passes of a sampler with two modules, whose output is the next input."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    values: dict[tuple[str, str, int], Tensor] = {}
    for step in range(3):
        x = x * 1.5 if step == input_at else x
        early = x * (2.1 if step >= wrong_at and module == "early" else 2)
        late = early * (0.55 if step >= wrong_at and module == "late" else 0.5)
        values |= {
            ("early", "input.x", step): x, ("early", "output", step): early,
            ("late", "input.x", step): early, ("late", "output", step): late,
            ("", "input.x", step): x, ("", "output", step): late,
        }  # fmt: skip
        x = x - 0.1 * late
    return values


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("module", ["early", "late"])
def test_the_first_wrong_value_in_time_is_named(step: int, module: str) -> None:
    verdict = judge(sample(), sample(wrong_at=step, module=module))

    assert verdict.diagnosis == "module-error"
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.step) == (module, step)


def growing(errors_of_early: list[float], factor: float) -> dict[tuple[str, str, int], Tensor]:
    """Return passes in which `late` multiplies the relative error that `early` makes."""
    torch.manual_seed(0)
    values: dict[tuple[str, str, int], Tensor] = {}
    for step, error in enumerate(errors_of_early):
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        early, late = x * 2 * (1 + error), x * (1 + error * factor)
        values |= {
            ("early", "input.x", step): x.float(), ("early", "output", step): early.float(),
            ("late", "input.x", step): early.float(), ("late", "output", step): late.float(),
        }  # fmt: skip
    return values


# An error of float32 fails from 3.5 * 4 * 2**-24 = 8.3e-7 on.
@pytest.mark.parametrize(
    ("errors", "factor", "module", "step"),
    [
        ([6e-7, 2e-6, 2e-6], 3, "early", 1),  # in step 0, `late` shows what `early` made
        ([0, 2e-6, 2e-6], 1, "early", 1),
        ([0, 0, 2e-6], 1e5, "early", 2),
    ],
)
def test_an_error_that_grows_is_made_where_it_begins(
    errors: list[float], factor: float, module: str, step: int
) -> None:
    verdict = judge(growing([0, 0, 0], factor), growing(errors, factor))

    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.step) == (module, step)


def test_an_input_that_differs_before_any_result_is_named() -> None:
    verdict = judge(sample(), sample(input_at=1))

    assert verdict.diagnosis == "inputs-differ"
    assert verdict.headline == "The inputs differ: x of (model) differs."
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.step) == ("inputs", 1)


def read(
    mask: Tensor | None, wrong: float = 1.0, port: str = "input.attention_mask"
) -> dict[tuple[str, str, int], Tensor]:  # one pass over two prompts of different lengths
    torch.manual_seed(0)
    states = torch.randn(2, 4, 8)
    result = states * wrong
    values = {
        ("embed", "input.0", 0): IDS, ("embed", "output", 0): states,
        ("attn", "input.x", 0): states, ("attn", "output", 0): result,
        ("", "input.input_ids", 0): IDS, ("", "output", 0): result,
    }  # fmt: skip
    return values if mask is None else values | {("", port, 0): mask}


@pytest.mark.parametrize(
    ("expected", "actual", "said"),
    [
        (MASK, None, "is absent in ACTUAL"),
        (None, MASK, "is absent in EXPECTED"),
        (MASK, torch.ones_like(MASK), "differs"),
        (torch.ones_like(MASK), MASK.bool(), "differs"),
    ],
)
@pytest.mark.parametrize("name", ["attention_mask", "pixel_attention_mask"])
def test_a_lost_mask_of_padding_is_an_input_that_differs(
    expected: Tensor | None, actual: Tensor | None, said: str, name: str
) -> None:
    verdict = judge(read(expected, port=f"input.{name}"), read(actual, 1.1, port=f"input.{name}"))

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "inputs-differ"
    assert verdict.headline == f"The inputs differ: {name} of (model) {said}."
    assert verdict.levels["inputs"].verdict is Outcome.FAIL


def test_a_mask_without_padding_may_be_absent() -> None:
    verdict = judge(read(torch.ones_like(MASK)), read(None, 1.1))

    assert verdict.diagnosis == "module-error"
    assert verdict.location is not None
    assert verdict.location.module == "attn"
    assert judge(read(torch.ones_like(MASK)), read(None)).verdict is Outcome.PASS


@pytest.mark.parametrize("is_of_left_out_pairs", [False, True])
def test_a_causal_mask_may_be_absent_in_either_convention(is_of_left_out_pairs: bool) -> None:
    allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    verdict = judge(read(None), read(allowed ^ is_of_left_out_pairs, 1.1))

    assert verdict.diagnosis == "module-error"


def test_a_mask_that_a_module_loses_is_no_input_of_the_run() -> None:
    inner = {("attn", "input.attention_mask", 0): MASK}
    verdict = judge({**read(MASK), **inner}, read(MASK, 1.1))

    assert verdict.diagnosis == "module-error"


@pytest.mark.parametrize(
    ("of_padding", "of_result", "module"),
    [
        ("embed", torch.nan, "embed"),
        ("attn", torch.nan, "attn"),
        ("late", torch.nan, "attn"),
        ("embed", 9.0, "attn"),
    ],
    ids=["earlier", "in the same module", "later", "nothing reads it"],
)
def test_a_nan_in_padding_is_the_origin_of_a_later_nan(
    of_padding: str, of_result: float, module: str
) -> None:
    def run(*, is_wrong: bool) -> Values:
        values = read(MASK) | {("late", "output", 0): read(MASK)["embed", "output", 0]}
        if is_wrong:
            values = {site: value.clone() for site, value in values.items()}
            values["attn", "output", 0][0, 2] = of_result
            values[of_padding, "output", 0][1, 3] = torch.nan
        return values

    verdict = judge(run(is_wrong=False), run(is_wrong=True))

    assert verdict.location is not None
    assert verdict.location.module == module
    assert verdict.diagnosis == ("module-error" if of_result == 9.0 else "non-finite")
    if of_result != 9.0:
        reason = str(verdict.levels["modules"].reason)
        assert reason.startswith("NaN or infinity where the expected value is finite; ")
        assert ("its inputs agree" in reason) == (module == "attn")


def test_a_folder_for_each_pass_is_a_step() -> None:
    def in_folders(wrong_at: int = 99) -> Dump:
        dump = make_dump(sample(wrong_at=wrong_at))
        moved = [one.moved(step=0, micro_batch=one.site.at.step) for one in dump.tensors]
        return replace(dump, tensors=moved)

    steps = {one.site.at.step for one in number_single_passes(in_folders()).tensors}
    verdict = judge(in_folders(), in_folders(wrong_at=2))

    assert steps == {0, 1, 2}
    assert verdict.location is not None
    assert verdict.location.step == 2


NAMES = ["embed", *(f"layers.{number}.mlp" for number in range(12)), "norm"]
Factors = Mapping[str, float]


def write_folder(folder: Path, factors: Factors) -> Path:
    generator = np.random.default_rng(0)
    folder.mkdir()
    for name in NAMES:
        values = generator.normal(size=(4, 16)).astype(np.float32)
        np.save(folder / f"{name}.output.npy", values * np.float32(factors.get(name, 1.0)))
    return folder


def compare(tmp_path: Path, factors: Factors, **options: object) -> Verdict:
    golden, mine = write_folder(tmp_path / "golden", {}), write_folder(tmp_path / "mine", factors)
    return judge_folders(golden, mine, tmp_path / "out", **options)


def modules(verdict: Verdict) -> set[str | None]:
    return {one.location.module for one in verdict.suspects}


def test_names_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    dump = open_dump(write_folder(tmp_path / "t", {}))
    assert [one.site.at.module for one in dump.tensors] == NAMES
    save_file({f"{name}.output": torch.zeros(1) for name in NAMES}, tmp_path / "x.safetensors")
    dump = open_dump(tmp_path / "x.safetensors")
    assert [one.site.at.module for one in dump.tensors] == NAMES


@pytest.mark.parametrize("others", [(), ("norm",)])
def test_the_first_block_is_named_before_later_ones(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    wrong = ["layers.2.mlp", "layers.10.mlp", *others]
    verdict = compare(tmp_path, dict.fromkeys(wrong, 1.02))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "layers.2.mlp"
    assert modules(verdict) == set(wrong)
    assert any("does not record the order of its calls" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "wrong",
    [("embed", "norm"), ("layers.0.mlp", "embed"), ("embed", "layers.3.mlp", "layers.0.mlp")],
)
def test_an_unknown_first_place_is_not_named(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    verdict = compare(tmp_path, dict.fromkeys(wrong, 1.02))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is None
    assert modules(verdict) == set(wrong)
    assert str(verdict.headline).startswith(
        f"{len(wrong)} places differ, and the first is not known; the worst are "
    )


def test_a_single_place_needs_no_order(tmp_path: Path) -> None:
    verdict = compare(tmp_path, {"norm": 1.02})
    assert verdict.location is not None
    assert verdict.location.module == "norm"


def test_an_order_names_the_first_place(tmp_path: Path) -> None:
    (tmp_path / "order").write_text("\n".join(["norm", *NAMES[:-1]]) + "\n")
    verdict = compare(tmp_path, {"embed": 1.02, "norm": 1.02}, order=str(tmp_path / "order"))
    assert verdict.location is not None
    assert verdict.location.module == "norm"
    assert not any("does not record" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([*NAMES, "head"], "names modules that are not in .*golden: head"),
        (NAMES[:-1], "lacks modules of .*golden: norm"),
    ],
)
def test_an_order_of_other_modules_is_refused(
    tmp_path: Path, names: list[str], problem: str
) -> None:
    (tmp_path / "order").write_text("\n".join(names))
    with pytest.raises(DumpError, match=problem):
        compare(tmp_path, {}, order=str(tmp_path / "order"))


def test_clean_folders_pass_without_an_order(tmp_path: Path) -> None:
    verdict = compare(tmp_path, {})
    assert verdict.verdict is Outcome.PASS
    assert not any("order" in note for note in verdict.notes)
