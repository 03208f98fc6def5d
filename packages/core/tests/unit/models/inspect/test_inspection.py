"""One BOS, one pass of the chat template, an end that can be told from padding; built offline."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from assay.models import RECIPES, load_model
from assay.models.inspect.inspection import check_generation_config, check_tokenizer, inspect_load
from assay.models.inspect.report import LoadReport

WORDS = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, "What": 4, "is": 5, "it": 6, "?": 7}
CONFIG: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))
PLAIN = "{% for message in messages %}{{ message.content }} {% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN


def tokenizer_with(template: str = "$A", chat: str | None = None, pad: str = "<pad>") -> Any:
    words = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": pad}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=chat, **names)


def test_tokenizer_with_one_begin_and_a_template_without_has_no_finding() -> None:
    assert check_tokenizer(tokenizer_with("<s> $A", PLAIN), CONFIG, (1,)) == ([], [])
    assert check_tokenizer(tokenizer_with("$A", WITH_BOS), CONFIG, (1,)) == ([], [])


def test_second_begin_of_a_text_is_named() -> None:
    wrong, _ = check_tokenizer(tokenizer_with("<s> <s> $A"), CONFIG, (1,))
    assert wrong == ["a text begins with 2 BOS tokens (<s>, id 0)"]


def test_second_begin_that_the_template_writes_is_named() -> None:
    chat = "{{ bos_token }}" + WITH_BOS
    wrong, _ = check_tokenizer(tokenizer_with("$A", chat), CONFIG, (1,))
    assert wrong == ["a chat begins with 2 BOS tokens (<s>, id 0)"]


def test_begin_that_template_and_tokenizer_both_write_is_a_note() -> None:
    wrong, notes = check_tokenizer(tokenizer_with("<s> $A", WITH_BOS), CONFIG, (1,))
    assert wrong == []
    note = (
        "the chat template writes BOS (<s>, id 0), and the tokenizer adds it again: tokenize its text"
        " with add_special_tokens=False"
    )
    assert notes == [note]


def test_end_that_is_masked_with_the_padding_is_a_note() -> None:
    _, notes = check_tokenizer(tokenizer_with(pad="</s>"), CONFIG, (1,))
    note = (
        "padding is EOS (</s>, id 1): labels masked by this id lose the end of each text; mask by the"
        " attention mask"
    )
    assert notes == [note]


def test_end_that_the_model_does_not_stop_at_is_a_note() -> None:
    _, notes = check_tokenizer(tokenizer_with(), CONFIG, (6, 7))
    assert notes == ["the tokenizer ends a text with </s> (id 1), the model stops at 6, 7"]


def test_template_that_raises_is_named() -> None:
    wrong, _ = check_tokenizer(
        tokenizer_with(chat="{{ raise_exception('no system') }}"), CONFIG, (1,)
    )
    assert len(wrong) == 1
    assert wrong[0].startswith("the chat template raises TemplateError: no system")


@pytest.mark.parametrize(("temperature", "found"), [(0.7, []), (0.6, ["temperature"])])
def test_generation_settings_are_those_of_the_file(
    tmp_path: Path, temperature: float, found: list[str]
) -> None:
    GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[1, 2]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    own = GenerationConfig(do_sample=True, temperature=temperature, eos_token_id=[1, 2])

    wrong, notes = check_generation_config(tmp_path, SimpleNamespace(generation_config=own))
    assert [text.split()[0] for text in wrong] == found
    assert notes == []


@pytest.mark.parametrize(
    ("of_config", "of_generation", "texts"),
    [
        ({"eos_token_id": 257}, {}, ("257", "none")),
        ({"eos_token_id": [1, 257]}, {"eos_token_id": 1}, ("1, 257", "1")),
        ({"text_config": {"eos_token_id": 2}}, {"eos_token_id": None}, ("2", "none")),
        ({"eos_token_id": 257}, {"eos_token_id": [257, 258]}, None),
        ({"eos_token_id": None}, {"eos_token_id": 257}, None),
    ],
)
def test_end_of_text_that_generation_does_not_know_is_a_note(
    tmp_path: Path, of_config: Any, of_generation: Any, texts: tuple[str, str] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(of_config))
    (tmp_path / "generation_config.json").write_text(json.dumps(of_generation))
    model = SimpleNamespace(generation_config=GenerationConfig(**of_generation))
    wrong, notes = check_generation_config(tmp_path, model)
    assert wrong == []
    note = (
        f"config.json ends a text with the id {texts[0]}, generation_config.json with {texts[1]}:"
        " generation follows generation_config.json"
        if texts
        else ""
    )
    assert notes == ([note] if texts else [])


UP = "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
BLOCK = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_fp8(folder: Path) -> Path:
    """Store the linear layers of the small Llama in fp8, one scale for 16 x 16 values."""
    source = RECIPES["llama"].folder
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.float().view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).view(weight.shape)
        tensors[name], tensors[f"{name}_scale_inv"] = codes.to(torch.float8_e4m3fn), scales
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = json.loads((source / "config.json").read_text())
    return write(folder, tensors, config | {"quantization_config": settings})


def write_mxfp4(folder: Path) -> Path:
    """Store random codes as the experts of a GPT-OSS of two layers."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, value in GptOssForCausalLM(config).bfloat16().state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        experts, inputs, outputs = value.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write(folder, tensors, config.to_dict() | {"quantization_config": settings})


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inspected(folder: Path, dtype: str = "bfloat16") -> LoadReport:
    return inspect_load(load_model(str(folder), dtype=dtype), "refuse").report


every_form = pytest.mark.parametrize(
    ("write_folder", "wrong"), [(write_fp8, UP), (write_mxfp4, EXPERTS)]
)


@every_form
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dequantized_weights_are_those_of_the_files(
    write_folder: Any, wrong: str, dtype: str, tmp_path: Path
) -> None:
    report = inspected(write_folder(tmp_path), dtype)
    assert (report.weights, report.not_compared, report.settings) == ([], [], [])
    assert report.compared > 20


@every_form
def test_a_dequantized_weight_that_is_two_percent_too_large_is_named(
    write_folder: Any, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = PreTrainedModel._finalize_model_loading

    def finish_and_scale(model: Any, *arguments: Any) -> Any:
        info = finish(model, *arguments)
        with torch.no_grad():
            model.get_parameter(wrong).mul_(1.02)
        return info

    monkeypatch.setattr(PreTrainedModel, "_finalize_model_loading", staticmethod(finish_and_scale))
    report = inspected(write_folder(tmp_path))
    assert [(one.name, one.problem) for one in report.weights] == [(wrong, "differs")]
    assert report.weights[0].error == pytest.approx(0.02, abs=4e-3)


def test_values_of_a_block_are_codes_times_a_power_of_two(tmp_path: Path) -> None:
    folder = write_mxfp4(tmp_path)
    stored = load_file(folder / "model.safetensors")
    byte, scale = stored[f"{EXPERTS}_blocks"][2, 5, 0, 3], stored[f"{EXPERTS}_scales"][2, 5, 0]
    low, high = int(byte) % 16, int(byte) // 16
    values = [float((-1) ** (one // 8) * E2M1[one % 8]) for one in (low, high)]
    held = load_model(str(folder), dtype="float32").model.get_parameter(EXPERTS)
    assert held[2, 6:8, 5].tolist() == [value * 2.0 ** (int(scale) - 127) for value in values]
