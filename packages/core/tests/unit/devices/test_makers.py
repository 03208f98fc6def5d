"""Adapters over the modules of their makers, on stand-ins that behave as the makers document."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.devices import trainium
from assay.devices.apple import AppleDevice
from assay.devices.ascend import AscendDevice
from assay.devices.base import AbsentDeviceError, Device
from assay.devices.conformance import ConformanceError, check_device_protocol
from assay.devices.gaudi import GaudiDevice
from assay.devices.intel import IntelDevice
from assay.devices.spyre import SpyreDevice
from assay.devices.torch_backend import TorchBackendDevice
from assay.devices.trainium import TrainiumDevice

STAND_INS = Path(__file__).parent / "stand_ins"
PACKAGES = (
    "cuda_like",
    "torch_npu",
    "torch_spyre",
    "habana_frameworks",
    "torch_neuronx",
    "torch_xla",
)
ADAPTERS = (AscendDevice, GaudiDevice, SpyreDevice, TrainiumDevice, IntelDevice, AppleDevice)

each_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.kind)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One that has devices of every maker."""
    monkeypatch.syspath_prepend(STAND_INS)
    from packages.core.tests.unit.devices.stand_ins.cuda_like import (
        GIBIBYTE,
        cuda_like,
        properties,
    )

    facts = {"has_fp64": False, "driver_version": "25.18"}
    gpu = cuda_like(
        "xpu",
        "Intel(R) Arc(TM) B580",
        get_device_properties=properties(**facts),
        get_device_capability=lambda _: {"architecture": 0x5004004},
        is_bf16_supported=lambda *, including_emulation: not including_emulation,
        is_tf32_supported=lambda: True,
    )
    metal = SimpleNamespace(
        device_count=lambda: 1,
        synchronize=lambda: None,
        recommended_max_memory=lambda: 8 * GIBIBYTE,
        driver_allocated_memory=lambda: GIBIBYTE,
        manual_seed=lambda _: None,
        _is_in_bad_fork=lambda: False,
    )
    monkeypatch.setattr(torch, "xpu", gpu)
    monkeypatch.setattr(torch, "mps", metal)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Max")
    for name, text in (("_DRIVER", ""), ("_INSTANCE", "trn1.32xlarge\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(trainium, name, tmp_path / name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
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
    with pytest.raises(AbsentDeviceError, match="missing: there are"):
        adapter("8")


def test_function_that_a_makers_module_lacks_is_named(machine: None) -> None:
    device = on_host(AscendDevice)
    del AscendDevice.module().max_memory_allocated
    with pytest.raises(ConformanceError, match=r"memory: AttributeError: .*max_memory_allocated"):
        check_device_protocol(device)


def test_absent_makers_are_told_without_importing_anything() -> None:
    for adapter in ADAPTERS:
        (found,) = adapter.detect()
        assert not found.present
    assert AscendDevice.detect()[0].missing == "the Python package torch_npu"
    assert "habana_frameworks" not in sys.modules


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


def test_formats_of_operands_follow_the_settings(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert AscendDevice().effective_precision("float32") == "float32"
    AscendDevice.module().matmul.allow_hf32 = True
    assert AscendDevice().effective_precision("float32") == "hf32"
    assert SpyreDevice().effective_precision("float16") == "sen169"

    assert TrainiumDevice().effective_precision("float32") == "float32"
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type transformer --auto-cast=matmult")
    assert TrainiumDevice().effective_precision("float32") == "bfloat16"
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast all --auto-cast-type tf32")
    assert TrainiumDevice().effective_precision("float32") == "tf32"

    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(allow_tf32=False))
    assert IntelDevice().effective_precision("float32") == "float32"
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(allow_tf32=True))
    assert IntelDevice().effective_precision("float32") == "tf32"


def test_lazy_devices_start_what_they_gathered_before_they_wait(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    GaudiDevice().synchronize()
    assert GaudiDevice.module().asked == ["mark_step", "synchronize"]
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    GaudiDevice().synchronize()
    assert GaudiDevice.module().asked == ["mark_step", "synchronize", "synchronize"]

    core = TrainiumDevice("1")
    core.synchronize()
    core.seed(7)
    assert core._model_functions().asked == ["mark_step", "wait", "seed 7 xla:1"]
