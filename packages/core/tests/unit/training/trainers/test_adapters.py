import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, GPT2Config, GPT2LMHeadModel

from assay.errors import MachineError, UsageError
from assay.training.trainers.adapters import ADAPTER_FILE, add_lora, read_adapter


def test_lora_without_peft_is_an_error_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError) as raised:
        add_lora(nn.Linear(2, 2), dropout=0.0)
    assert str(raised.value).startswith(
        "LoRA needs peft, which comes with assay-smoke: pip install assay-smoke"
    )


def test_a_folder_without_adapter_is_an_error_that_names_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(MachineError, match=f"holds no {ADAPTER_FILE}, but model.safetensors"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no safetensors file"])
def test_an_adapter_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / ADAPTER_FILE).write_bytes(content)
    with pytest.raises(MachineError, match=rf"^the adapter in {tmp_path / ADAPTER_FILE} cannot be"):
        read_adapter(tmp_path)


class _WithExperts(nn.Module):
    """A layer, two experts in one parameter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)
        self.experts = nn.ParameterDict({"gate_up_proj": nn.Parameter(torch.zeros(2, 4, 8))})
        self.head = nn.Linear(4, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def prepare_inputs_for_generation(self) -> None:
        """Asked for by peft."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_on_linear_layers_and_neither_on_experts_nor_the_head() -> None:
    adapted = add_lora(_WithExperts(), dropout=0.1)

    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert [name.removeprefix("base_model.model.") for name in trained] == [
        "projection.lora_A.default.weight",
        "projection.lora_B.default.weight",
    ]


class _WithSharedExpert(_WithExperts):
    """A layer of a shared expert, whose name peft reads as that of the fused experts."""

    def __init__(self) -> None:
        super().__init__()
        self.config = DeepseekV3Config()
        self.gate_proj, self.up_proj = nn.Linear(4, 4), nn.Linear(4, 4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_whose_names_peft_reads_as_experts_have_no_adapter() -> None:
    adapted = add_lora(_WithSharedExpert(), dropout=0.1)

    trained = {
        name.split(".")[2] for name, value in adapted.named_parameters() if value.requires_grad
    }
    assert trained == {"projection"}


def test_transposed_linear_layers_have_adapters() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    adapted = add_lora(model, dropout=0.1)

    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert {name.split(".lora")[0].rpartition("h.0.")[2] for name in trained} == {
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj",
    }  # fmt: skip


def test_model_without_linear_layers_is_refused_in_one_sentence() -> None:
    model = _WithExperts()
    del model.projection
    with pytest.raises(UsageError, match=r"^LoRA: _WithExperts has no linear layers to adapt$"):
        add_lora(model, dropout=0.0)
