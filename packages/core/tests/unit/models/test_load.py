"""Loading: exact values, or one clear error."""

from collections.abc import Callable, Mapping
from io import StringIO
from logging import INFO, StreamHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from assay.errors import UsageError
from assay.judge.loaded import judge_load
from assay.load import LoadRequest, load_and_compare
from assay.models import count_parameters, load, load_model, weight_hashes
from assay.models.config_files import attention_of
from assay.models.inspect.inspection import inspect_load
from assay.models.load import add_biases_last, use_fused_attention
from assay.runs import SilentProgress

# Fixtures of conftest.py.
EditTensors = Callable[[Mapping[str, torch.Tensor | None]], None]
EditConfig = Callable[..., None]

UP = "model.layers.1.mlp.up_proj.weight"


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(str(folder), dtype="float32")
    assert message in str(caught.value)


def test_loaded_model_has_its_properties(llama_folder: Path) -> None:
    loaded = load_model(str(llama_folder), dtype="float32")
    assert not loaded.model.training
    assert (loaded.vocab_size, loaded.max_positions) == (300, 128)
    assert (loaded.checkpoint_dtype, loaded.tokenizer_kind) == ("float32", "bytes")
    assert loaded.can_generate
    assert loaded.eos_token_ids == (2,)
    assert loaded.notes == ("no tokenizer files: text is encoded as the bytes of UTF-8",)
    assert loaded.encode("a") == [97]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_the_stored_ones_rounded_once(llama_folder: Path, dtype: str) -> None:
    stored = load_file(llama_folder / "model.safetensors")[UP]
    weight = load_model(str(llama_folder), dtype=dtype).model.get_parameter(UP)
    assert weight.dtype is getattr(torch, dtype)
    assert torch.equal(weight, stored.to(getattr(torch, dtype)))


