"""Each format: what its files hold stands for the values that its writer worked out."""

from pathlib import Path

import pytest
import torch

from assay.models.quantization.formats.registry import list_weights
from assay.models.quantization.stored import open_folder
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    no_fault,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    write_folder,
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stored_numbers_give_the_values_of_the_writer(case: Case, tmp_path: Path) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    tensors, values = case.write(weight, no_fault)
    shard = {f"model.layers.0.mlp.up_proj.{name}": one for name, one in tensors.items()}
    folder = write_folder(tmp_path / "model", [shard], case.settings)
    stored = open_folder(folder)
    [(name, form)] = list_weights(stored).items()
    assert name == "model.layers.0.mlp.up_proj.weight"
    assert form is not None
    read = form.read(stored, "model.layers.0.mlp.up_proj")
    torch.testing.assert_close(read.dequantize(), values, rtol=1e-6, atol=1e-9)
