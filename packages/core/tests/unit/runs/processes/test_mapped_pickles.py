from tempfile import TemporaryFile
from typing import Any

import torch

from assay.runs.processes.mapped_pickles import dump_mapped, load_mapped


def store(value: object) -> Any:
    with TemporaryFile() as file:
        dump_mapped(value, file)
        return load_mapped(file)


def test_a_value_comes_back_as_it_was() -> None:
    tensors = [
        torch.arange(6).reshape(2, 3),
        torch.rand(3, 2).double().T,
        torch.ones(2).bfloat16(),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
    ]

    loaded = store({"name": tensors, "number": 7})

    assert loaded["number"] == 7
    for one, expected in zip(loaded["name"], tensors, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0)


def test_large_tensors_take_no_anonymous_memory() -> None:
    loaded = store([torch.ones(1 << 22), torch.ones(1 << 22)])
    before = anonymous_bytes()
    assert float(loaded[0].sum() + loaded[1].sum()) == 2 << 22

    assert anonymous_bytes() - before < 4 << 20


def test_loaded_tensors_can_be_changed() -> None:
    loaded = store(torch.zeros(4))
    loaded += 1

    assert loaded.tolist() == [1, 1, 1, 1]


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as file:  # noqa: PTH123
        sizes = [int(line.split()[1]) for line in file if line.startswith("RssAnon:")]
    return sizes[0] * 1024
