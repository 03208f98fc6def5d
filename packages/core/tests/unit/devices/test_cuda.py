"""The adapter for GPUs of NVIDIA and AMD, on a stand-in for `torch.cuda`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.devices import cuda
from assay.devices.base import Device
from assay.devices.cuda import CudaDevice
from assay.errors import MachineError, UsageError


class FakeGpus:
    """A fake `torch.cuda` with some GPUs; records its calls."""

    def __init__(self, *products: str, capability: tuple[int, int] = (9, 0)) -> None:
        self.products = products
        self.capability = capability
        self.has_bfloat16 = True
        self.current = 0
        self.asked: list[tuple[str, int]] = []

    def is_available(self) -> bool:
        return bool(self.products)

    def device_count(self) -> int:
        return len(self.products)

    def get_device_name(self, index: int) -> str:
        return self.products[index]

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")

    def is_bf16_supported(self, *, including_emulation: bool) -> bool:
        # torch counts the emulated bfloat16 of a Turing GPU as supported.
        return including_emulation or self.has_bfloat16

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        outer, self.current = self.current, index
        yield
        self.current = outer

    def synchronize(self, index: int) -> None:
        self.asked.append(("synchronize", index))

    def reset_peak_memory_stats(self, index: int) -> None:
        self.asked.append(("reset", index))

    def max_memory_allocated(self, index: int) -> int:
        return 1000 + index

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 2000 + index, 9000


@pytest.fixture
def install_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpus]:
    def install(
        gpus: FakeGpus, *, cuda_version: str | None = None, hip: str | None = None
    ) -> FakeGpus:
        monkeypatch.setattr(torch, "cuda", gpus)
        monkeypatch.setattr(torch.version, "cuda", cuda_version)
        monkeypatch.setattr(torch.version, "hip", hip)
        return gpus

    return install


def test_cpu_build_of_torch_lacks_a_build_for_either_vendor(
    install_gpus: Callable[..., FakeGpus],
) -> None:
    install_gpus(FakeGpus())
    nvidia, amd = CudaDevice.detect()
    assert (nvidia.vendor.name, nvidia.missing) == (
        "nvidia",
        f"a torch built for CUDA; this one is {torch.__version__}",
    )
    assert (amd.vendor.name, amd.missing) == (
        "amd",
        f"a torch built for ROCm; this one is {torch.__version__}",
    )


@pytest.mark.parametrize(
    ("build", "present", "absent", "label"),
    [
        ({"cuda_version": "13.0"}, "nvidia", "amd", "assay-nvidia"),
        ({"hip": "6.4.1"}, "amd", "nvidia", "assay-amd"),
    ],
)
def test_vendor_follows_from_the_build_of_torch(
    install_gpus: Callable[..., FakeGpus],
    build: dict[str, str],
    present: str,
    absent: str,
    label: str,
) -> None:
    install_gpus(FakeGpus("Big GPU", "Big GPU"), **build)
    found = {detection.vendor.name: detection for detection in CudaDevice.detect()}
    assert found[present].products == ("Big GPU", "Big GPU")
    assert found[present].variants == ("0", "1")
    assert not found[absent].present
    device = CudaDevice()
    assert device.vendor.name == present
    assert device.vendor.runner_labels == (label,)
    assert device.vendor.distributed_backend == "nccl"


def test_build_without_a_usable_gpu_quotes_the_warning_of_torch(
    install_gpus: Callable[..., FakeGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    gpus = install_gpus(FakeGpus(), cuda_version="13.0")

    def is_available() -> bool:
        warnings.warn("the driver is too old (found version 11040)", stacklevel=1)
        return False

    monkeypatch.setattr(gpus, "is_available", is_available)
    assert CudaDevice.detect()[0].missing == (
        "a NVIDIA GPU with a driver that torch can use "
        "(the driver is too old (found version 11040))"
    )


def test_opened_gpu_keeps_its_index_in_everything(install_gpus: Callable[..., FakeGpus]) -> None:
    gpus = install_gpus(FakeGpus("Big GPU", "Small GPU"), cuda_version="13.0")
    device = CudaDevice("1")
    assert isinstance(device, Device)
    assert (device.name, device.torch_device, device.product()) == ("cuda:1", "cuda:1", "Small GPU")
    assert device.count() == 2
    device.synchronize()
    device.reset_peak_memory()
    assert gpus.asked == [("synchronize", 1), ("reset", 1)]
    assert device.peak_memory_bytes() == 1001
    assert device.free_memory_bytes() == 2001
    with device.execution():
        assert gpus.current == 1
    assert gpus.current == 0


def test_without_an_index_the_first_gpu_is_opened(install_gpus: Callable[..., FakeGpus]) -> None:
    install_gpus(FakeGpus("Big GPU"), cuda_version="13.0")
    assert (CudaDevice().name, CudaDevice().torch_device) == ("cuda", "cuda:0")


def test_gpu_that_is_not_there_is_absent_and_a_word_is_unknown(
    install_gpus: Callable[..., FakeGpus],
) -> None:
    install_gpus(FakeGpus("Big GPU"), cuda_version="13.0")
    with pytest.raises(MachineError) as absent:
        CudaDevice("1")
    assert str(absent.value) == (
        "device 'cuda:1' is absent; missing: there are 1. On this machine: cuda:0"
    )
    with pytest.raises(UsageError, match="unknown device 'cuda:fp8'; there is: cuda, cuda:0"):
        CudaDevice("fp8")


def test_architecture_is_what_kernels_are_built_for(
    install_gpus: Callable[..., FakeGpus],
) -> None:
    install_gpus(FakeGpus("Big GPU", capability=(8, 6)), cuda_version="13.0")
    assert CudaDevice().architecture() == "sm_86"
    install_gpus(FakeGpus("Big GPU"), hip="6.4.1")
    assert CudaDevice().architecture() == "gfx942"


def test_emulated_bfloat16_is_not_supported(install_gpus: Callable[..., FakeGpus]) -> None:
    gpus = install_gpus(FakeGpus("Big GPU"), cuda_version="13.0")
    assert CudaDevice().supported_dtypes() == ("float64", "float32", "bfloat16", "float16")
    gpus.has_bfloat16 = False
    assert CudaDevice().supported_dtypes() == ("float64", "float32", "float16")


@pytest.mark.parametrize(
    ("setting", "capability", "precision"),
    [
        ("none", (9, 0), "float32"),
        ("ieee", (9, 0), "float32"),
        ("tf32", (9, 0), "tf32"),
        ("tf32", (8, 0), "tf32"),
        ("bf16", (8, 0), "tf32"),
        ("tf32", (7, 5), "float32"),
    ],
)
def test_tf32_needs_permission_and_hardware(
    install_gpus: Callable[..., FakeGpus],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    capability: tuple[int, int],
    precision: str,
) -> None:
    install_gpus(FakeGpus("Big GPU", capability=capability), cuda_version="13.0")
    settings = SimpleNamespace(fp32_precision=setting)
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    assert CudaDevice().effective_precision("float32") == precision
    assert CudaDevice().effective_precision("bfloat16") == "bfloat16"


def test_tf32_on_amd_needs_a_variable_as_well(
    install_gpus: Callable[..., FakeGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpus(FakeGpus("Big GPU"), hip="6.4.1")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    monkeypatch.delenv("HIPBLASLT_ALLOW_TF32", raising=False)
    assert CudaDevice().effective_precision("float32") == "float32"
    monkeypatch.setenv("HIPBLASLT_ALLOW_TF32", "1")
    assert CudaDevice().effective_precision("float32") == "tf32"


def test_determinism_fixes_the_workspace_and_restores_everything(
    install_gpus: Callable[..., FakeGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpus(FakeGpus("Big GPU"), cuda_version="13.0")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    inside: list[object] = []

    def look_and_fail() -> None:
        inside.append(os.environ["CUBLAS_WORKSPACE_CONFIG"])
        inside.append(torch.are_deterministic_algorithms_enabled())
        inside.append(torch.backends.cudnn.benchmark)
        raise RuntimeError

    with pytest.raises(RuntimeError), CudaDevice().deterministic():
        look_and_fail()
    assert inside == [":4096:8", True, False]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


def test_determinism_leaves_the_users_workspace(
    install_gpus: Callable[..., FakeGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpus(FakeGpus("Big GPU"), cuda_version="13.0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with CudaDevice().deterministic():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("build", "vendor", "platform_name", "version", "library"),
    [
        ({"cuda_version": "13.0"}, "nvidia", "cuda", "13.0", "cudnn"),
        ({"hip": "6.4.1"}, "amd", "hip", "6.4.1", "miopen"),
    ],
)
def test_versions_list_what_numbers_depend_on(
    install_gpus: Callable[..., FakeGpus],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    build: dict[str, str],
    vendor: str,
    platform_name: str,
    version: str,
    library: str,
) -> None:
    install_gpus(FakeGpus("Big GPU"), **build)
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.65.06\nGCC version: 12\n")
    monkeypatch.setitem(cuda._DRIVER_VERSIONS, vendor, driver)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    versions = CudaDevice().versions()
    assert versions["torch"] == torch.__version__
    assert versions[platform_name] == version
    assert versions[library] == "91300"
    assert versions["driver"] == "NVRM version: 580.65.06"


def test_versions_without_a_value_are_left_out(
    install_gpus: Callable[..., FakeGpus], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(FakeGpus("Big GPU"), cuda_version="13.0")
    monkeypatch.setitem(cuda._DRIVER_VERSIONS, "nvidia", tmp_path / "absent")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert set(CudaDevice().versions()) == {"torch", "python", "cuda"}
