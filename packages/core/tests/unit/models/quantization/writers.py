"""Writers of quantized model folders, in plain arithmetic on Python integers.

Each returns what the format stores for one module, and the values that the stored numbers stand for.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.results import WeightComparison
from assay.models.quantization.stored import open_folder

Tensors = dict[str, Tensor]


@dataclass
class Rounded:
    """Codes [rows, columns], scales and zero points [groups down, groups across]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    block: tuple[int, int]

    @property
    def values(self) -> Tensor:
        return (self.codes - spread(self.zeros, self)) * spread(self.scales, self)

    def region(self, group: int) -> tuple[slice, slice]:
        down, across = divmod(group, self.scales.shape[1])
        rows, columns = self.block
        return (
            slice(down * rows, (down + 1) * rows),
            slice(across * columns, (across + 1) * columns),
        )


def spread(per_group: Tensor, rounded: Rounded) -> Tensor:
    whole = per_group.repeat_interleave(rounded.block[0], 0).repeat_interleave(rounded.block[1], 1)
    return whole[: rounded.codes.shape[0], : rounded.codes.shape[1]]


Fault = Callable[[Rounded], None]


def no_fault(rounded: Rounded) -> None:
    pass


def times(factor: float, group: int) -> Fault:
    def plant(rounded: Rounded) -> None:
        rounded.scales.view(-1)[group] *= factor

    return plant


def zero_plus_one(group: int) -> Fault:
    def plant(rounded: Rounded) -> None:
        rounded.zeros.view(-1)[group] += 1

    return plant


def swap(one: int, other: int) -> Fault:
    def plant(rounded: Rounded) -> None:
        here, there = rounded.region(one), rounded.region(other)
        codes = rounded.codes[here].clone()
        rounded.codes[here] = rounded.codes[there]
        rounded.codes[there] = codes
        for per_group in (rounded.scales, rounded.zeros):
            flat = per_group.view(-1)
            flat[[one, other]] = flat[[other, one]]

    return plant


