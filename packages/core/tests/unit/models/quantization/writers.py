"""Writers of quantized model folders, in plain arithmetic on Python integers.

Each returns what the format stores for one module, and the values that the stored numbers stand for.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.judging import WeightComparison
from assay.models.quantization.stored_weights import open_folder
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    Fault,
    Tensors,
    pack_words,
    round_to_grid,
)


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
                zeros = pack_words((rounded.zeros + middle).t(), bits).t()
                is_plain = strategy == "tensor"
                tensors["weight_zero_point"] = (
                    rounded.zeros.view(1).to(torch.int8) if is_plain else zeros
                )
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


def micro_scaled(kind: str) -> Case:
    """MXFP8, MXFP4, NVFP4: a power of two per 32 values, or an fp8 scale per 16, over a global one."""
    size, bits = (16 if kind == "nvfp4" else 32), int(kind[-1])
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    levels = fp8_levels() if bits == 8 else sorted({s * v for v in positive for s in (-1.0, 1.0)})

    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        top = 448 * 6 / float(weight.abs().max())

        def round_scale(scale: float) -> float:
            if kind != "nvfp4":
                return 2.0 ** math.ceil(math.log2(scale))
            return float(torch.tensor(scale * top).to(torch.float8_e4m3fn)) / top

        rounded = round_to_grid(weight, (1, size), levels, "none", round_scale)
        fault(rounded)
        tensors: Tensors = {}
        if kind == "nvfp4":
            tensors["weight_scale"] = (rounded.scales * top).to(torch.float8_e4m3fn)
            tensors["weight_global_scale"] = torch.tensor([top])
        else:
            tensors["weight_scale"] = (rounded.scales.log2().round() + 127).to(torch.uint8)
        if bits == 8:
            tensors["weight"] = rounded.codes.to(torch.float8_e4m3fn)
        else:
            index = (rounded.codes.abs()[..., None] - torch.tensor(positive)).abs().argmin(-1)
            index = index + 8 * (rounded.codes < 0)
            tensors["weight_packed"] = (index[:, ::2] + 16 * index[:, 1::2]).to(torch.uint8)
        return tensors, rounded.values

    strategy = "tensor_group" if kind == "nvfp4" else "group"
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    return Case(f"compressed-{kind}", settings, write, (1, size), factor=2.0)


def torchao(dtype: torch.dtype, size: int = 256) -> Case:
    def write(weight: Tensor, fault: Fault) -> tuple[Tensors, Tensor]:
        is_int = dtype == torch.int8
        levels: Sequence[float] = range(-128, 128) if is_int else fp8_levels()
        zero = "range" if size == 64 else "none"
        rounded = round_to_grid(weight, (1, size), levels, zero, torch.float32)
        fault(rounded)
        tensors = {"_weight_qdata": rounded.codes.to(dtype), "_weight_scale": rounded.scales}
        if is_int:
            tensors["_weight_zero_point"] = rounded.zeros.to(torch.int8)
        return tensors, rounded.values

    name = f"torchao-{str(dtype).removeprefix('torch.')}-{size}"
    return Case(name, {"quant_method": "torchao"}, write, (1, size), has_zeros=size == 64)


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
        compressed("block", kind="float"), compressed("tensor", symmetric=False),
        compressed("tensor", symmetric=False, packed=True),
        micro_scaled("mxfp8"), micro_scaled("mxfp4"), micro_scaled("nvfp4"),
        torchao(torch.int8), torchao(torch.int8, 64), torchao(torch.float8_e4m3fn),
        bitsandbytes_int8(), bitsandbytes_4bit("nf4"), bitsandbytes_4bit("fp4"),
        bitsandbytes_4bit("nf4", nested=True),
        fp8_blocks(), fp8_rows(),
    )
}  # fmt: skip


def write_folder(
    folder: Path, shards: Sequence[Tensors], settings: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"model_type": "llama"}
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: value.contiguous().clone() for key, value in shard.items()}
        save_file(tensors, folder / name, dict(metadata or {}))
        places |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def compare_folders(expected: Path, actual: Path) -> WeightComparison:
    return compare_weights(open_folder(expected), open_folder(actual))
