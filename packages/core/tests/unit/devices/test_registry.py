"""Devices by name: built-in ones, another package's, absent and broken ones."""

import sys
from collections.abc import Callable, Iterator

import pytest

from assay.devices.registry import adapter_names, detect, open_device, open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError
from packages.core.tests.unit.devices.protocol_checks import check_device_protocol


@pytest.fixture(autouse=True)
def _forget_vendor_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for module in set(sys.modules) - before:
        if module.startswith("vendor_of_"):
            del sys.modules[module]


@pytest.mark.parametrize("text", ["cpu", "sim", "sim:split2"])
def test_device_is_opened_by_the_name_that_it_then_has(text: str) -> None:
    assert open_device(text).name == text


def test_adapter_of_another_package_is_found_and_implements_the_protocol(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    install_vendor("acme", acme_code, "AcmeDevice")
    assert "acme" in adapter_names()
    device = open_device("acme:1")
    assert device.product() == "Rocket 2"
    check_device_protocol(device)


def test_unknown_device_is_a_usage_error_that_names_what_exists() -> None:
    with pytest.raises(UsageError) as raised:
        open_device("warp:1")
    assert isinstance(raised.value, UsageError)
    assert str(raised.value) == (
        "unknown device 'warp'; there is: cpu, cuda, hpu, mps, npu, sim, spyre, xla, xpu. "
        "Others come with a package that registers an adapter (entry-point group assay.devices)"
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [("rocm", "cuda, the name in torch for devices of amd"), ("habana", "hpu, the name in torch for devices of gaudi")],
)  # fmt: skip
def test_another_name_of_a_vendor_is_answered_with_its_device(name: str, known: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown device '{name}'; write {known}$"):
        open_device(f"{name}:1")


def test_device_whose_package_is_not_installed_is_absent_and_says_so() -> None:
    with pytest.raises(MachineError) as raised:
        open_device("npu:1")
    assert isinstance(raised.value, MachineError)
    assert str(raised.value) == (
        "device 'npu:1' is absent; missing: the Python package torch_npu."
        " On this machine: cpu, sim (`assay devices` shows all)"
    )


def test_absent_device_is_reported_with_what_is_missing_and_what_is_available(
    install_vendor: Callable[..., None],
) -> None:
    code = """
from assay.devices.base import Detection, DeviceVendor
class Absent:
    @classmethod
    def detect(cls):
        vendor = DeviceVendor("acme", "Acme Rocket", "gloo", "eager", ("assay-acme",))
        return (Detection(vendor, missing="a rocket"), Detection(vendor, missing="a pad"))
"""
    install_vendor("acme", code, "Absent")
    with pytest.raises(MachineError) as raised:
        open_device("acme")
    assert str(raised.value) == (
        "device 'acme' is absent; missing: a rocket; or a pad. On this machine: cpu, sim (`assay devices` shows all)"
    )


def test_absent_index_is_a_machine_error(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    install_vendor("acme", acme_code, "AcmeDevice")
    with pytest.raises(MachineError) as raised:
        open_device("acme:7")
    assert str(raised.value) == (
        "device 'acme:7' is absent; missing: there are 2. On this machine: acme:0, acme:1"
    )


def test_dtype_that_the_device_lacks_is_a_usage_error() -> None:
    assert open_run(parse_run("cpu/float64")).name == "cpu"
    with pytest.raises(UsageError) as raised:
        open_run(parse_run("sim/float64"))
    assert isinstance(raised.value, UsageError)
    assert str(raised.value) == "sim has no float64; it has: float32, bfloat16, float16"


BROKEN = {
    "raises-on-import": ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    "exits-on-import": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "no-such-module": ("import torch_acme", "ModuleNotFoundError: No module named 'torch_acme'"),
    "no-class": ("", "AttributeError: module 'vendor_of_acme' has no attribute 'Acme'"),
    "no-detect": ("class Acme: pass", "it lacks detect"),
    "raises-in-detect": (
        "class Acme:\n    @classmethod\n    def detect(cls): raise OSError('bus error')",
        "OSError: bus error",
    ),
    "detects-nothing": (
        "class Acme:\n    @classmethod\n    def detect(cls): return ()",
        "ValueError: detect() returned nothing",
    ),
    "detects-nonsense": (
        "class Acme:\n    @classmethod\n    def detect(cls): return (True,)",
        "TypeError: detect() must return detections, not True",
    ),
}


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_adapter_is_a_machine_error_with_the_reason(
    install_vendor: Callable[..., None], code: str, reason: str
) -> None:
    install_vendor("acme", code, "Acme")
    with pytest.raises(MachineError) as raised:
        detect("acme")
    assert isinstance(raised.value, MachineError)
    assert str(raised.value) == f"the adapter for 'acme' is broken: {reason}"


def test_adapter_that_lacks_members_is_broken_and_they_are_named(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    code = acme_code + "\ndel AcmeDevice.versions, AcmeDevice.seed\n"
    install_vendor("acme", code, "AcmeDevice")
    with pytest.raises(MachineError) as raised:
        open_device("acme")
    assert str(raised.value) == "the adapter for 'acme' is broken: it lacks seed, versions"


def test_adapter_that_raises_on_opening_is_broken(
    install_vendor: Callable[..., None], acme_code: str
) -> None:
    code = acme_code + "\ndef fail(*_): raise OSError('no firmware')\nAcmeDevice.__init__ = fail\n"
    install_vendor("acme", code, "AcmeDevice")
    with pytest.raises(MachineError, match="OSError: no firmware"):
        open_device("acme")


def test_two_adapters_of_one_name_are_an_error_and_not_a_choice(
    install_vendor: Callable[..., None],
) -> None:
    install_vendor("cpu", "class Mine: pass", "Mine")
    with pytest.raises(MachineError) as raised:
        open_device("cpu")
    assert str(raised.value) == (
        "the adapter for 'cpu' is registered more than once: "
        "vendor_of_cpu:Mine, assay.devices.cpu:CpuDevice"
    )