def round_to_grid(
    weight: Tensor, block: tuple[int, int], levels: Sequence[float], zero: str, dtype: torch.dtype
) -> Rounded:
    """Round to the nearest level of each group.

    zero: "range" shifts integers to the range of a group, "middle" and "none" give constants.
    """
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    table = torch.tensor(levels)
    rounded = Rounded(
        torch.zeros(rows, columns), torch.ones(down, across), torch.zeros(down, across), block
    )
    for group in range(down * across):
        region = rounded.region(group)
        part = weight[region]
        low, high = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
        if zero == "range":
            scale = (high - low) / (len(levels) - 1)
            point = round(-low / scale) + levels[0]
        else:
            point = levels[0] + (len(levels) // 2) if zero == "middle" else 0.0
            scale = max(high, -low) / (levels[-1] - point)
        scale = float(torch.tensor(scale).to(dtype))
        nearest = (part[..., None] / scale + point - table).abs().argmin(-1)
        rounded.codes[region] = table[nearest]
        rounded.scales.view(-1)[group], rounded.zeros.view(-1)[group] = scale, point
    return rounded


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack each row into words of 32 bits, the first number into the lowest bits."""
    packed = []
    for row in numbers.to(torch.int64).tolist():
        stream = sum(number << (index * bits) for index, number in enumerate(row))
        words = [(stream >> (32 * k)) & 0xFFFFFFFF for k in range(-(-len(row) * bits // 32))]
        packed.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(packed, dtype=torch.int32)


Module = Callable[[Tensor, Fault], tuple[Tensors, Tensor]]


@dataclass
class Case:
    """One format: its settings in config.json and the writer of a module."""

    name: str
    settings: Mapping[str, Any]
    write: Module
    block: tuple[int, int] = (1, 64)
    """Rows and columns of a group; of a weight with fewer, all."""
    has_zeros: bool = False
    is_contiguous: bool = True

    @property
    def num_groups(self) -> int:
        """Of a weight of 32 rows and 256 columns."""
        return -(-32 // self.block[0]) * -(-256 // self.block[1])

    @property
    def group(self) -> int:
        return min(3, self.num_groups - 1)

    def corner(self, group: int) -> tuple[int, int]:
        """First row and column of a group."""
        down, across = divmod(group, -(-256 // self.block[1]))
        column = across * self.block[1]
        if not self.is_contiguous:  # column c is at 7 c mod 256
            column = min(c for c in range(256) if column <= c * 7 % 256 < column + self.block[1])
        return down * self.block[0], column


def gptq(bits: int, size: int, *, is_second: bool = False, order: bool = False) -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        step = columns if size == -1 else size
        index = torch.arange(columns) // step
        perm = torch.arange(columns)
        if order:  # column c belongs to group (7 c mod columns) / size
            index = (torch.arange(columns) * 7 % columns) // step
            perm = index.argsort(stable=True)
        rounded = round_to_grid(
            weight[:, perm], (1, step), range(1 << bits), "range", torch.float16
        )
        fault(rounded)
        values = torch.empty_like(weight)
        codes = torch.empty_like(weight)
        values[:, perm], codes[:, perm] = rounded.values, rounded.codes
        zeros = rounded.zeros.t() if is_second else (rounded.zeros.t() - 1) % (1 << bits)
        return {
            "qweight": pack_words(codes, bits).t(),
            "qzeros": pack_words(zeros, bits),
            "scales": rounded.scales.t().half(),
            "g_idx": index.int(),
        }, values

    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order}
    settings |= {"checkpoint_format": "gptq_v2" if is_second else "gptq"}
    name = f"gptq{bits}-{size}{'-v2' if is_second else ''}{'-order' if order else ''}"
    return Case(
        name,
        settings,
        write,
        (1, 256 if size == -1 else size),
        has_zeros=True,
        is_contiguous=not order,
    )


def awq() -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        rounded = round_to_grid(weight, (1, 64), range(16), "range", torch.float16)
        fault(rounded)
        shuffle = torch.tensor(
            [8 * (k // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[k % 8] for k in range(len(weight))]
        )
        return {
            "qweight": pack_words(rounded.codes.t()[:, shuffle], 4),
            "qzeros": pack_words(rounded.zeros.t()[:, shuffle], 4),
            "scales": rounded.scales.t().half(),
        }, rounded.values

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "version": "gemm",
        "zero_point": True,
    }
    return Case("awq", settings, write, has_zeros=True)


def compressed(strategy: str, *, bits: int = 8, kind: str = "int", symmetric: bool = True, packed: bool = False) -> Case:  # fmt: skip
    block = {
        "tensor": (1 << 30, 1 << 30),
        "channel": (1, 1 << 30),
        "group": (1, 64),
        "block": (16, 64),
    }

    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        sizes = (min(block[strategy][0], len(weight)), min(block[strategy][1], weight.shape[1]))
        middle = 1 << (bits - 1)
        if kind == "float":
            rounded = round_to_grid(weight, sizes, fp8_levels(), "none", torch.bfloat16)
        else:
            zero = "none" if symmetric else "range"
            rounded = round_to_grid(weight, sizes, range(-middle, middle), zero, torch.bfloat16)
        fault(rounded)
        scale = rounded.scales.bfloat16()
        tensors = {"weight_scale": scale.view(1) if strategy == "tensor" else scale}
        if packed:
            tensors["weight_packed"] = pack_words(rounded.codes + middle, bits)
            tensors["weight_shape"] = torch.tensor(weight.shape)
            if not symmetric:
                tensors["weight_zero_point"] = pack_words((rounded.zeros + middle).t(), bits).t()
        else:
            tensors["weight"] = rounded.codes.to(
                torch.float8_e4m3fn if kind == "float" else torch.int8
            )
            if not symmetric:
                tensors["weight_zero_point"] = rounded.zeros.to(torch.int8)
        return tensors, rounded.values

    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
    }
    if strategy == "group":
        weights["group_size"] = 64
    if strategy == "block":
        weights["block_structure"] = [16, 64]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    name = (
        f"compressed-{'pack' if packed else kind}{bits}-{strategy}{'' if symmetric else '-zeros'}"
    )
    return Case(name, settings, write, block[strategy], has_zeros=not symmetric)


def fp8_levels() -> list[float]:
    """Every finite value of a float of 4 exponent and 3 mantissa bits, bias 7."""
    positive = [m / 8 * 2.0**-6 for m in range(8)]
    positive += [
        (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
    ]
    return sorted({sign * value for value in positive for sign in (-1.0, 1.0)})


def fp8_blocks() -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        rounded = round_to_grid(weight, (16, 64), fp8_levels(), "none", torch.float32)
        fault(rounded)
        codes = rounded.codes.to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": rounded.scales}, rounded.values

    settings = {"quant_method": "fp8", "weight_block_size": [16, 64]}
    return Case("fp8-blocks", settings, write, (16, 64))


def fp8_rows() -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        rounded = round_to_grid(weight, (1, weight.shape[1]), fp8_levels(), "none", torch.float32)
        fault(rounded)
        codes = rounded.codes.to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": rounded.scales}, rounded.values

    return Case("fp8-rows", {"quant_method": "fbgemm_fp8"}, write, (1, 256))


def bitsandbytes_int8() -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        rounded = round_to_grid(
            weight, (1, weight.shape[1]), range(-127, 128), "none", torch.float32
        )
        fault(rounded)
        return {
            "weight": rounded.codes.to(torch.int8),
            "SCB": rounded.scales[:, 0] * 127,
        }, rounded.values

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Case("bitsandbytes-int8", settings, write, (1, 256))


# QLoRA, appendix E, to the 7 digits of float32.
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
FP4 = tuple(s * v / 12 for s in (1, -1) for v in (0, 1 / 16, 8, 12, 4, 6, 2, 3))


def bitsandbytes_4bit(kind: str, *, nested: bool = False) -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        flat = weight.reshape(1, -1)
        rounded = round_to_grid(flat, (1, 64), sorted({*table.tolist()}), "none", torch.float32)
        tensors: Tensors = {}
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        if nested:
            grid = torch.linspace(-1, 1, 256)
            mean = float(rounded.scales.mean())
            outer = (rounded.scales - mean).abs().max().view(1)
            codes = ((rounded.scales[0, :, None] - mean) / outer - grid).abs().argmin(-1)
            rounded.scales[0] = grid[codes] * outer + mean
            fault(rounded)
            codes = ((rounded.scales[0, :, None] - mean) / outer - grid).abs().argmin(-1)
            rounded.scales[0] = grid[codes] * outer + mean
            tensors |= {
                "weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": outer,
                "weight.nested_quant_map": grid,
            }  # fmt: skip
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean}
        else:
            fault(rounded)
            tensors["weight.absmax"] = rounded.scales[0].clone()
        index = (rounded.codes[0, :, None] - table).abs().argmin(-1).tolist()
        pairs = zip(index[::2], index[1::2], strict=True)
        tensors["weight"] = torch.tensor([[(a << 4) + b] for a, b in pairs], dtype=torch.uint8)
        tensors["weight.quant_map"] = table
        text = list(json.dumps(state).encode())
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(text, dtype=torch.uint8)
        return tensors, rounded.values.view(weight.shape)

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return Case(f"bitsandbytes-{kind}{'-nested' if nested else ''}", settings, write)


CASES = {
    case.name: case
    for case in (
        gptq(4, 64), gptq(4, 64, is_second=True, order=True), gptq(3, 128), gptq(8, 64), gptq(8, -1), gptq(2, 256),
        awq(),
        compressed("group", bits=4, packed=True), compressed("group", bits=4, packed=True, symmetric=False),
        compressed("channel", symmetric=False), compressed("tensor"), compressed("group"),
        compressed("tensor", kind="float"), compressed("channel", kind="float"),
        compressed("block", kind="float"),
        bitsandbytes_int8(), bitsandbytes_4bit("nf4"), bitsandbytes_4bit("fp4"),
        bitsandbytes_4bit("nf4", nested=True),
        fp8_blocks(), fp8_rows(),
    )
}  # fmt: skip


def write_folder(
    folder: Path, shards: Sequence[Tensors], settings: Mapping[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"model_type": "llama"}
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({key: value.contiguous().clone() for key, value in shard.items()}, folder / name)
        places |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def compare_folders(expected: Path, actual: Path) -> WeightComparison:
    return compare_weights(open_folder(expected), open_folder(actual))
