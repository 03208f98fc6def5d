"""Loaded weights beside raw files: loaders that were changed in every process are found, no clean one."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, conversion_mapping, modeling_utils
from transformers.core_model_loading import WeightRenaming

from assay.models import RECIPES, load_model
from assay.models.inspect import inspection
from assay.models.inspect.inspection import inspect_changes, inspect_load
from assay.models.inspect.report import LoadReport
from assay.models.inspect.weights import is_cast_of, measure_difference
from assay.models.stored_tensors import same_bits
from assay.models.tensor_sources import TensorSource, UnknownFormError, value_in_form
from assay.models.transformers_calls import quiet_transformers

EditTensors = Callable[[Mapping[str, torch.Tensor | None]], None]

UP = "model.layers.1.mlp.up_proj.weight"
FREQUENCIES = "model.rotary_emb.inv_freq"
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 128, "shared_expert_intermediate_size": 16, "rotary_dim": 8,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "state_size": 8, "sliding_window": 16,
    "query_pre_attn_scalar": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = (
    "apertus", "bloom", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon_mamba", "gemma",
    "gemma3_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "jetmoe",
    "mamba", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


def inspected(model: str | Path, dtype: str = "float32") -> LoadReport:
    return inspect_load(load_model(str(model), dtype=dtype), "refuse").report


def after_loading(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Have every loader of this process change what it has loaded, as a faulty version would."""
    finish = PreTrainedModel._finalize_model_loading

    def finish_and_change(model: Any, *arguments: Any) -> Any:
        info = finish(model, *arguments)
        with torch.no_grad():
            change(model)
        return info

    patch.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(finish_and_change))


def named(report: LoadReport) -> list[tuple[str, str]]:
    return [(weight.name, weight.problem) for weight in report.weights]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_no_finding(recipe: str, dtype: str) -> None:
    report = inspected(f"micro:{recipe}", dtype)
    assert report.compared > 0
    assert report.num_keys > 0
    assert report == LoadReport(compared=report.compared, num_keys=report.num_keys)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architectures_have_no_finding(model_type: str, tmp_path: Path) -> None:
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = config_class()
    settings: dict[str, Any] = {
        name: value for name, value in SMALL.items() if hasattr(known, name)
    }
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(config_class(**settings))
        model.save_pretrained(tmp_path)
    report = inspected(tmp_path)
    assert report.keys == []
    assert report == LoadReport(compared=report.compared, num_keys=report.num_keys)
    assert report.compared >= len(model.state_dict())


def test_whole_number_that_is_held_as_a_float_is_compared_and_a_tensor_of_them_is_not() -> None:
    count = TensorSource("norm.num_batches_tracked", lambda: torch.tensor(3))
    codes = TensorSource("weight", lambda: torch.ones(4, dtype=torch.int8))

    assert is_cast_of(torch.tensor(3.0), value_in_form(count, torch.tensor(3.0)))
    assert not is_cast_of(torch.tensor(2.0), value_in_form(count, torch.tensor(2.0)))
    with pytest.raises(UnknownFormError, match="stored as int8"):
        value_in_form(codes, torch.ones(4))


def test_weight_that_is_drawn_anew_in_every_load_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_loading(monkeypatch, lambda model: model.get_parameter(UP).normal_())

    (weight,) = inspected(llama_folder).weights
    assert (weight.name, weight.problem, weight.rows) == (UP, "differs", (0, 23))
    assert weight.beyond_rounding


def test_initialisation_of_a_subclass_that_overwrites_what_was_read_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place, so that it has to write into what a second load gives it.
    def draw(_: Any, module: Any) -> None:
        if isinstance(module, torch.nn.Linear) and module.out_features == 24:
            module.weight.data.normal_()

    after_loading(monkeypatch, lambda model: model.apply(lambda module: draw(model, module)))

    report = inspected(llama_folder)
    assert {weight.name.split(".")[-2] for weight in report.weights} == {"gate_proj", "up_proj"}
    assert report.not_compared == []


