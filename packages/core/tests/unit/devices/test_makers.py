"""Adapters over the modules of their makers, on stand-ins that behave as the makers document."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.devices import conformance
from assay.devices.apple import AppleDevice
from assay.devices.ascend import AscendDevice
from assay.devices.base import Device
from assay.devices.detection import require_run
from assay.devices.gaudi import GaudiDevice
from assay.devices.intel import IntelDevice
from assay.devices.spyre import SpyreDevice
from assay.devices.torch_backend import TorchBackendDevice
from assay.devices.trainium import TrainiumDevice
from assay.errors import MachineError
from packages.core.tests.unit.devices.protocol_checks import ConformanceError, check_device_protocol

pytest_plugins = ("pytester",)

STAND_INS = Path(__file__).parent / "stand_ins"
ADAPTERS = (AscendDevice, GaudiDevice, SpyreDevice, TrainiumDevice, IntelDevice, AppleDevice)
# Other plugins only cost time here.
CONFORMANCE = (
    *("--pyargs", "assay.devices.conformance", "-v"),
    *(f"-pno:{name}" for name in ("anyio", "benchmark", "hypothesispytest", "xdist")),
)

each_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.kind)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that has devices of every maker."""
    monkeypatch.syspath_prepend(STAND_INS)
    importlib.import_module("torch_builds").install(monkeypatch.setattr)
    yield
    for name, module in list(sys.modules.items()):
        if STAND_INS in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]
    for kind in ("npu", "hpu", "spyre"):
        vars(torch).pop(kind, None)


def on_host(adapter: type[TorchBackendDevice]) -> Any:
    """An adapter whose tensors are on the host, where a stand-in can compute."""
    return type(adapter.__name__, (adapter,), {"torch_device": "cpu"})()


@each_adapter
def test_adapter_keeps_the_protocol(machine: None, adapter: type[TorchBackendDevice]) -> None:
    device = on_host(adapter)
    check_device_protocol(device)
    assert isinstance(device, Device)
    assert not device.vendor.verified


