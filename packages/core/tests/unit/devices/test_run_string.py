"""RUN strings are read in the form of the contract, and in no other."""

import pytest

from assay.devices.run_string import DeviceName, Run, parse_device, parse_run
from assay.errors import UsageError


@pytest.mark.parametrize(
    ("text", "device", "dtype"),
    [
        ("cpu/float32", "cpu", "float32"),
        ("cuda/bfloat16", "cuda", "bfloat16"),
        ("npu:1/float16", "npu:1", "float16"),
        ("sim:fp8/bfloat16", "sim:fp8", "bfloat16"),
        ("cpu/float64", "cpu", "float64"),
    ],
)
def test_run_is_read_and_written_alike(text: str, device: str, dtype: str) -> None:
    run = parse_run(text)
    assert run == Run(device, dtype)
    assert str(run) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cpu", DeviceName("cpu")),
        ("cuda:12", DeviceName("cuda", "12")),
        ("sim:split4", DeviceName("sim", "split4")),
    ],
)
def test_device_is_divided_at_the_colon(text: str, name: DeviceName) -> None:
    assert parse_device(text) == name


@pytest.mark.parametrize(
    "text", ["", "cuda:", ":1", "CUDA", "cuda:1:2", "cuda 1", "cuda:-1", "cuda\n"]
)
def test_malformed_device_is_a_usage_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_device(text)
    assert str(raised.value) == f"{text!r} is not a device; write one as cpu, cuda:1 or sim:fp8"


@pytest.mark.parametrize("text", ["", "cpu", "cpu/", "/float32"])
def test_half_a_run_is_a_usage_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_run(text)
    assert str(raised.value) == (
        f"{text!r} is not a run; write one as DEVICE/DTYPE, such as cuda:1/bfloat16"
    )


@pytest.mark.parametrize(
    "dtype", ["float8", "tf32", "float8_e4m3fn", "bf16", "float32/x", "Float32"]
)
def test_dtype_that_no_model_runs_in_is_a_usage_error(dtype: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_run(f"cpu/{dtype}")
    assert str(raised.value) == (
        f"unknown dtype {dtype!r} in run 'cpu/{dtype}'; known: float64, float32, bfloat16, float16"
    )


def test_malformed_device_in_a_run_is_named() -> None:
    with pytest.raises(UsageError, match="'cuda:' is not a device"):
        parse_run("cuda:/float32")
