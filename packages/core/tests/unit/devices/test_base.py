"""Detections that cannot contradict themselves, and suspended execution."""

import subprocess
import sys
import threading

import pytest

from assay.devices.base import Detection, DeviceVendor, SuspendedExecution, execution_suspended

VENDOR = DeviceVendor("acme", "Acme Rocket", "gloo", "eager", ("assay-acme",))


def test_detection_counts_what_it_names() -> None:
    detection = Detection(VENDOR, products=("Rocket 1", "Rocket 2"))
    assert detection.present


def test_detection_that_misses_something_is_absent() -> None:
    detection = Detection(VENDOR, missing="a rocket")
    assert not detection.present


@pytest.mark.parametrize(("products", "missing"), [((), ""), (("Rocket 1",), "a rocket")])
def test_detection_has_either_devices_or_what_is_missing(
    products: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(ValueError, match="either devices or what is missing"):
        Detection(VENDOR, products=products, missing=missing)


def test_suspension_nests_and_ends_with_an_exception() -> None:
    assert not execution_suspended()
    with SuspendedExecution():
        with SuspendedExecution():
            assert execution_suspended()
        assert execution_suspended()
    assert not execution_suspended()
    with pytest.raises(RuntimeError), SuspendedExecution():
        raise RuntimeError
    assert not execution_suspended()


def test_suspension_is_of_one_thread() -> None:
    seen = []
    with SuspendedExecution():
        thread = threading.Thread(target=lambda: seen.append(execution_suspended()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_neither_the_protocol_nor_the_listing_imports_torch() -> None:
    code = "import sys, assay.devices.base, assay.devices.detection; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