@each_adapter
def test_wrong_product_is_found_on_each(
    machine: None, adapter: type[TorchBackendDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, right: left.mm(right) + 1)
    with pytest.raises(ConformanceError, match="but a product in it is"):
        check_device_protocol(on_host(adapter))


@each_adapter
def test_device_beyond_the_last_is_absent(
    machine: None, adapter: Callable[[str], TorchBackendDevice]
) -> None:
    with pytest.raises(MachineError, match="missing: there are"):
        adapter("8")


def test_function_that_a_makers_module_lacks_is_named(machine: None) -> None:
    device = on_host(AscendDevice)
    del AscendDevice.module().max_memory_allocated
    with pytest.raises(ConformanceError, match=r"memory: AttributeError: .*max_memory_allocated"):
        check_device_protocol(device)


def test_absent_makers_are_told_without_importing_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    missing = {adapter.kind: adapter.detect()[0].missing for adapter in ADAPTERS}
    assert missing["npu"] == "the Python package torch_npu"
    assert missing["hpu"] == "the Python package habana_frameworks.torch"
    assert missing["spyre"] == "the Python package torch_spyre"
    assert missing["xla"] == (
        "the Python package torch_neuronx, the Python package torch_xla,"
        " the Python package neuronxcc, the driver of AWS Neuron (/dev/neuron0)"
    )
    assert missing["xpu"].startswith("an Intel GPU with a driver, and a torch built for XPU;")
    assert missing["mps"].startswith("a Mac with an Apple GPU")


def test_one_package_that_is_missing_is_named_alone(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainiumDevice, "more_packages", ("torch_xla", "no_such_compiler"))
    assert TrainiumDevice.detect()[0].missing == "the Python package no_such_compiler"


def test_architectures_and_dtypes_are_those_that_makers_name(machine: None) -> None:
    devices = [adapter() for adapter in ADAPTERS]
    assert [(one.architecture(), one.supported_dtypes()) for one in devices] == [
        ("ascend910b1", ("float32", "bfloat16", "float16")),
        ("gaudi2", ("float32", "bfloat16", "float16")),
        ("spyre", ("float16",)),
        ("trn1", ("float32", "bfloat16", "float16")),
        ("xpu-0x5004004", ("float32", "bfloat16", "float16")),
        ("apple-m3-max", ("float32", "bfloat16", "float16")),
    ]


def test_float32_on_a_chip_follows_its_setting_and_its_age(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert AscendDevice().effective_precision("float32") == "float32"
    AscendDevice.module().matmul.allow_hf32 = True
    assert AscendDevice().effective_precision("float32") == "hf32"
    assert AscendDevice().effective_precision("bfloat16") == "bfloat16"
    monkeypatch.setattr(AscendDevice.module(), "is_bf16_supported", lambda: False)
    assert AscendDevice().effective_precision("float32") == "float16"


def test_float16_on_a_card_has_a_format_of_its_own(machine: None) -> None:
    assert SpyreDevice().effective_precision("float16") == "sen169"


@pytest.mark.parametrize(
    ("variable", "value", "compiler", "expected"),
    [
        ("", "", "2.27.5+a1b2", "float32"),
        ("", "", "2.22.12471.0", "float32"),
        ("", "", "2.21.18209.0+043b1bf7", "bfloat16"),
        ("NEURON_CC_FLAGS", "--auto-cast=none", "2.21.18209.0", "float32"),
        ("NEURON_CC_FLAGS", "--model-type transformer --auto-cast=matmult", "2.27", "bfloat16"),
        ("NEURON_CC_FLAGS", "--auto-cast all --auto-cast-type tf32", "2.27", "tf32"),
        ("XLA_DOWNCAST_BF16", "1", "2.27", "bfloat16"),
        ("XLA_USE_BF16", "1", "2.27", "bfloat16"),
        ("XLA_USE_BF16", "0", "2.27", "float32"),
        ("", "", "unknown", "float32"),
    ],
)
def test_casts_of_a_compiler_follow_its_flags_and_its_version(
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    compiler: str,
    expected: str,
) -> None:
    if variable:
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("assay.devices.trainium.version_of", {"neuronxcc": compiler}.get)
    assert TrainiumDevice().effective_precision("float32") == expected
    assert TrainiumDevice().effective_precision("float16") == "float16"


@pytest.mark.parametrize(
    ("allowed", "supported", "expected"),
    [(None, True, "float32"), (True, True, "tf32"), (True, False, "float32")],
)
def test_tf32_needs_the_one_setting_that_its_kernels_read(
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool | None,
    supported: bool,
    expected: str,
) -> None:
    settings = SimpleNamespace(allow_tf32=allowed, fp32_precision="tf32")
    monkeypatch.setattr(torch.backends, "mkldnn", settings)
    monkeypatch.setattr(torch.xpu, "is_tf32_supported", lambda: supported)
    assert IntelDevice().effective_precision("float32") == expected
    assert IntelDevice().effective_precision("float16") == "float16"


def test_lazy_devices_start_what_they_gathered_before_they_wait(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    GaudiDevice("3").synchronize()
    assert GaudiDevice.module().asked == ["device 3", "mark_step", "synchronize"]
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    GaudiDevice("3").synchronize()
    assert GaudiDevice.module().asked[3:] == ["device 3", "synchronize"]

    core = TrainiumDevice("1")
    core.synchronize()
    core.seed(7)
    assert core.module().asked == ["sync", "wait", "seed 7 xla:1"]


def test_what_a_maker_does_not_tell_of_memory_is_nothing(machine: None) -> None:
    def told(device: TorchBackendDevice) -> tuple[int, int]:
        return device.peak_memory_bytes(), device.free_memory_bytes()

    assert told(TrainiumDevice()) == (0, 0)
    assert told(SpyreDevice()) == (1 << 20, 0)
    assert told(AppleDevice()) == (0, 7 << 30)
    assert told(AscendDevice()) == (1 << 30, 2 << 30)


def test_simulation_of_a_card_is_no_card(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SpyreDevice().product() == "IBM Spyre (AIU)"
    monkeypatch.setenv("FLEX_DEVICE", "MOCK")
    assert SpyreDevice().product() == "IBM Spyre (AIU), simulated"
    assert SpyreDevice.detect()[0].products == ("IBM Spyre (AIU), simulated",)


def test_card_that_a_process_may_not_use_is_absent(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpyreDevice.module(), "_is_in_bad_fork", lambda: True)
    assert SpyreDevice.detect()[0].missing == (
        "IBM Spyre (AIU) with a driver that torch_spyre can use"
    )


def test_name_of_a_gpu_that_torch_is_too_old_to_tell(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.backends.mps, "get_name")
    assert AppleDevice().product() == "Apple GPU"


def test_numbers_depend_on_the_compiler_as_well(machine: None) -> None:
    versions = TrainiumDevice().versions()
    assert versions["neuronxcc"] == "2.27.5+a1b2"
    assert set(versions) == {"torch", "python", "torch_neuronx", "torch_xla", "neuronxcc"}


@pytest.fixture
def machine_of_suite(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process alone: the other one, in which the suite opens a device first, has none."""
    monkeypatch.setattr(TorchBackendDevice, "torch_device", "cpu")
    monkeypatch.setattr(conformance, "require_run", lambda run: None)


@each_adapter
def test_suite_passes_with_a_line_for_each_point(
    machine_of_suite: None, adapter: type[TorchBackendDevice], pytester: pytest.Pytester
) -> None:
    result = pytester.runpytest(*CONFORMANCE, f"--assay-device={adapter.kind}/float16")
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(
        [
            f"*test_device_keeps_the_protocol[[]{point}[]] PASSED*"
            for point in ("names", "vendor", "dtypes", "precision", "seed", "determinism", "memory")
        ]
    )


def test_suite_fails_at_the_points_that_are_violated(
    machine_of_suite: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, right: left.mm(right) + 1)
    del AscendDevice.module().mem_get_info
    result = pytester.runpytest(*CONFORMANCE, "--assay-device=npu/bfloat16")
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*supported_dtypes() names float32, but a product in it is*",
            "E*AttributeError: module 'torch.npu' has no attribute 'mem_get_info'",
        ]
    )


@pytest.mark.parametrize("required", ["0", "1"])
def test_suite_fails_where_the_device_is_absent(
    required: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", required)
    monkeypatch.setattr(conformance, "require_run", lambda run: None)
    result = pytester.runpytest(*CONFORMANCE, "--assay-device=npu/bfloat16")
    result.assert_outcomes(errors=7)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["device 'npu' is absent; missing: the Python package torch_npu. On this machine: *"]
    )


def test_suite_ends_where_a_driver_hangs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("STAND_INS_SITUATION", "hanging")
    require_soon = partial(require_run, timeout_seconds=2.0)
    monkeypatch.setattr(conformance, "require_run", require_soon)
    result = pytester.runpytest(*CONFORMANCE, "--assay-device=npu/bfloat16")
    result.assert_outcomes(errors=7)
    result.stdout.fnmatch_lines(
        ["the adapter for 'npu' is broken: asked for its devices, it did not answer within 2 s"]
    )


def test_suite_without_a_device_is_one_of_the_host(pytester: pytest.Pytester) -> None:
    pytester.runpytest(*CONFORMANCE).assert_outcomes(passed=7)
