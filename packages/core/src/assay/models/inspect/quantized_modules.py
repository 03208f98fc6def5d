"""Compare the weights that quantized modules compute with, whatever their form in memory, with their files.

A linear module maps the unit vectors to the columns of its weight. So its own code shows its weight, with the scale,
zero point, group and order of codes that it uses.
"""

# ruff: noqa: ANN401 - objects of transformers and of quantization libraries

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from assay.models.config_files import first_line
from assay.models.inspect.report import LoadReport, WeightDifference
from assay.models.quantization.dequantizing import DequantizedTensors
from assay.models.quantization.quantized_weight import InputRounding
from assay.progress import counted

_ROWS = 1024  # unit vectors at a time

# Units of the dtype by which the values of a correct module differ, relative to the largest value of a row. A library
# rounds the scale, its product with the code, and the result. Measured: at most 0.9 (torchao 0.18, bitsandbytes 0.50,
# compressed-tensors 0.20, bfloat16). A zero point that is one step off changes a row of int8 by 3.5 units of
# bfloat16, and one code of four bits by 18.
_ROUNDINGS = 1.5


def quantized_modules(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the modules of `model` whose weights the files hold quantized, by the name of the weight."""
    if not isinstance(stored, DequantizedTensors):
        return {}
    modules, prefix = dict(model.named_modules()), getattr(model, "base_model_prefix", "")
    found = {}
    for name in sorted(stored.quantized):
        path = name.removesuffix(".weight")
        for own in (path, f"{prefix}.{path}", path.removeprefix(f"{prefix}.")):
            if own in modules and own != name:
                found[name] = modules[own]
                break
    return found


def finish_loading(model: Any) -> None:
    """Run one token: compressed-tensors 0.20 unpacks weights in the first call of a model."""
    with torch.no_grad(), suppress(Exception):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device))


def compare_quantized_modules(
    modules: Mapping[str, Any],
    stored: DequantizedTensors,
    dtypes: tuple[torch.dtype, torch.dtype],
    report: LoadReport,
) -> None:
    """Compare the modules with their dequantized weights; add to `report`.

    dtypes: those of the model now and before its quantization; the library computes in one of them.
    """
    unit = max(torch.finfo(one).eps for one in dtypes)
    for name in counted("compares quantized weights", sorted(stored.quantized), "weights"):
        if name not in modules:
            report.not_compared.append(f"{name} (no module of this name holds it)")
            continue
        expected = stored[name]
        try:
            actual = _weight_of(modules[name], expected.shape, dtypes[0])
        except Exception as error:  # noqa: BLE001 - the code of any library
            reason = f"{type(error).__name__}: {first_line(error)}"
            report.not_compared.append(f"{name} (its module takes no unit vectors: {reason})")
            continue
        report.compared += 1
        of_input = stored.inputs[name].error_of_one if name in stored.inputs else 0.0
        wrong = _find_wrong(name, actual, expected, _ROUNDINGS * unit + of_input)
        report.weights += [] if wrong is None else [wrong]


@torch.no_grad()
def _weight_of(module: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the weight with which a linear module multiplies, outputs x inputs."""
    device = next(
        (one.device for one in (*module.parameters(), *module.buffers())), torch.device("cpu")
    )
    bias = getattr(module, "bias", None)
    columns = []
    try:
        if bias is not None:
            module.bias = None  # adding it would round the weight
        for start in range(0, shape[1], _ROWS):
            count = min(_ROWS, shape[1] - start)
            unit = torch.zeros(count, shape[1], dtype=dtype, device=device)
            unit[torch.arange(count), torch.arange(start, start + count)] = 1
            columns.append(module(unit).cpu().float())
    finally:
        if bias is not None:
            module.bias = bias
    weight = torch.cat(columns).t()
    if weight.shape != shape:
        raise ValueError(f"it has {list(weight.shape)} values, its files {list(shape)}")
    return weight


def _find_wrong(
    name: str, actual: Tensor, expected: Tensor, allowed: float
) -> WeightDifference | None:
    """Return the difference beyond rounding, by the largest and by all elements of each row."""
    error = (actual - expected).abs()
    largest = error.amax(1) / expected.abs().amax(1).clamp(min=1e-30)
    norms = error.norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    over = torch.maximum(largest, norms) / allowed
    wrong = (~(over <= 1)).nonzero()[:, 0]  # NaN is wrong
    if not len(wrong):
        return None
    return WeightDifference(
        name=name,
        rows=(int(wrong[0]), int(wrong[-1])),
        num_differing=len(wrong),
        num_rows=len(expected),
        error=float(error[wrong].norm() / expected[wrong].norm().clamp(min=1e-30)),
        largest=float(over.nan_to_num(torch.inf).max()),
    )


def round_inputs(model: nn.Module, stored: DequantizedTensors) -> None:
    """Make the linear layers of a model with dequantized weights round their inputs as the quantized ones do."""
    for name, module in quantized_modules(model, stored).items():
        if name in stored.inputs:
            module.forward = _rounded_first(module.forward, stored.inputs[name])


def _rounded_first(
    forward: Callable[[Tensor], Tensor], rounding: InputRounding
) -> Callable[[Tensor], Tensor]:
    return lambda input: forward(rounding.apply(input))  # noqa: A006
