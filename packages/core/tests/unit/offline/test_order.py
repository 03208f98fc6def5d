"""Dumps that do not record the order of their calls, such as folders of arrays."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from assay.dumps.protocol import DumpError
from assay.dumps.recognizing import open_dump
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.offline.small_dumps import judge

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
    return judge(golden, mine, tmp_path / "out", **options)


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
        f"{len(wrong)} places differ, and the first is not known: "
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
