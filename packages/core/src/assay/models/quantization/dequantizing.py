"""The values of a quantized folder, for models whose loader dequantizes them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from assay.models.quantization.formats.registry import has_known_format, list_weights
from assay.models.quantization.quantized_weight import Grid
from assay.models.quantization.stored import WeightStore, open_folder

_BLOCKS, _SCALES = "_blocks", "_scales"


class DequantizedTensors(Mapping[str, Tensor]):
    """Stored tensors by name; quantized ones are dequantized to float32 at each access."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def dequantize_folder(folder: Path) -> DequantizedTensors | None:
    """Return the tensors of a quantized folder; None for an unknown method."""
    stored = open_folder(folder)
    if stored.quantization.get("quant_method") == "mxfp4":
        return DequantizedTensors(_read_experts(stored))
    if not has_known_format(stored):
        return None

    def read(name: str) -> Tensor:
        form = forms[name]
        if form is None:
            return stored.read(name)
        return form.read(stored, name.removesuffix(".weight")).dequantize()

    forms = list_weights(stored)
    return DequantizedTensors({name: partial(read, name) for name in forms})


def _read_experts(stored: WeightStore) -> dict[str, Callable[[], Tensor]]:
    """Read experts in MXFP4: `NAME_blocks` [..., outputs, groups, 16 bytes], `NAME_scales` (E8M0).

    Source of the layout: transformers 5.23, `integrations/mxfp4.py`, which transposes the last two dims.
    """

    def read(name: str) -> Tensor:
        blocks = stored.fetch(f"{name}{_BLOCKS}", name)
        scales = stored.fetch(f"{name}{_SCALES}", name, blocks.shape[:-1])
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
        values = Grid.of_e2m1().table[codes] * torch.exp2(scales.float() - 127)[..., None]
        return values.flatten(-2).transpose(-2, -1)

    packed = {name.removesuffix(_BLOCKS) for name in stored.shapes if name.endswith(_BLOCKS)}
    parts = {f"{name}{part}" for name in packed for part in (_BLOCKS, _SCALES)}
    found: dict[str, Callable[[], Tensor]] = {}
    for name in (*stored.shapes, *packed):
        if name not in parts:
            found[name] = partial(read if name in packed else stored.read, name)
    return found
