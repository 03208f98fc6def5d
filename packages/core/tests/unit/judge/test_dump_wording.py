"""The sentences on faults of stored weights."""

import pytest

from assay.judge.dump_wording import describe_finding
from assay.models.quantization.judging import Cause, WeightFault, WeightRegion

PLACE = WeightRegion(range(3, 4), (0, 1, 2, 3))
PARTNER = WeightRegion(range(5, 7), ())


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        ("scale", "w, row 3, columns 0-3: its scale is 2.0x the right one"),
        ("zero-point", "w, row 3, columns 0-3: its zero point is off by +2 steps"),
        ("swapped", "w, row 3, columns 0-3: it holds the values of rows 5-6"),
        (
            "swapped-parameters",
            "w, row 3, columns 0-3: its scale and zero point are those of rows 5-6",
        ),
        ("values", "w, row 3, columns 0-3: its values differ"),
    ],
)
def test_cause_is_named_with_its_place(cause: Cause, sentence: str) -> None:
    partner = PARTNER if cause.startswith("swapped") else None
    fault = WeightFault("w", cause, 0.5, 0.01, PLACE, 2.0, partner)

    assert describe_finding(fault).partition(";")[0] == sentence
