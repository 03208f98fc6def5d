import pytest

from assay.devices.base import DeviceVendor
from assay.devices.detection import ListedDevice
from assay.errors import UsageError
from assay.testing.marks import (
    AcceleratorMark,
    MarkError,
    WorldMark,
    hardware_policy,
    missing_accelerators,
    missing_ranks,
    read_budget,
    read_tier,
)


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


def vendor(name: str) -> DeviceVendor:
    return DeviceVendor(name, name.title(), "gloo", "inductor", ())


HOST = ListedDevice("cpu", "present", vendor("cpu"), ("a laptop",))
TWO = ListedDevice("acme", "present", vendor("acme"), ("Acme 1", "Acme 1"))
NONE = ListedDevice("acme", "absent", vendor("acme"), missing="the driver of Acme")
BROKEN = ListedDevice("other", "broken", missing="the adapter for 'other' is broken")


@pytest.mark.parametrize(
    ("mark", "listed", "missing"),
    [
        (AcceleratorMark("acme", 2), [HOST, TWO], ""),
        (AcceleratorMark("acme", 3), [HOST, TWO], "this machine has 2 x Acme 1"),
        (AcceleratorMark("acme"), [HOST, NONE], "missing: the driver of Acme"),
        (AcceleratorMark("cpu"), [HOST], ""),
        (AcceleratorMark(), [HOST, NONE, BROKEN], "this machine has none"),
        (AcceleratorMark(), [HOST], "this machine has none"),
    ],
)
def test_missing_accelerators_are_named(
    mark: AcceleratorMark, listed: list[ListedDevice], missing: str
) -> None:
    assert missing_accelerators(mark, listed) == missing


def test_any_accelerator_is_accepted_without_a_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.devices.registry.is_host_adapter", lambda kind: kind == "cpu")
    assert missing_accelerators(AcceleratorMark(), [HOST, TWO]) == ""
    assert missing_accelerators(AcceleratorMark(count=3), [HOST, TWO]) == (
        "this machine has 2 x Acme 1"
    )


@pytest.mark.parametrize(
    ("allowed", "accelerators", "missing"),
    [
        (None, None, ""),
        (4, None, ""),
        (3, None, "--assay-world allows 3"),
        (None, 4, ""),
        (None, 1, "this machine has 1 of the device under test"),
    ],
)
def test_ranks_that_are_missing_are_counted(
    allowed: int | None, accelerators: int | None, missing: str
) -> None:
    world = WorldMark({"dp": 2, "tp": 2})
    assert missing_ranks(world, allowed, {}, lambda: accelerators) == missing


@pytest.mark.parametrize(
    ("started", "missing"), [("4", ""), ("8", "the launcher of this process started 8")]
)
def test_under_torchrun_its_own_number_of_ranks_decides(started: str, missing: str) -> None:
    outer = {"RANK": "0", "WORLD_SIZE": started, "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert missing_ranks(WorldMark({"dp": 4}), 2, outer, lambda: 1) == missing


def test_unknown_vendor_is_an_error_and_no_skip() -> None:
    with pytest.raises(MarkError) as raised:
        missing_accelerators(AcceleratorMark("acmee"), [HOST, TWO, BROKEN])
    assert str(raised.value) == (
        "marker accelerator: unknown vendor 'acmee' (there is: acme, cpu); "
        'write it as accelerator("nvidia", count=4)'
    )


@pytest.mark.parametrize(
    ("environment", "policy"),
    [
        ({}, "skip"),
        ({"ASSAY_REQUIRE_HARDWARE": ""}, "skip"),
        ({"ASSAY_REQUIRE_HARDWARE": "0"}, "skip"),
        ({"ASSAY_REQUIRE_HARDWARE": "1"}, "fail"),
    ],
)
def test_environment_variable_decides_whether_hardware_is_required(
    environment: dict[str, str], policy: str
) -> None:
    assert hardware_policy(environment) == policy


def test_ambiguous_value_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^ASSAY_REQUIRE_HARDWARE is 'true'; it must be 1, 0 or"):
        hardware_policy({"ASSAY_REQUIRE_HARDWARE": "true"})