def test_rotary_frequencies_stay_in_float32_when_weights_do_not(llama_folder: Path) -> None:
    # Head dimension 8: 10000 ** -(0, 2, 4, 6)/8 = 1, 0.1, 0.01, 0.001 (0.1 in bfloat16 is
    # 0.10009765625).
    for dtype in ("bfloat16", "float16"):
        loaded = load_model(str(llama_folder), dtype=dtype)
        frequencies = loaded.model.get_buffer("model.rotary_emb.inv_freq")
        assert frequencies.dtype is torch.float32
        assert torch.allclose(frequencies, torch.tensor([1, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)


def test_float64_widens_every_parameter_and_buffer_and_changes_no_value(
    llama_folder: Path,
) -> None:
    stored = load_file(llama_folder / "model.safetensors")
    model = load_model(str(llama_folder), dtype="float64").model
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float64
        assert torch.equal(parameter, stored[name].double())
    narrow = load_model(str(llama_folder), dtype="float32").model
    buffers = dict(model.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    for name, buffer in narrow.named_buffers():
        assert buffers[name].dtype is torch.float64
        assert torch.equal(buffers[name], buffer.double())


def test_float64_checkpoint_keeps_what_float32_cannot_hold(
    llama_folder: Path, edit_tensors: EditTensors
) -> None:
    narrow = load_file(llama_folder / "model.safetensors")[UP]
    edit_tensors({UP: narrow.double() + 2.0**-40})
    stored = load_file(llama_folder / "model.safetensors")[UP]
    weight = load_model(str(llama_folder), dtype="float64").model.get_parameter(UP)
    assert not torch.equal(stored, stored.float().double())
    assert torch.equal(weight, stored)


# float32 is the yardstick's dtype of large models, and of devices without float64.
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_wide_dtype_of_rounded_values_holds_the_values_of_the_narrow_run(
    llama_folder: Path, dtype: str
) -> None:
    wide = load_model(str(llama_folder), dtype=dtype, rounded_to="bfloat16").model
    narrow = load_model(str(llama_folder), dtype="bfloat16").model
    for name, parameter in narrow.named_parameters():
        actual = wide.get_parameter(name)
        assert actual.dtype is getattr(torch, dtype)
        assert torch.equal(actual, parameter.to(actual.dtype))


def test_embedding_scale_of_gemma_is_exact_in_the_yardstick() -> None:
    scale = "model.embed_tokens.embed_scale"
    wide = load_model("micro:gemma2?trained=0", dtype="float64").model.get_buffer(scale)
    rounded = load_model("micro:gemma2?trained=0", dtype="float64", rounded_to="bfloat16")
    # sqrt(96) = 9.79795897; bfloat16 has steps of 1/16 there: 9.8125.
    assert wide.item() == pytest.approx(9.79795897, rel=1e-7)
    assert rounded.model.get_buffer(scale).item() == 9.8125


def test_tied_weights_stay_tied_in_float64() -> None:
    model = load_model("micro:gemma2?trained=0", dtype="float64").model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize(("dtype", "expected"), [("float64", "eager"), ("float32", "grouped_mm")])
def test_experts_are_eager_in_float64_only(dtype: str, expected: str) -> None:
    loaded = load_model("micro:mixtral?trained=0", dtype=dtype)
    assert loaded.config._experts_implementation == expected


def test_attention_and_experts_can_be_chosen() -> None:
    loaded = load_model(
        "micro:mixtral?trained=0", dtype="float32", attention="eager", experts="batched_mm"
    )
    config = loaded.config
    assert (config._attn_implementation, config._experts_implementation) == ("eager", "batched_mm")
    assert attention_of(loaded) == attention_of(loaded.model) == "eager"
    assert attention_of(object()) == "eager"


def test_attention_that_the_model_lacks_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Gemma2ForCausalLM"):
        load_model("micro:gemma2?trained=0", dtype="float32", attention="sdpa")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": "float64", "rounded_to": "fp8"}])
def test_dtype_that_models_do_not_run_in_is_a_usage_error(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="cannot be loaded in"):
        load_model("micro:llama?trained=0", **options)  # type: ignore[arg-type]


def test_missing_tensor_is_named(llama_folder: Path, edit_tensors: EditTensors) -> None:
    edit_tensors({UP: None})
    assert_refused(llama_folder, f"{llama_folder}: the weights lack {UP}")


def test_renamed_tensor_is_named_as_unused(llama_folder: Path, edit_tensors: EditTensors) -> None:
    edit_tensors({UP: None, "model.renamed": torch.ones(1)})
    held = "hold model.renamed, which the model does not use"
    assert_refused(llama_folder, f"the weights lack {UP}, and {held}")
    answer = load_and_compare(LoadRequest(model=str(llama_folder)), SilentProgress())
    judged = judge_load([answer.report])
    assert judged.result.is_failed
    assert [one.reason for one in judged.loading] == [f"{UP} is loaded from no tensor of the files"]
    assert judged.result.notes == [
        "the files hold tensors that the model does not use: model.renamed"
    ]


def test_missing_head_is_refused_unless_it_is_tied(
    llama_folder: Path, edit_tensors: EditTensors, edit_config: EditConfig
) -> None:
    edit_tensors({"lm_head.weight": None})
    assert_refused(llama_folder, "the weights lack lm_head.weight")
    edit_config(tie_word_embeddings=True)
    tied = load_model(str(llama_folder), dtype="float32").model
    assert torch.equal(
        tied.get_parameter("lm_head.weight"), tied.get_parameter("model.embed_tokens.weight")
    )


def test_wrong_shape_is_named_with_both_shapes(
    llama_folder: Path, edit_tensors: EditTensors
) -> None:
    edit_tensors({UP: torch.zeros(24, 15)})
    assert_refused(llama_folder, f"{UP} has the shape [24, 15], the model needs [24, 16]")


def test_truncated_file_is_refused(llama_folder: Path) -> None:
    file = llama_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    assert_refused(llama_folder, f"{file} is truncated")


def test_folder_without_weights_is_refused(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").unlink()
    assert_refused(llama_folder, f"model folder {llama_folder} has no weights")


def test_tensor_that_the_model_does_not_use_is_noted(
    llama_folder: Path, edit_tensors: EditTensors
) -> None:
    edit_tensors({"extra.weight": torch.zeros(1)})
    notes = load_model(str(llama_folder), dtype="float32").notes
    assert "the checkpoint holds tensors that the model does not use: extra.weight" in notes


def test_configuration_that_is_no_json_is_named(llama_folder: Path) -> None:
    (llama_folder / "config.json").write_text("{")
    assert_refused(llama_folder, f"{llama_folder / 'config.json'}: not JSON: Expecting")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "lamma"}, "model_type 'lamma' is unknown to transformers"),
        ({"model_type": None}, "model_type None is unknown to transformers"),
        ({"architectures": ["LamaForCausalLM"]}, "architectures: 'LamaForCausalLM' is unknown"),
        ({"num_attention_heads": 5}, "is refused by transformers"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
            "needs code that comes with the model",
        ),
    ],
)
def test_configuration_that_names_no_known_model_is_refused(
    llama_folder: Path, settings: dict[str, object], message: str, edit_config: EditConfig
) -> None:
    edit_config(**settings)
    assert_refused(llama_folder, message)
    assert_refused(llama_folder, str(llama_folder))


