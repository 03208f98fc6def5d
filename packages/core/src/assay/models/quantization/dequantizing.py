"""The weights of a quantized folder as floats, for the reference and for the comparison of what was loaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from assay.files import read_json_object
from assay.models.quantization.quantized_weight import InputRounding, QuantizedWeight
from assay.models.quantization.stored_weights import open_folder
from assay.models.quantization.weight_formats import MXFP4_EXPERTS, has_known_format, list_weights


class DequantizedTensors(Mapping[str, Tensor]):
    """Stored tensors by name; quantized ones are dequantized to float32 at each access."""

    def __init__(
        self,
        readers: Mapping[str, Callable[[], Tensor]],
        quantized: set[str],
        dtype: torch.dtype | None,
        inputs: Mapping[str, InputRounding] | None = None,
    ) -> None:
        """quantized: the names of the quantized ones. dtype: that of the model, if config.json has one.

        inputs: the rounding of the inputs of each weight.
        """
        self._readers = readers
        self.quantized = quantized
        self.dtype = dtype
        self.inputs = inputs or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def plain(self) -> "DequantizedTensors":
        """Return the tensors that are not quantized."""
        readers = {name: one for name, one in self._readers.items() if name not in self.quantized}
        return DequantizedTensors(readers, set(), self.dtype)


def is_quantized(folder: Path) -> bool:
    """Return True if config.json states a quantization."""
    return isinstance(read_json_object(folder / "config.json").get("quantization_config"), dict)


def dequantize_folder(
    folder: Path, dtype: torch.dtype = torch.float32
) -> DequantizedTensors | None:
    """Return the tensors of a quantized folder; None for an unknown method.

    dtype: the dtype in which a library computes the weights.
    Raises: UsageError, naming file and key, for unreadable weights.
    """
    stored = open_folder(folder)
    if not has_known_format(stored):
        return None

    def read(name: str) -> Tensor:
        form = forms[name]
        if form is None:
            return stored.read(name)
        if form.values is not None:
            return form.values(stored, name.removesuffix(".weight"))
        values = _dequantize_in(dtype, form.read(stored, name.removesuffix(".weight")))
        if form is MXFP4_EXPERTS:
            values = values.unflatten(0, (stored.shapes[f"{name}_blocks"][0], -1)).mT
        return values

    forms = list_weights(stored)
    quantized = {name for name, form in forms.items() if form is not None}
    inputs = {
        name: rounding
        for name, form in forms.items()
        if form is not None
        and (rounding := form.inputs(stored, name.removesuffix(".weight"))) is not None
    }
    readers = {name: partial(read, name) for name in forms}
    return DequantizedTensors(readers, quantized, stored.dtype, inputs)


def _dequantize_in(dtype: torch.dtype, weight: QuantizedWeight) -> Tensor:
    """Dequantize with the roundings of a library that computes in `dtype`.

    It rounds the product of level and scale, or both factors before. Few different levels and scales make the errors of
    a row alike. Each row has the roundings that change its scale more.
    """
    exact = weight.dequantize()
    if dtype not in (torch.float16, torch.bfloat16):
        return exact
    grid = replace(weight.grid, table=weight.grid.table.to(dtype).float())
    factors = replace(weight, grid=grid, scales=weight.scales.to(dtype).float())
    of_factors, of_product = (one.to(dtype).float() for one in (factors.dequantize(), exact))
    bends = [(exact * (one - exact)).sum(1).abs() for one in (of_factors, of_product)]
    return torch.where((bends[0] >= bends[1])[:, None], of_factors, of_product)
