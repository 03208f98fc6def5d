import pytest

from assay.training.reports import HeldPart


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (HeldPart("a.weight"), "a.weight"),
        (HeldPart("a.weight", "exp_avg"), "a.weight exp_avg"),
        (HeldPart("a.weight", "exp_avg", ((0, 1), (2, 3))), "a.weight exp_avg|0=1|2=3"),
    ],
)
def test_part_is_shown_with_its_moment_and_its_place_on_the_mesh(
    part: HeldPart, shown: str
) -> None:
    assert str(part) == shown
