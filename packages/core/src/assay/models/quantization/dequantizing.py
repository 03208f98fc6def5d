"""The weights of a quantized folder as floats, for the reference and for the comparison of what was loaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from assay.files import read_json_object
from assay.models.quantization.quantized_weight import Grid, InputRounding, QuantizedWeight
from assay.models.quantization.stored_weights import WeightStore, open_folder
from assay.models.quantization.weight_formats import has_known_format, list_weights


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
    if stored.quantization.get("quant_method") == "mxfp4":
        return _read_experts(stored)
    if not has_known_format(stored):
        return None

    def read(name: str) -> Tensor:
        form = forms[name]
        if form is None:
            return stored.read(name)
        return _dequantize_in(dtype, form.read(stored, name.removesuffix(".weight")))

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


_MX_BLOCKS, _MX_SCALES = "_blocks", "_scales"


def _read_experts(stored: WeightStore) -> DequantizedTensors:
    """Read experts in MXFP4: `NAME_blocks` [..., outputs, groups, 16 bytes], `NAME_scales` (E8M0).

    Source of the layout: transformers 5.23, `integrations/mxfp4.py`, which transposes the last two dims.
    """

    def read(name: str) -> Tensor:
        blocks = stored.fetch(f"{name}{_MX_BLOCKS}", name)
        scales = stored.fetch(f"{name}{_MX_SCALES}", name, blocks.shape[:-1])
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
        values = Grid.of_e2m1().table[codes] * torch.exp2(scales.float() - 127)[..., None]
        return values.flatten(-2).transpose(-2, -1)

    packed = {name.removesuffix(_MX_BLOCKS) for name in stored.shapes if name.endswith(_MX_BLOCKS)}
    parts = {f"{name}{part}" for name in packed for part in (_MX_BLOCKS, _MX_SCALES)}
    found: dict[str, Callable[[], Tensor]] = {}
    for name in (*stored.shapes, *packed):
        if name not in parts:
            found[name] = partial(read if name in packed else stored.read, name)
    return DequantizedTensors(found, packed, stored.dtype)
