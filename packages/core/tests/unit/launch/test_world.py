import subprocess
import sys
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.launch import (
    Rank,
    TimeLimits,
    UnsendableError,
    World,
    call,
    outer_world_size,
    parse_mesh,
)
from assay.progress import Progress


def test_size_of_a_world_is_the_product_of_its_axes() -> None:
    assert World({"dp": 4, "tp": 2, "pp": 4}).size == 32
    assert str(World({"dp": 2, "tp": 2})) == "a world of 4 ranks (dp=2, tp=2)"
    assert str(World({"dp": 1})) == "a world of 1 rank (dp=1)"


@pytest.mark.parametrize("axes", [{}, {"dp": 0}, {"dp": 2, "tp": -1}])
def test_mesh_without_ranks_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1 rank"):
        World(axes)


@pytest.mark.parametrize(
    ("collective", "body", "start"), [(60, 60, 1), (61, 60, 1), (0, 1, 1), (1, 2, 0)]
)
def test_limit_of_a_collective_must_be_below_that_of_the_body(
    collective: float, body: float, start: float
) -> None:
    with pytest.raises(UsageError, match="limits must be positive"):
        TimeLimits(start_seconds=start, collective_seconds=collective, body_seconds=body)


def test_limits_within_a_timeout_add_up_to_less_than_it() -> None:
    limits = TimeLimits.within(120)
    assert (limits.start_seconds, limits.collective_seconds, limits.body_seconds) == (42, 30, 60)
    assert limits.start_seconds + limits.body_seconds < 120


def test_world_of_torchrun_is_detected_only_if_all_its_variables_are_set() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert outer_world_size(variables) == 8
    for missing in variables:
        assert outer_world_size({k: v for k, v in variables.items() if k != missing}) is None


def body(value: object, progress: Progress, rank: Rank) -> None:
    """A body that any rank could import; these tests fail before it is called."""


def test_request_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(UnsendableError) as caught:
        call(body, lambda: None, world=World({"dp": 2}))
    assert str(caught.value).startswith("the request cannot travel to the ranks: function: ")


def test_function_that_no_rank_can_import_is_named() -> None:
    def local(request: None, progress: Progress, rank: Rank) -> None:
        pass

    with pytest.raises(UnsendableError, match=r"^the function cannot travel to the ranks: "):
        call(local, None, world=World({"dp": 2}))


def test_function_defined_in_main_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from assay.launch import World, call\n"
        "def train(request, progress, rank): pass\n"
        "call(train, None, world=World({'dp': 2}))\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "UnsendableError: train is defined in the script that runs" in ran.stderr


def test_launching_imports_no_torch() -> None:
    code = "import sys, assay.launch; print({'torch', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ran.stdout == b"set()\n"


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
