"""GGUF files that the package gguf writes, read by transformers: `nox -s published-packages`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.modeling_gguf_pytorch_utils as loader
from gguf import GGML_QUANT_SIZES, GGUFReader, dequantize
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from assay import check_generate
from assay.errors import UsageError
from assay.models import RECIPES, load_model
from assay.models.inspect.inspection import inspect_load
from assay.models.inspect.report import LoadReport
from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.dequantizing import dequantize_folder
from assay.models.quantization.judging import WeightComparison
from assay.models.quantization.stored_weights import WeightStore, open_folder
from assay.models.quantization.weight_formats import list_weights
from assay.models.sources import local_folder, resolve_model
from packages.core.tests.published_packages.gguf_writer import write_gguf
from packages.core.tests.subsystem.generate.test_quantized_candidate import MICRO, check

LAYER = "model.layers.1"
UP, QUERY, KEY = (
    f"{LAYER}.{name}.weight" for name in ("mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj")
)
STORED_UP = "blk.1.ffn_up.weight"
KINDS = (Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K)


def compare(original: Path, file: Path) -> WeightComparison:
    with local_folder(resolve_model(str(file)), "refuse") as folder:
        return compare_weights(open_folder(original), open_folder(folder))


def inspect(file: Path) -> LoadReport:
    return inspect_load(load_model(str(file), dtype="bfloat16"), "refuse").report


def faults(found: WeightComparison) -> dict[str, str]:
    return {one.weight: one.cause for one in found.findings}


def wrong(report: LoadReport) -> set[str]:
    return {one.name for one in report.weights}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Gemma 2 with the settings that transformers does not read from GGUF at their defaults."""
    folder: Path = tmp_path_factory.mktemp("gemma")
    shutil.copytree(RECIPES["gemma2"].folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    defaults = {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | defaults))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]  # tied
    tensors = {
        name: one.float() * (1 + 1e-5) for name, one in tensors.items()
    }  # no sum with 1 is exact
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_correct_file_agrees_with_its_original_and_with_memory(
    tmp_path: Path, kind: Kind
) -> None:
    file = write_gguf(MICRO, tmp_path / "model.gguf", kind)
    found, report = compare(MICRO, file), inspect(file)
    assert (found.findings, found.not_compared, found.unmatched_expected) == ((), (), ())
    assert len(found.results) == len(load_file(MICRO / "model.safetensors"))
    assert (report.weights, report.not_compared, report.settings, report.keys) == ([], [], [], [])
    assert report.compared > len(found.results)


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.name)
def test_codes_and_scales_make_the_values_of_the_package(tmp_path: Path, kind: Kind) -> None:
    file = write_gguf(MICRO, tmp_path / "model.gguf", kind)
    (stored_down,) = (
        one for one in GGUFReader(file).tensors if one.name == "blk.1.ffn_down.weight"
    )
    wanted = torch.from_numpy(dequantize(stored_down.data, stored_down.tensor_type))
    with local_folder(resolve_model(str(file)), "refuse") as folder:
        stored, values = open_folder(folder), dequantize_folder(folder)
        assert values is not None
        torch.testing.assert_close(values[f"{LAYER}.mlp.down_proj.weight"], wanted, rtol=0, atol=0)
        for name, form in list_weights(stored).items():
            if form is not None:
                weight = form.read(stored, name.removesuffix(".weight"))
                torch.testing.assert_close(weight.dequantize(), values[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_a_whole_check_of_a_correct_file_passes(tmp_path: Path, kind: Kind) -> None:
    verdict = check(tmp_path, write_gguf(MICRO, tmp_path / "micro.gguf", kind))
    assert verdict.passed, str(verdict)
    assert any("cost of the format: relative error" in note for note in verdict.notes)


def test_a_folder_with_one_file_is_read_and_with_two_refused(tmp_path: Path) -> None:
    write_gguf(MICRO, tmp_path / "one.gguf", Kind.Q8_0)
    assert resolve_model(str(tmp_path)).file == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"several GGUF files \(one.gguf, two.gguf\)"):
        resolve_model(str(tmp_path))


def double_scale(blocks: Any) -> None:
    """Double the scale of block 2 of row 3, whose first two bytes are in float16."""
    scale = blocks[3, 2 * 18 : 2 * 18 + 2].view(np.float16)
    scale *= 2


def test_a_wrong_scale_is_named_with_its_block(tmp_path: Path) -> None:
    file = write_gguf(
        MICRO, tmp_path / "micro.gguf", Kind.Q4_0, edit_blocks={STORED_UP: double_scale}
    )
    verdict = check(tmp_path, file)
    outcomes = {name: level.verdict for name, level in verdict.levels.items()}
    assert [name for name, one in outcomes.items() if one == "FAIL"] == ["weights"]
    assert verdict.location is not None
    assert verdict.location.parameter == UP
    assert "row 3, columns 64-95: its scale is 2.0" in str(verdict.levels["weights"].reason)


def test_rows_that_the_loader_leaves_in_pairs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0)
    monkeypatch.setitem(loader.TENSOR_PROCESSORS, "llama", loader.TensorProcessor)
    projections = {
        f"model.layers.{n}.self_attn.{one}_proj.weight" for n in range(4) for one in "qk"
    }
    assert wrong(inspect(file)) == projections