def test_folder_without_architectures_is_a_causal_language_model(
    llama_folder: Path, edit_config: EditConfig
) -> None:
    edit_config(architectures=None)
    loaded = load_model(str(llama_folder), dtype="float32")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"


def test_weights_hash_is_that_of_the_checkpoint_in_every_dtype(
    llama_folder: Path, edit_tensors: EditTensors
) -> None:
    hashes = {
        load_model(str(llama_folder), dtype=dtype).weights_hash for dtype in ("float64", "bfloat16")
    }
    assert len(hashes) == 1
    stored = load_file(llama_folder / "model.safetensors")[UP]
    stored[0, 0] += 1e-6
    edit_tensors({UP: stored})
    assert load_model(str(llama_folder), dtype="bfloat16").weights_hash not in hashes


def test_pickled_weights_load_like_safetensors(llama_folder: Path) -> None:
    expected = load_model(str(llama_folder), dtype="float32")
    file = llama_folder / "model.safetensors"
    torch.save(load_file(file), llama_folder / "pytorch_model.bin")
    file.unlink()
    actual = load_model(str(llama_folder), dtype="float32")
    assert weight_hashes(actual.model) == weight_hashes(expected.model)
    assert actual.checkpoint_dtype == "float32"


def test_loading_leaves_the_random_state_and_the_log_level_alone() -> None:
    state, level = torch.get_rng_state(), logging.get_verbosity()
    logging.set_verbosity(INFO)
    try:
        load_model("micro:llama?trained=0&seed=5", dtype="float32")
        assert torch.equal(torch.get_rng_state(), state)
        assert logging.get_verbosity() == INFO
    finally:
        logging.set_verbosity(level)


def test_loading_prints_and_logs_nothing(
    llama_folder: Path, edit_tensors: EditTensors, capfd: pytest.CaptureFixture[str]
) -> None:
    edit_tensors({"extra": torch.zeros(1)})  # transformers reports it as a warning
    logged = StringIO()
    handler = StreamHandler(logged)
    logging.add_handler(handler)
    try:
        load_model(str(llama_folder), dtype="float32")
    finally:
        logging.remove_handler(handler)
    captured = capfd.readouterr()
    assert (captured.out, captured.err, logged.getvalue()) == ("", "", "")


def test_saved_copy_of_a_recipe_loads_as_the_recipe(tmp_path: Path) -> None:
    recipe = load_model("micro:llama?trained=0", dtype="bfloat16")
    assert isinstance(recipe.model, PreTrainedModel)
    recipe.model.save_pretrained(tmp_path)
    copy = load_model(str(tmp_path), dtype="bfloat16")
    assert copy.weights_hash == recipe.weights_hash
    assert copy.encode("x") == recipe.encode("x") == [256, 120]
    assert weight_hashes(copy.model) == weight_hashes(recipe.model)