def test_keys_that_a_second_load_could_not_show_are_not_compared(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("the device is busy")

    monkeypatch.setattr(inspection, "load_again", refuse)

    last = inspected(llama_folder).not_compared[-1]
    assert last == (
        "which keys of config.json are read (a second load raised OSError: the device is busy)"
    )


def test_exchanged_layers_are_named(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(model: Any) -> None:
        layers = model.model.layers
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp

    after_loading(monkeypatch, exchange)

    weights = {weight.name: weight for weight in inspected(llama_folder).weights}
    assert weights[UP].values_of == "model.layers.0.mlp.up_proj.weight"
    assert set(weights) == {
        f"model.layers.{layer}.mlp.{name}_proj.weight"
        for layer in (0, 1)
        for name in ("gate", "up", "down")
    }


def test_layers_that_a_renaming_exchanges_are_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mapping that the loader follows is wrong itself.
    def mapping(*_: Any, **__: Any) -> list[WeightRenaming]:
        return [WeightRenaming(r"layers\.0\.mlp", "layers.9.mlp"),
                WeightRenaming(r"layers\.1\.mlp", "layers.0.mlp"),
                WeightRenaming(r"layers\.9\.mlp", "layers.1.mlp")]  # fmt: skip

    for home in (modeling_utils, conversion_mapping):
        monkeypatch.setattr(home, "get_model_conversion_mapping", mapping)

    assert UP in {weight.name for weight in inspected(llama_folder).weights}


def test_buffer_that_is_never_written_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(model: Any) -> None:
        rotary = model.model.rotary_emb
        rotary.inv_freq = torch.empty_like(rotary.inv_freq)

    after_loading(monkeypatch, forget)

    assert named(inspected(llama_folder)) == [(FREQUENCIES, "varies")]


def test_buffer_that_depends_on_the_seed_is_named_and_a_constant_one_is_not(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_buffers(model: Any) -> None:
        model.model.register_buffer("drawn", torch.rand(4), persistent=False)
        model.model.register_buffer("counted", torch.arange(4), persistent=False)

    after_loading(monkeypatch, add_buffers)

    assert named(inspected(llama_folder)) == [("model.drawn", "varies")]


def test_random_numbers_go_on_as_if_nothing_had_been_inspected(llama_folder: Path) -> None:
    loaded = load_model(str(llama_folder), dtype="float32")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    inspect_load(loaded, "refuse")

    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def test_exchanged_experts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(model: Any) -> None:
        experts = model.model.layers[2].mlp.experts
        experts.gate_up_proj[[0, 1]] = experts.gate_up_proj[[1, 0]]

    after_loading(monkeypatch, exchange)

    (weight,) = inspected("micro:mixtral").weights
    assert weight.name == "model.layers.2.mlp.experts.gate_up_proj"
    assert (weight.rows, weight.num_rows) == ((0, 1), 4)


def test_tied_head_is_compared_with_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    def untie(model: Any) -> None:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)

    after_loading(monkeypatch, untie)

    assert named(inspected("micro:gemma2")) == [("lm_head.weight", "differs")]


def test_parameter_that_no_file_holds_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invent(model: Any) -> None:
        model.model.extra = torch.nn.Parameter(torch.zeros(2))

    after_loading(monkeypatch, invent)

    assert named(inspected(llama_folder)) == [("model.extra", "not-stored")]


def test_stored_tensor_that_nothing_uses_is_named(
    llama_folder: Path, edit_tensors: EditTensors
) -> None:
    edit_tensors({"model.layers.7.mlp.up_proj.weight": torch.ones(24, 16)})

    report = inspected(llama_folder)
    assert report.unused == ["model.layers.7.mlp.up_proj.weight"]
    assert report.weights == []


def test_stored_nan_and_infinity_are_counted(llama_folder: Path, edit_tensors: EditTensors) -> None:
    stored = torch.ones(24, 16)
    stored[3, :2], stored[5, 0] = torch.nan, -torch.inf
    edit_tensors({UP: stored})

    report = inspected(llama_folder)
    assert report.non_finite == [f"{UP} (3 of 384 values)"]
    assert report.weights == []


def test_quantised_weights_that_differ_are_not_compared_and_never_passed(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dequantise(model: Any) -> None:
        model.get_parameter(UP).mul_(0.5)
        model.config.quantization_config = {"quant_method": "fp8"}

    after_loading(monkeypatch, dequantise)

    report = inspected(llama_folder)
    assert report.not_compared[0] == f"{UP} (stored by fp8)"
    assert report.not_compared[1].startswith("(model).config.quantization_config.quant_method is")
    assert (report.weights, report.settings) == ([], [])


def test_changes_after_loading_are_told_by_name_rows_and_size(llama_folder: Path) -> None:
    loaded = load_model(str(llama_folder), dtype="float32")
    inspection = inspect_load(loaded, "refuse")
    embedding = "model.embed_tokens.weight"
    with torch.no_grad():
        loaded.model.get_parameter(embedding)[:8] = 0
        loaded.model.get_buffer(FREQUENCIES)[1] *= 2
    loaded.model.get_submodule("model.layers.0.mlp").up_proj = torch.nn.Linear(16, 23, bias=False)

    names = [embedding, FREQUENCIES, "model.layers.0.mlp.up_proj.weight", UP, "absent"]
    changes = inspect_changes(loaded.model, torch.float32, inspection, names)

    table, frequencies = changes.weights
    assert (table.name, table.rows, table.num_rows) == (embedding, (0, 7), 300)
    assert table.error == 1.0
    assert (frequencies.name, frequencies.rows, frequencies.error) == (FREQUENCIES, (1, 1), 1.0)
    assert changes.replaced == ["model.layers.0.mlp.up_proj.weight", "absent"]


# How far two values are apart


@pytest.mark.parametrize(
    ("actual", "expected", "units"),
    [
        (1.0, 1.0, None),
        (1.0, 1.0078125, 1.0),  # neighbours in bfloat16: 1 + 2**-7
        (1.0, 0.99609375, 0.5),  # neighbours across a power of two
        (1.0, 1.015625, 2.0),
        (0.0, 1e-40, 1.089),  # below the smallest normal number units are 2**-126 * 2**-7
        (0.0, 1.0, 128.0),
        (float("nan"), float("nan"), None),
        (float("nan"), 1.0, float("inf")),
        (float("inf"), float("inf"), None),
    ],
)
def test_difference_is_measured_in_units_in_the_last_place(
    actual: float, expected: float, units: float | None
) -> None:
    found = measure_difference(
        "w", torch.tensor([actual]), torch.tensor([expected]), torch.bfloat16
    )
    assert (found and found.largest) == (pytest.approx(units, rel=1e-2) if units else units)


def test_two_roundings_of_one_number_are_within_the_rounding_and_a_scale_is_not() -> None:
    stored = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    expected = stored.bfloat16()
    by_float16 = measure_difference("w", stored.half().bfloat16(), expected, torch.bfloat16)
    kept_in_float32 = measure_difference("w", stored, expected.float(), torch.bfloat16)
    scaled = measure_difference("w", (stored * 1.02).bfloat16(), expected, torch.bfloat16)

    assert by_float16 is not None
    assert not by_float16.beyond_rounding
    assert kept_in_float32 is not None
    assert not kept_in_float32.beyond_rounding
    assert scaled is not None
    assert scaled.beyond_rounding
    assert (scaled.change, by_float16.change) == ("It is 1.02 times the expected one.", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weight: weight[[1, 0, *range(2, 16)]], "Its rows 0 and 1 are swapped."),
        (lambda weight: weight.T, "It is the transpose of the expected one."),
        (lambda weight: weight.to(torch.float8_e4m3fn).float(), "It is rounded to float8_e4m3fn."),
        (lambda weight: weight.bfloat16().float(), "It is rounded to bfloat16."),
        (lambda weight: weight + 1, "It is 1 larger than the expected one."),
        (lambda weight: weight + 0.1, ""),
    ],
)
def test_a_simple_change_is_described(change: Callable[[Tensor], Tensor], words: str) -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    found = measure_difference("w", change(weight), weight, torch.float32)
    assert found is not None
    assert found.change == words


@pytest.mark.parametrize(
    ("suffix", "assigned", "is_loaded"),
    [("safetensors", 1, False), ("safetensors", 2, True), ("bin", 1, False)],
)
def test_a_stale_copy_in_another_shard_is_no_stored_weight(
    suffix: str, assigned: int, is_loaded: bool, tmp_path: Path
) -> None:
    """transformers 5.23 keeps the copy of the last shard, whatever the index says."""
    source = RECIPES["llama"].folder
    tensors = load_file(source / "model.safetensors")
    kind = "model" if suffix == "safetensors" else "pytorch_model"
    names = {number: f"{kind}-0000{number}-of-00002.{suffix}" for number in (1, 2)}
    places = {name: names[1 + (".layers.2." in name)] for name in tensors} | {UP: names[assigned]}
    for file in names.values():
        shard = {name: one for name, one in tensors.items() if places[name] == file}
        if file != names[assigned]:
            shard[UP] = tensors[UP] * 1.25
        if suffix == "safetensors":
            save_file(shard, tmp_path / file, {"format": "pt"})
        else:
            torch.save(shard, tmp_path / file)
    index = tmp_path / f"{kind}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    shutil.copy(source / "config.json", tmp_path)
    report = inspected(tmp_path, "bfloat16")
    assert named(report) == ([] if is_loaded else [(UP, "differs")])
    other = names[3 - assigned]
    assert report.notes == [f"{other} holds another {UP} than the one that the index assigns"]


def test_a_tensor_may_begin_at_any_byte_of_a_mapped_file() -> None:
    stored = torch.arange(64, dtype=torch.uint8)[4:36].view(torch.float32)
    assert stored.storage_offset() * stored.element_size() % 8 == 4
    assert is_cast_of(stored.clone(), stored)

    other = stored.clone()
    other[-1] += 1
    assert not is_cast_of(other, stored)


def test_bits_decide_and_not_values() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