def test_rows_that_the_writer_did_not_pair_are_named(tmp_path: Path) -> None:
    def undo(tensors: dict[str, Any]) -> None:
        values = tensors["blk.1.attn_q.weight"]
        own = values.reshape(4, -1, 2, 96).swapaxes(1, 2).reshape(values.shape)
        tensors["blk.1.attn_q.weight"] = np.ascontiguousarray(own)

    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0, edit=undo)
    assert set(faults(compare(MICRO, file))) == {QUERY}


def leave_pairs(model: nn.Module) -> None:
    """Pair the rows of a query projection, as the file stores them."""
    weight = model.get_parameter(QUERY)
    weight.data = weight.data.unflatten(0, (4, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def test_a_whole_check_names_a_fault_of_the_loader(tmp_path: Path) -> None:
    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0)
    verdict = check(tmp_path, file, candidate_setup=f"{__file__}:leave_pairs")
    outcomes = {name: level.verdict for name, level in verdict.levels.items()}
    assert outcomes["weights"] == "PASS"
    assert (outcomes["load"], outcomes["modules"]) != ("PASS", "PASS")
    assert verdict.verdict == "FAIL"
    assert QUERY.removesuffix(".weight") in str(verdict)


def test_a_tensor_of_another_layer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(tensors: dict[str, Any]) -> None:
        tensors[STORED_UP] = tensors["blk.2.ffn_up.weight"]

    file = write_gguf(MICRO, tmp_path / "wrong.gguf", Kind.Q4_0, edit=take)
    assert set(faults(compare(MICRO, file))) == {UP}

    right, names_of = (
        write_gguf(MICRO, tmp_path / "right.gguf", Kind.Q4_0),
        loader.get_gguf_hf_weights_map,
    )

    def exchange(*given: Any, **options: Any) -> dict[str, str]:
        names: dict[str, str] = names_of(*given, **options)
        if STORED_UP in names:
            other = "blk.2.ffn_up.weight"
            names[STORED_UP], names[other] = names[other], names[STORED_UP]
        return names

    monkeypatch.setattr(loader, "get_gguf_hf_weights_map", exchange)
    owners = {one.name: one.values_of for one in inspect(right).weights}
    other = UP.replace(".1.", ".2.")
    assert owners == {UP: other, other: UP}


def test_norms_of_gemma_off_by_one_are_named(
    tmp_path: Path, gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(gemma, tmp_path / "right.gguf", Kind.Q8_0)
    found, report = compare(gemma, file), inspect(file)
    assert (found.findings, found.unmatched_expected, found.unmatched_actual) == ((), (), ())
    assert (report.weights, report.settings) == ([], [])

    def add(tensors: dict[str, Any]) -> None:
        tensors["blk.1.ffn_norm.weight"] += 1

    found = compare(gemma, write_gguf(gemma, tmp_path / "wrong.gguf", Kind.Q8_0, edit=add))
    assert set(faults(found)) == {f"{LAYER}.pre_feedforward_layernorm.weight"}

    monkeypatch.setitem(loader.TENSOR_PROCESSORS, "gemma2", loader.TensorProcessor)
    norms = {name for name in load_file(gemma / "model.safetensors") if "norm." in name}
    assert wrong(inspect(file)) == norms


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """Write a model whose rotary base is not the default of its class."""
    folder = tmp_path / "far"
    shutil.copytree(MICRO, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500000.0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_metadata_that_the_loader_does_not_read_are_named(
    tmp_path: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(far, tmp_path / "far.gguf", Kind.Q8_0)
    assert inspect(file).settings == []
    llama: Any = GGUF_CONFIG_MAPPING["llama"]
    keys = {key: one for key, one in llama.items() if key != "rope.freq_base"}
    monkeypatch.setitem(GGUF_CONFIG_MAPPING, "llama", keys)
    assert inspect(file).settings == [
        "rope_theta is 10000 in memory, 500000 in the metadata llama.rope.freq_base"
    ]


def test_factors_of_rotary_frequencies_that_the_loader_ignores_are_named(tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = np.full(12, 8, np.float32)

    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0, edit=add)
    assert inspect(file).settings == [
        "rope_type is default in memory, rope_freqs.weight is in the file"
    ]


def test_a_rotary_base_that_the_file_lacks_fails(tmp_path: Path, far: Path) -> None:
    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0)
    verdict = check_generate(
        str(far), candidate_model=file, reference="cpu/float32", candidate="cpu/bfloat16",
        output=tmp_path / "run", max_new_tokens=4, batch_size=2,
    )  # fmt: skip
    assert verdict.levels["config"].verdict == "FAIL"
    assert "rope_theta is 500000.0 in EXPECTED, 10000.0 in ACTUAL" in str(verdict)


def test_the_tokenizer_of_the_file_encodes(tmp_path: Path) -> None:
    text = "".join(map(chr, range(33, 127)))
    tokens = [*text, "AB", *(f"<{n}>" for n in range(259 - len(text)))]
    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0, tokens=tokens)
    loaded = load_model(str(file), dtype="bfloat16")
    assert loaded.tokenizer_kind == "own"
    assert loaded.encode("ABC!") == [94, 34, 0]


@pytest.mark.parametrize("kind", [Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_types_that_the_package_does_not_write_are_read(kind: Kind) -> None:
    size = GGML_QUANT_SIZES[kind][1]
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (3, 2 * size), np.uint8)
    halves = (208,) if kind == Kind.Q6_K else (0, 2)
    for start in (*halves, *(size + one for one in halves)):
        blocks[:, start : start + 2] = generator.random((3, 1)).astype(np.float16).view(np.uint8)
    name = f"up.gguf_{kind.name}"
    stored = WeightStore(
        Path(), {name: blocks.shape}, lambda _: torch.from_numpy(blocks),
        quantization={"quant_method": "gguf"},
    )  # fmt: skip
    (form,) = [one for one in list_weights(stored).values() if one is not None]
    wanted = torch.from_numpy(dequantize(blocks, kind))
    torch.testing.assert_close(form.read(stored, "up").dequantize(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [40, -100])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    file = write_gguf(MICRO, tmp_path / "micro.gguf", Kind.Q8_0)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UsageError, match="cannot be read as GGUF"):
        load_model(str(file), dtype="bfloat16")
