"""The recipes, and the weights that ship with the package."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import MachineError, UsageError
from assay.models import RECIPES, load_model
from assay.models.micro.recipes import find_recipe, read_provenance, standard_library_text
from assay.models.sources import write_untrained
from assay.models.weight_files import read_tensors

every_recipe = pytest.mark.parametrize("name", list(RECIPES))


@every_recipe
def test_shipped_weights_are_small_bfloat16_files(name: str) -> None:
    file = RECIPES[name].folder / "model.safetensors"
    assert file.stat().st_size <= 1_000_000
    tensors = read_tensors(file.parent)
    assert tensors
    assert {tensor.dtype for tensor in tensors} == {"BF16"}


@every_recipe
def test_recipe_loads_and_computes_finite_logits_far_into_its_context(name: str) -> None:
    loaded = load_model(f"micro:{name}", dtype="float32")
    assert loaded.max_positions == 2048
    assert loaded.pad_token_id == 258
    assert loaded.eos_token_ids == (257,)
    ids = torch.tensor([loaded.encode("def " * 275)])
    with torch.no_grad():
        logits = loaded.model(input_ids=ids).logits
    assert logits.shape == (1, 1101, 260)
    assert logits.isfinite().all()


@every_recipe
def test_norm_weights_are_not_all_alike(name: str) -> None:
    # A fault in a norm's weight is invisible where all weights are one.
    for reference in (f"micro:{name}", f"micro:{name}?trained=0"):
        model = load_model(reference, dtype="float32").model
        norms = {
            path: part.get_parameter("weight")
            for path, part in model.named_modules()
            if "norm" in type(part).__name__.lower()
        }
        assert norms
        for path, weight in norms.items():
            assert weight.std() > 0.01, path


@pytest.mark.parametrize("name", [name for name in RECIPES if not RECIPES[name].masked])
def test_models_that_generate_are_peaked(name: str) -> None:
    # Flat logits make token comparisons meaningless; 260 equal ones have a top-1 of 0.004.
    loaded = load_model(f"micro:{name}", dtype="float32")
    text = "    def __init__(self, name):\n        self.name = name\n"
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([loaded.encode(text)])).logits
    assert logits[0].softmax(-1).amax(-1).mean() > 0.5


def test_llama_predicts_held_out_text_well() -> None:
    record = read_provenance(RECIPES["llama"])
    assert record is not None
    assert record["loss_unit"] == "nats per byte"
    assert record["held_out_loss"] < 1.5


def test_recipes_have_the_features_they_are_for() -> None:
    configs = {name: load_model(f"micro:{name}", dtype="float32").config for name in RECIPES}
    assert configs["llama"].num_key_value_heads == 2
    assert configs["mistral"].sliding_window == 32
    assert configs["gemma2"].layer_types == ["sliding_attention", "full_attention"] * 2
    assert configs["gemma2"].attn_logit_softcapping
    assert configs["gemma2"].final_logit_softcapping
    assert (configs["mixtral"].num_local_experts, configs["mixtral"].num_experts_per_tok) == (4, 2)
    assert configs["granite"].residual_multiplier == 0.22
    assert configs["granite"].logits_scaling == 8.0
    assert configs["gpt-bigcode"].multi_query


def test_qwen3_norms_its_heads() -> None:
    model = load_model("micro:qwen3", dtype="float32").model
    assert model.get_parameter("model.layers.0.self_attn.q_norm.weight").shape == (24,)


def test_positions_of_roberta_begin_after_the_padding_id() -> None:
    loaded = load_model("micro:roberta", dtype="float32")
    table = loaded.model.get_submodule("roberta.embeddings.position_embeddings")
    assert isinstance(table, torch.nn.Embedding)
    assert table.weight.shape == (2048 + 258 + 1, 80)
    assert loaded.max_positions == 2048
    longest = torch.zeros(1, 2048, dtype=torch.long)
    assert loaded.model(input_ids=longest).logits.shape == (1, 2048, 260)


def test_bert_generates_nothing_and_can_return_a_tuple() -> None:
    loaded = load_model("micro:bert", dtype="float32")
    assert not loaded.can_generate
    outputs: Any = loaded.model(input_ids=torch.tensor([[1, 2, 3]]), return_dict=False)
    assert isinstance(outputs, tuple)
    assert outputs[0].shape == (1, 3, 260)


def test_every_expert_of_mixtral_is_used() -> None:
    loaded = load_model("micro:mixtral", dtype="float32")
    ids = torch.tensor([loaded.encode("import os\n\n\ndef main() -> None:\n    print(os.name)\n")])
    with torch.no_grad():
        router_logits = loaded.model(input_ids=ids, output_router_logits=True).router_logits
    for layer_logits in router_logits:
        assert set(layer_logits.topk(2, dim=-1).indices.flatten().tolist()) == {0, 1, 2, 3}


def test_changed_byte_in_shipped_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(RECIPES["llama"].folder, tmp_path / "llama")
    monkeypatch.setattr("assay.models.micro.recipes.WEIGHTS", tmp_path)
    load_model("micro:llama", dtype="float32")
    file = tmp_path / "llama" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(MachineError, match=r"model\.safetensors is not the file that was shipped"):
        load_model("micro:llama", dtype="float32")


def test_weights_that_are_not_installed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.models.micro.recipes.WEIGHTS", tmp_path)
    with pytest.raises(MachineError, match="`assay models build bert` trains them again"):
        load_model("micro:bert", dtype="float32")


def test_seed_decides_untrained_weights(tmp_path: Path) -> None:
    contents = {}
    for label, seed in (("first", 1), ("again", 1), ("other", 2)):
        write_untrained(RECIPES["llama"], seed, tmp_path / label)
        contents[label] = (tmp_path / label / "model.safetensors").read_bytes()
    assert contents["first"] == contents["again"]
    assert contents["first"] != contents["other"]


def test_unknown_recipe_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown recipe 'gpt'"):
        find_recipe("gpt")


def test_held_out_text_is_of_other_files() -> None:
    training, held_out = standard_library_text()
    assert len(training) > 5 * len(held_out) > 500_000
    assert held_out[1000:1400] not in training
