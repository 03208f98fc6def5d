import pytest

from assay.errors import UsageError
from assay.launch.mesh_string import parse_mesh


def test_axes_keep_their_order() -> None:
    assert list(parse_mesh("dp=2, tp=4").items()) == [("dp", 2), ("tp", 4)]


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=0", "dp=-1", "ep=2", "dp=2,dp=2", "dp=2,"])
def test_what_is_no_mesh_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"write it as dp=2,tp=2, with axes of dp, tp, pp"):
        parse_mesh(text)


def test_axes_that_a_job_does_not_have_are_refused() -> None:
    assert parse_mesh("tp=2", ("tp",)) == {"tp": 2}
    with pytest.raises(
        UsageError, match=r"^--mesh dp=2: 'dp=2' is not an axis; write it as tp=2, with axes of tp,"
    ):
        parse_mesh("dp=2", ("tp",))
