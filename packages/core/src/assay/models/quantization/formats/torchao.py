"""torchao: int8 or fp8 weights with a scale per row, or per group of a row.

Source of the layouts: torchao 0.18, `prototype/safetensors` and `quantization/quantize_/workflows`.
"""

import torch

from assay.models.quantization.formats.protocol import Format, per_group, precision_of
from assay.models.quantization.quantized_weight import Grid, Groups, QuantizedWeight
from assay.models.quantization.stored import WeightStore

_CODES, _SCALES, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"


def _read(stored: WeightStore, module: str) -> QuantizedWeight:
    """Read `_weight_qdata` [outputs, inputs], `_weight_scale` and `_weight_zero_point` [outputs, groups]."""
    name = f"{module}.{_CODES}"
    data = stored.fetch(name, name, (None, None))
    if data.dtype == torch.int8:
        grid = Grid.of_signed(-128, 127)
    elif data.dtype == torch.float8_e4m3fn:
        grid = Grid.of_dtype(data.dtype)
    else:
        raise stored.refuse(name, f"of dtype {data.dtype} is neither int8 nor fp8")
    scales = stored.fetch(f"{module}.{_SCALES}", name, (None, None))
    rows, columns = data.shape
    down, across = (max(1, size) for size in scales.shape)
    if rows % down or columns % across:
        raise stored.refuse(f"{module}.{_SCALES}", f"does not divide {rows} x {columns} values")
    groups = Groups((rows, columns), (rows // down, columns // across))
    zeros = None
    if grid.is_integer and f"{module}.{_ZEROS}" in stored.shapes:
        points = stored.fetch(f"{module}.{_ZEROS}", name, (down, across))
        zeros = per_group(stored, f"{module}.{_ZEROS}", points, groups)
    return QuantizedWeight(
        codes=data.view(torch.uint8),
        grid=grid,
        groups=groups,
        scales=per_group(stored, f"{module}.{_SCALES}", scales, groups),
        scale_precision=precision_of(scales),
        stored_zeros=zeros,
    )


TORCHAO = Format(_CODES, _SCALES, (_CODES, _SCALES, _ZEROS), _read)
