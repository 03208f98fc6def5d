import pytest

from assay.testing.marks import AcceleratorMark, MarkError, WorldMark, read_budget, read_tier


@pytest.mark.parametrize(
    ("arguments", "options", "mark", "words"),
    [
        ((), {}, AcceleratorMark(None, 1), "1 accelerator"),
        (("nvidia",), {}, AcceleratorMark("nvidia", 1), "1 nvidia accelerator"),
        (("amd",), {"count": 4}, AcceleratorMark("amd", 4), "4 amd accelerators"),
        ((), {"vendor": "amd"}, AcceleratorMark("amd", 1), "1 amd accelerator"),
    ],
)
def test_accelerator_mark_is_read_and_printed(
    arguments: tuple[object, ...], options: dict[str, object], mark: AcceleratorMark, words: str
) -> None:
    assert AcceleratorMark.read(arguments, options) == mark
    assert str(mark) == words


def test_world_has_the_product_of_its_axes() -> None:
    world = WorldMark.read((), {"dp": 2, "tp": 3})
    assert world.size == 6
    assert str(world) == "a world of 6 ranks (dp=2, tp=3)"


def test_tier_and_a_budget_are_read() -> None:
    assert read_tier(("smoke",), {}) == "smoke"
    assert read_budget((30,), {}) == 30.0
    assert read_budget((), {"seconds": 0.5}) == 0.5


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("nvidia", 4), {}),
        (("nvidia",), {"vendor": "amd"}),
        ((4,), {}),
        (("nvidia",), {"count": 0}),
        (("nvidia",), {"count": True}),
        (("nvidia",), {"counts": 4}),
    ],
)
def test_wrong_accelerator_mark_is_an_error(
    arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    with pytest.raises(MarkError, match=r"write it as accelerator\(\"nvidia\", count=4\)$"):
        AcceleratorMark.read(arguments, options)


@pytest.mark.parametrize(
    ("arguments", "options"), [((4,), {}), ((), {}), ((), {"dp": 0}), ((), {"dp": "2"})]
)
def test_wrong_world_mark_is_an_error(
    arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    with pytest.raises(MarkError, match=r"write it as world\(dp=2, tp=2\)$"):
        WorldMark.read(arguments, options)


@pytest.mark.parametrize("arguments", [(), ("",), ("smoke", "bench"), (3,)])
def test_wrong_tier_mark_is_an_error(arguments: tuple[object, ...]) -> None:
    with pytest.raises(
        MarkError, match=r'^marker tier: takes one name; write it as tier\("smoke"\)$'
    ):
        read_tier(arguments, {})


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "30", True])
def test_budget_that_is_no_positive_number_is_an_error(seconds: object) -> None:
    with pytest.raises(MarkError, match=r"^marker budget: the number of seconds is "):
        read_budget((seconds,), {})


@pytest.mark.parametrize("options", [{}, {"minutes": 1}])
def test_budget_without_seconds_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(MarkError, match=r"^marker budget: takes one number of seconds; "):
        read_budget((), options)
