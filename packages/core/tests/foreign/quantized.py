"""Folders that quantization libraries wrote, and five wrong weights of each.

`quantized.tar.xz` holds the folders. The scripts `making/quantize_*.py` wrote them from `original.py`.
"""

import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from packages.core.tests.foreign.judged import CLEAN, Judged, compare
from packages.core.tests.foreign.original import DTYPES, SIZES, save_original

_FOLDERS = Path(__file__).with_name("quantized.tar.xz")
_WEIGHTS = "model.safetensors"
_ROW = 7

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The parts of a stored weight, and the plants in them."""

    codes: str
    scales: str
    group: int
    """Bytes that hold one row's codes of a group; in `qweight`, words below each other."""
    fifth: str = "norm"
    """The plant besides the four that all formats have."""
    zeros: str = ""
    factor: float = 1.1
    """Factor of a wrong scale: more than what the clean verdict states as its resolution."""
    steps: int = 1
    """The same for a scale of 8 bits, in codes."""


_GPTQ = Layout("qweight", "scales", 4, factor=1.7)
_AUTO_ROUND = replace(_GPTQ, factor=2.0)
_FP8 = Layout("weight", "weight_scale", 128)
_INT8 = Layout("weight", "SCB", 128)
_NVFP4 = Layout("weight_packed", "weight_scale", 8, steps=5)
# By library and scheme. Each was made from the original in bfloat16, but one from that in float32.
LAYOUTS = {
    "llmcompressor w4a16": Layout("weight_packed", "weight_scale", 32, factor=1.2),
    "llmcompressor int8-asym": Layout(
        "weight_packed", "weight_scale", 128, "zero_point", "weight_zero_point"
    ),
    "llmcompressor overlapping": Layout("weight_packed", "weight_scale", 128),
    "llmcompressor fp8_dynamic": _FP8,
    "llmcompressor fp8_block": _FP8,
    "llmcompressor mxfp4a16": Layout("weight_packed", "weight_scale", 16),
    "llmcompressor mxfp8a16": Layout("weight", "weight_scale", 32),
    "llmcompressor nvfp4a16": _NVFP4,
    "bitsandbytes nf4-double": Layout("weight", "weight.absmax", 32, "embedding", steps=32),
    "bitsandbytes fp4": Layout("weight", "weight.absmax", 32, factor=1.2),
    "bitsandbytes int8": _INT8,
    "bitsandbytes int8-float32": replace(_INT8, fifth="embedding"),
    "gptqmodel act-order": _GPTQ,
    "gptqmodel asym": replace(_GPTQ, fifth="zero_point", zeros="qzeros"),
    "gptqmodel dynamic": replace(_GPTQ, fifth="embedding"),
    "autoround round": _AUTO_ROUND,
    "autoround gptq": _AUTO_ROUND,
    "autoround awq-asym": replace(_AUTO_ROUND, group=32, fifth="zero_point", zeros="qzeros"),
    "autoround nvfp4": _NVFP4,
}


def scale(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Make one scale too large."""
    module = "model.layers.1.mlp.up_proj"
    scales = tensors[f"{module}.{layout.scales}"].view(-1)
    place = len(scales) // 3
    if scales.itemsize > 1:
        scales[place] *= layout.factor
    else:
        scales.view(torch.uint8)[place] += layout.steps
    return (module,)


def codes(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Draw the codes of one group in one row at random: in AWQ, in eight rows."""
    module = "model.layers.1.mlp.gate_proj"
    row = _row_of(tensors, module, layout)[: layout.group]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 256, (row.nbytes,), generator=generator).to(torch.uint8)
    if row.dtype == torch.float8_e4m3fn:
        drawn &= 0xBF  # large values would stand out, and NaN more so
    row.copy_(drawn.view(row.dtype))
    return (module,)


def channel(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Set the bytes of one row to zero: in AWQ, of eight rows."""
    module = "model.layers.0.self_attn.o_proj"
    _row_of(tensors, module, layout).zero_()
    return (module,)


def exchanged(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Exchange the keys' and the values' projection, which have one shape."""
    modules = "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"
    parts = [name.removeprefix(modules[0]) for name in tensors if name.startswith(modules[0])]
    for part in parts:
        one, other = (f"{module}{part}" for module in modules)
        tensors[one], tensors[other] = tensors[other], tensors[one]
    return modules


def zero_point(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Change one zero point by one: the lowest bit of a word is that of its first number."""
    module = "model.layers.0.mlp.down_proj"
    tensors[f"{module}.{layout.zeros}"].view(-1)[1] ^= 1
    return (module,)


def norm(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Make the weight of a norm 5 % too large."""
    module = "model.layers.1.post_attention_layernorm"
    tensors[f"{module}.weight"] *= 1.05
    return (module,)


def embedding(tensors: Tensors, layout: Layout) -> tuple[str, ...]:
    """Exchange two rows of the embedding."""
    module = "model.embed_tokens"
    weight = tensors[f"{module}.weight"]
    weight[[3, 20]] = weight[[20, 3]]
    return (module,)


PLANTS: dict[str, Callable[[Tensors, Layout], tuple[str, ...]]] = {
    one.__name__: one for one in (scale, codes, channel, exchanged, zero_point, norm, embedding)
}


def _row_of(tensors: Tensors, module: str, layout: Layout) -> Tensor:
    """Return the codes of a row, in place. In `qweight` rows are columns."""
    stored = tensors[f"{module}.{layout.codes}"]
    if layout.codes == "qweight":
        return stored[:, _ROW]
    num_rows = SIZES["intermediate_size" if module.endswith("gate_proj") else "hidden_size"]
    rows = stored.view(num_rows, -1)
    return (rows if stored.itemsize == 1 else rows.view(torch.uint8))[_ROW]


def folders_with(faults: Iterable[str], wanted: str = "") -> list[tuple[str, str]]:
    """Return names of folders and faults that contain `wanted`."""
    found = []
    for name, layout in LAYOUTS.items():
        own = "scale", "codes", "channel", "exchanged", layout.fifth
        found += [(name, one) for one in faults if one == CLEAN or one in own]
    return [one for one in found if wanted in " ".join(one)]


def judge_folders(chosen: Iterable[tuple[str, str]], folder: Path) -> Iterator[Judged]:
    """Compare folders, clean or with a fault, with the original. All files lie in `folder`."""
    with tarfile.open(_FOLDERS) as packed:
        packed.extractall(folder, filter="data")
    for dtype in DTYPES:
        save_original(folder / dtype, dtype)
    for name, fault in chosen:
        library, scheme = name.split()
        actual = folder / f"{library}-{scheme}"
        modules: tuple[str, ...] = ()
        if fault != CLEAN:
            tensors = load_file(actual / _WEIGHTS)
            modules = PLANTS[fault](tensors, LAYOUTS[name])
            actual = shutil.copytree(actual, folder / f"{actual.name}-{fault}")
            # Readers of these libraries ask for the framework.
            save_file(tensors, actual / _WEIGHTS, {"format": "pt"})
        expected = folder / DTYPES[scheme.endswith("float32")]
        yield Judged(library, scheme, fault, modules, compare(expected, actual))