def test_sharded_checkpoint_with_one_damaged_shard_names_the_shard(llama_folder: Path) -> None:
    loaded = load_model(str(llama_folder), dtype="float32")
    (llama_folder / "model.safetensors").unlink()
    assert isinstance(loaded.model, PreTrainedModel)
    loaded.model.save_pretrained(llama_folder, max_shard_size="20KB")
    shards = sorted(llama_folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load_model(str(llama_folder), dtype="float32").weights_hash == loaded.weights_hash
    tensors = load_file(shards[-1])
    save_file({name: tensors[name] for name in list(tensors)[1:]}, shards[-1])
    assert_refused(llama_folder, f"{shards[-1]} lacks {next(iter(tensors))}")


def test_product_is_rounded_before_its_bias_is_added() -> None:
    linear = nn.Linear(2, 1).to(torch.bfloat16)
    linear.weight.data = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    linear.bias.data = torch.tensor([-1.0], dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    fused = linear(ones)

    add_biases_last(linear)

    assert fused.item() == 2.0**-9
    assert linear(ones).item() == 0.0


def test_layers_with_a_custom_forward_keep_it() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return 2 * super().forward(input)

    linear = Doubling(2, 1)
    x = torch.randn(3, 2)
    expected = linear(x)

    add_biases_last(linear)

    assert torch.equal(linear(x), expected)


# vocabulary 300, hidden 16, MLP 24, 2 layers, 2 heads and 1 kv head of 8:
# 2 x 300 x 16 + 16 + 2 x (2 x 16 x 16 + 2 x 8 x 16 + 3 x 16 x 24 + 2 x 16) = 13520
PARAMETERS = 13520


def test_folder_is_sized_by_its_headers(saved_llama: Path) -> None:
    assert count_parameters(str(saved_llama)) == PARAMETERS


def test_values_are_not_read(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.models.load._count_on_meta", None)
    assert count_parameters(str(llama_folder)) == PARAMETERS


def test_untrained_recipe_is_sized_by_its_configuration() -> None:
    # hidden 96, MLP 256, 4 layers, 4 heads and 2 kv heads of 24, vocabulary 260, untied:
    # 2 x 260 x 96 + 96 + 4 x (2 x 96 x 96 + 2 x 48 x 96 + 3 x 96 x 256 + 2 x 96) = 456288
    assert count_parameters("micro:llama?trained=0") == 456288


def test_model_without_a_head_loads_and_is_no_language_model(
    llama_folder: Path, edit_config: EditConfig
) -> None:
    whole = load_model(str(llama_folder), dtype="float32")
    assert whole.require_language_model() is whole

    edit_config(architectures=["LlamaModel"])
    loaded = load_model(str(llama_folder), dtype="float32")

    with pytest.raises(UsageError, match="LlamaModel has no language-model head"):
        loaded.require_language_model()


@pytest.mark.parametrize(
    ("model_class", "config_class", "token"),
    [
        ("LlamaForSequenceClassification", "LlamaConfig", 2),
        ("LlamaForCausalLM", "LlamaConfig", None),
        ("BertForSequenceClassification", "BertConfig", 0),
    ],
)
def test_a_classifier_without_padding_token_gets_one(
    model_class: str, config_class: str, token: int | None, tmp_path: Path
) -> None:
    """Such as a reward model: it refuses several texts without one."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = getattr(transformers, config_class)(num_attention_heads=2, **sizes)
    getattr(transformers, model_class)(config).save_pretrained(tmp_path)

    loaded = load_model(str(tmp_path), dtype="float32")

    assert loaded.config.pad_token_id == token
    named = [note for note in loaded.notes if "no padding token" in note]
    assert len(named) == (token == 2)
    assert inspect_load(loaded, "refuse").report.settings == []


def test_model_with_two_text_configurations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MusicGen, whose decoder is of sounds."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Multiple valid text configs: ['text_encoder', 'decoder']")

    own = load._load_weights

    def load_weights(*arguments: Any) -> Any:
        module, notes = own(*arguments)
        module.config.get_text_config = refuse
        return module, notes

    monkeypatch.setattr(load, "_load_weights", load_weights)
    with pytest.raises(UsageError, match="micro:llama: Multiple valid text configs"):
        load_model("micro:llama", dtype="float32")


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_attention_is_fused_where_the_class_supports_it(name: str, attention: str) -> None:
    model = load_model(f"micro:{name}?trained=0", dtype="float32", attention="eager").model

    assert use_fused_attention(model) is (attention == "sdpa")
    assert attention_of(model) == attention
