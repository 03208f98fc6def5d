"""Thresholds for all shapes and for single shapes."""

from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_expectations.decoders.options import DecoderOptions
from assay_expectations.decoders.shapes import Shape
from assay_expectations.decoders.thresholds import Thresholds, read_thresholds

FILE = """
failure_rate = 0.02
false_failure_bound = 0.1
[thresholds]
cross_entropy = 2.5
diff_mean = 0.001
[shapes.4x64x16]
failure_rate = 0.05
thresholds = { diff_mean = 0.01 }
"""


def test_shape_overrides_the_thresholds_for_all_shapes(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(FILE)
    for_all, by_shape = read_thresholds(file)
    options = DecoderOptions(thresholds=for_all, shape_thresholds=by_shape)

    assert options.thresholds_of(Shape(1, 64, 16)) == Thresholds(
        {"cross_entropy": 2.5, "diff_mean": 0.001}, 0.02
    )
    assert options.thresholds_of(Shape(4, 64, 16)) == Thresholds(
        {"cross_entropy": 2.5, "diff_mean": 0.01}, 0.05
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[thresholds", "Expected"),
        ("", "thresholds: Field required"),
        ("failure_rate = 1.5\n[thresholds]", "failure_rate: "),
        ("failure_rte = 0.5\n[thresholds]", "failure_rte: "),
        ("[thresholds]\ncosine = 1.0", "thresholds.cosine"),
        ("[thresholds]\ndiff_mean = nan", "thresholds.diff_mean"),
        ("[thresholds]\ndiff_mean = 1.0\n[shapes.4x64.thresholds]\n", "shape '4x64'"),
    ],
)
def test_malformed_file_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_thresholds(file)
