"""Scales that AWQ moves between the weights of a block are no fault; what nothing takes back is."""

from pathlib import Path

import torch
from torch import Tensor

from assay.models.quantization.results import WeightComparison, WeightRegion
from packages.core.tests.unit.models.quantization.rounding import (
    Fault,
    Tensors,
    no_fault,
    times,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    compare_folders,
    write_folder,
)

BLOCK = "model.layers.0"
WIDTH, INNER = 64, 128


class Layer:
    """The weights of one block, before and after each channel is scaled as AWQ does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def factors(size: int) -> Tensor:
            return torch.exp(0.4 * torch.randn(size, generator=generator))

        shapes = {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (WIDTH, WIDTH)),
            "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
        }  # fmt: skip
        self.linears = {
            name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        self.norms = {
            name: 1 + 0.1 * torch.randn(WIDTH, generator=generator)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        self.scaled = {name: weight.clone() for name, weight in self.linears.items()}
        self.scaled_norms = {name: weight.clone() for name, weight in self.norms.items()}
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            scale = factors(WIDTH)
            self.scaled_norms[norm] /= scale
            for reader in readers:
                self.scaled[reader] *= scale
        for writer, reader in (
            ("self_attn.v_proj", "self_attn.o_proj"),
            ("mlp.up_proj", "mlp.down_proj"),
        ):
            scale = factors(len(self.linears[writer]))
            self.scaled[writer] /= scale[:, None]
            self.scaled[reader] *= scale

    def compare(self, folder: Path, fault: Fault = no_fault) -> WeightComparison:
        """Compare the block with its scaled form, quantized by AWQ; `fault` is one of gate_proj."""
        case = CASES["awq"]
        plain = {**self.linears, **self.norms}
        actual: Tensors = {
            f"{BLOCK}.{name}.weight": one.half() for name, one in self.scaled_norms.items()
        }
        for name, weight in self.scaled.items():
            tensors, _ = case.write(
                weight.half().float(), fault if name == "mlp.gate_proj" else no_fault
            )
            actual |= {f"{BLOCK}.{name}.{part}": one for part, one in tensors.items()}
        return compare_folders(
            write_folder(
                folder / "expected",
                [{f"{BLOCK}.{name}.weight": one.half() for name, one in plain.items()}],
            ),
            write_folder(folder / "actual", [actual], case.settings),
        )


def test_scales_that_are_taken_back_are_no_finding(tmp_path: Path) -> None:
    found = Layer().compare(tmp_path)
    assert not found.findings
    assert all(one.is_rescaled for one in found.results)
    assert max(one.error for one in found.results if one.num_groups > 1) < 0.12


def test_wrong_scale_of_a_group_is_found_all_the_same(tmp_path: Path) -> None:
    [finding] = Layer().compare(tmp_path, times(1.3, 3)).findings
    assert (finding.weight, finding.cause) == (f"{BLOCK}.mlp.gate_proj.weight", "scale")
    assert finding.place == WeightRegion(range(3, 4), tuple(range(64)))


def test_one_channel_that_is_not_taken_back(tmp_path: Path) -> None:
    layer = Layer()
    layer.scaled_norms["post_attention_layernorm"][5] *= 1.3
    [finding] = layer.compare(tmp_path).findings
    assert finding.weight == f"{BLOCK}.post_attention_layernorm.weight"
    assert finding.place == WeightRegion(range(5, 6), ())


def test_scales_that_no_weight_takes_back(tmp_path: Path) -> None:
    layer = Layer()
    layer.scaled_norms["input_layernorm"] = layer.norms["input_layernorm"]
    found = layer.compare(tmp_path)
    # What v_proj hands on to o_proj cannot be told from it either.
    assert {one.weight for one in found.findings} - {f"{BLOCK}.self_attn.o_proj.weight"} == {
        f"{BLOCK}.self_attn.{name}_proj.weight" for name in ("q", "k", "v")
    }
