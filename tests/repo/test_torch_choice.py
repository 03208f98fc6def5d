"""ASSAY_TORCH: which torch is chosen for which machine."""

import sys
from pathlib import Path

import pytest

from environments.machine import Accelerator, VendorEntry
from environments.torch_choice import (
    MachineTorch,
    TorchBuild,
    TorchUnavailableError,
    choose_torch,
    probe_torch,
)

FROM_REGISTRY = Accelerator(
    VendorEntry("alpha", "Alpha GPU", (), torch_from_registry=True), "/dev/alpha0"
)
OWN_BUILD = Accelerator(VendorEntry("beta", "Beta Card", ()), "/dev/beta0")
SCREEN = Accelerator(VendorEntry("gamma", "Gamma Graphics", ()), "/dev/dri/x", drives_screen=True)

USES_IT = MachineTorch("2.9.0+vendor", "/opt/vendor", "beta")
ONLY_CPU = MachineTorch("2.9.0", "/usr/lib/python3", "")


def test_no_accelerator_gives_the_cpu_build() -> None:
    def never_asked() -> MachineTorch | None:
        raise AssertionError("importing the machine's torch takes seconds")

    choice = choose_torch("auto", [], never_asked)
    assert choice.build is TorchBuild.CPU
    assert choice.vendor == ""


@pytest.mark.parametrize("accelerator", [FROM_REGISTRY, OWN_BUILD, SCREEN])
def test_a_torch_of_the_machine_that_uses_the_accelerator_is_kept(accelerator: Accelerator) -> None:
    choice = choose_torch("auto", [accelerator], lambda: USES_IT)
    assert choice.build is TorchBuild.MACHINE
    assert choice.vendor == accelerator.vendor.title


@pytest.mark.parametrize("machine_torch", [None, ONLY_CPU])
def test_the_registry_build_serves_the_vendor_that_it_carries(
    machine_torch: MachineTorch | None,
) -> None:
    choice = choose_torch("auto", [SCREEN, FROM_REGISTRY], lambda: machine_torch)
    assert choice.build is TorchBuild.REGISTRY
    assert choice.vendor == "Alpha GPU"


def test_an_accelerator_without_its_torch_is_never_tested_on_the_cpu() -> None:
    with pytest.raises(TorchUnavailableError) as raised:
        choose_torch("auto", [OWN_BUILD], lambda: None)
    assert str(raised.value) == (
        "This machine shows Beta Card (/dev/beta0), but the Python that runs nox has no torch.\n"
        "Install the vendor's build of torch (and its driver) for the Python that runs nox, then "
        "run nox again;\n"
        "or set ASSAY_TORCH=cpu to test on the processor only."
    )


def test_a_torch_that_cannot_use_the_accelerator_is_named() -> None:
    with pytest.raises(
        TorchUnavailableError, match=r"torch 2\.9\.0 in /usr/lib/python3 cannot use"
    ):
        choose_torch("auto", [OWN_BUILD, SCREEN], lambda: ONLY_CPU)


@pytest.mark.parametrize("machine_torch", [None, ONLY_CPU])
def test_graphics_that_drive_a_screen_do_not_stop_a_laptop(
    machine_torch: MachineTorch | None,
) -> None:
    choice = choose_torch("auto", [SCREEN], lambda: machine_torch)
    assert choice.build is TorchBuild.CPU
    assert "Gamma Graphics (/dev/dri/x) may only drive a screen" in choice.reason


def test_cpu_is_the_cpu_build_on_any_machine() -> None:
    choice = choose_torch("cpu", [FROM_REGISTRY, OWN_BUILD], lambda: USES_IT)
    assert choice.build is TorchBuild.CPU


@pytest.mark.parametrize("machine_torch", [USES_IT, ONLY_CPU])
def test_system_is_the_torch_of_the_machine_whatever_it_can_use(
    machine_torch: MachineTorch,
) -> None:
    choice = choose_torch("system", [OWN_BUILD], lambda: machine_torch)
    assert choice.build is TorchBuild.MACHINE
    assert choice.vendor == ""


def test_system_without_a_torch_says_where_to_install_it() -> None:
    with pytest.raises(TorchUnavailableError, match="the Python that runs nox has no torch"):
        choose_torch("system", [], lambda: None)


def test_an_unknown_request_names_the_known_ones() -> None:
    with pytest.raises(TorchUnavailableError, match="'gpu' is none of auto, cpu, system"):
        choose_torch("gpu", [], lambda: None)


FAKE_TORCH = """
print("a vendor library greets")
__version__ = "2.9.0+fake"
registered = []
class accelerator:
    @staticmethod
    def current_accelerator(check_available):
        return registered[0] if registered else None
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(FAKE_TORCH, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_torch_without_accelerator_is_probed(site: Path) -> None:
    assert probe_torch(sys.executable, []) == MachineTorch("2.9.0+fake", str(site), "")


def test_version_is_the_one_by_which_pip_can_be_held_to_it(site: Path) -> None:
    """PyPI's builds for CUDA are called 2.9.0 by their metadata and 2.9.0+cu128 by themselves."""
    metadata = site / "torch-2.9.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n", encoding="utf-8")

    assert probe_torch(sys.executable, []) == MachineTorch("2.9.0", str(site), "")


def test_a_plugin_registers_its_accelerator(site: Path) -> None:
    plugin = "import torch, types\ntorch.registered.append(types.SimpleNamespace(type='beta'))\n"
    (site / "torch_beta.py").write_text(plugin, encoding="utf-8")
    beta = Accelerator(VendorEntry("beta", "Beta", (), torch_plugin="torch_beta"), "/dev/beta0")
    assert probe_torch(sys.executable, [beta]) == MachineTorch("2.9.0+fake", str(site), "beta")


def test_a_plugin_that_fails_to_import_gives_no_accelerator(site: Path) -> None:
    (site / "torch_beta.py").write_text("raise OSError('no driver')", encoding="utf-8")
    beta = Accelerator(VendorEntry("beta", "Beta", (), torch_plugin="torch_beta"), "/dev/beta0")
    assert probe_torch(sys.executable, [beta]) == MachineTorch("2.9.0+fake", str(site), "")


@pytest.mark.parametrize("source", ["raise OSError('broken')", "import os; os._exit(139)"])
def test_a_torch_that_cannot_be_imported_is_none(site: Path, source: str) -> None:
    (site / "torch/__init__.py").write_text(source, encoding="utf-8")
    assert probe_torch(sys.executable, []) is None
