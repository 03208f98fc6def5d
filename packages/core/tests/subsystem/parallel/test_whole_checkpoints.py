"""Sharded states made whole: folders that transformers and peft load, bitwise equal.

The reference of a saved folder is what every rank holds, gathered by other means, and what
transformers or peft read.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from assay.errors import MachineError, UsageError
from assay.models.load import load_model
from assay.parallel.checkpoints import save_adapter, save_model, write_model_folder
from assay.parallel.pipeline import shard_parameters
from packages.core.tests.subsystem.parallel.divided_models import load_divided
from packages.core.tests.subsystem.parallel.judging import plain
from packages.core.tests.subsystem.parallel.tiny_models import add_lora
from packages.core.tests.subsystem.parallel.training_steps import NUM_LAYERS, load_whole

ARCHITECTURES = ("llama", "granite", "mixtral")
UNTIED = ("llama", "granite-untied", "mixtral")


def _move(model: nn.Module) -> None:
    """Change every parameter, equally on all ranks that have it, so that it differs from all files."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 2.0**-10)


def _held_by_ranks(model: nn.Module) -> dict[str, Tensor]:
    everything: list[Any] = [None] * dist.get_world_size()
    state = {name: plain(tensor) for name, tensor in model.state_dict().items()}
    dist.all_gather_object(everything, state)
    return {name: tensor for of_rank in everything for name, tensor in of_rank.items()}


def _unequal(saved: Path, expected: dict[str, Tensor]) -> list[str]:
    """Names that differ in what transformers loads from `saved`, on all ranks alike."""
    actual = load_model(str(saved), dtype="float32").model.state_dict()
    assert expected
    assert actual.keys() >= expected.keys()
    names = [name for name in actual if not actual[name].equal(expected.get(name, actual[name]))]
    return names + sorted(actual.keys() - expected.keys())


def _save_moved(mesh: DeviceMesh, folder: Path, target: Path) -> list[str]:
    model = load_divided(folder, mesh)
    _move(model)
    save_model(target, model)
    dist.barrier()
    return _unequal(target, _held_by_ranks(model))


@pytest.mark.parametrize("folder", ARCHITECTURES, indirect=True)
@pytest.mark.world(dp=2)
def test_shards_are_saved_whole(mesh: DeviceMesh, folder: Path, tmp_path: Path) -> None:
    assert _save_moved(mesh, folder, tmp_path / "saved") == []


@pytest.mark.parametrize("folder", UNTIED, indirect=True)
@pytest.mark.world(pp=2)
def test_stages_are_saved_as_one_model(mesh: DeviceMesh, folder: Path, tmp_path: Path) -> None:
    assert _save_moved(mesh, folder, tmp_path / "saved") == []


@pytest.mark.parametrize("folder", ARCHITECTURES, indirect=True)
@pytest.mark.world(tp=2)
def test_divided_weights_are_saved_whole(mesh: DeviceMesh, folder: Path, tmp_path: Path) -> None:
    assert _save_moved(mesh, folder, tmp_path / "saved") == []


@pytest.mark.parametrize("folder", ["granite-untied"], indirect=True)
@pytest.mark.world(pp=2, dp=2)
def test_sharded_stages_are_saved_as_one_model(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    assert _save_moved(mesh, folder, tmp_path / "saved") == []


@pytest.mark.world(dp=2)
def test_value_that_was_not_saved_is_detected(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    model = load_divided(folder, mesh)
    save_model(tmp_path / "saved", model)
    dist.barrier()
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight").mul_(1.0 + 2.0**-23)
    assert _unequal(tmp_path / "saved", _held_by_ranks(model)) == [
        "model.layers.2.mlp.up_proj.weight"
    ]


@pytest.mark.parametrize("folder", UNTIED, indirect=True)
@pytest.mark.world(pp=2)
def test_saved_folder_has_the_tensors_of_the_first_one(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    """Also those that transformers renames and fuses when it loads them."""
    save_model(tmp_path / "saved", load_divided(folder, mesh))
    dist.barrier()
    assert _stored(tmp_path / "saved").keys() == _stored(folder).keys()
    saved = _stored(tmp_path / "saved")
    assert [name for name, value in _stored(folder).items() if not saved[name].equal(value)] == []


def _stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors
    return tensors


@pytest.mark.world(pp=2)
def test_stage_that_is_left_out_is_named_on_all_ranks_and_nothing_is_written(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    stage = load_divided(folder, mesh)
    if mesh.get_local_rank() == 1:
        stage = nn.ModuleDict()
    with pytest.raises(MachineError, match=r"Missing key.*model.layers.2.self_attn"):
        save_model(tmp_path / "saved", stage)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("folder", ["granite"], indirect=True)
def test_tied_parameters_that_differ_are_refused(folder: Path, tmp_path: Path) -> None:
    model: Any = load_whole(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["lm_head.weight"][3, 5] += 0.25
    with pytest.raises(MachineError, match=r"lm_head.weight is tied to model.embed_tokens.weight"):
        write_model_folder(tmp_path / "saved", model.config, state)
    assert not (tmp_path / "saved").exists()


def test_extra_and_misshapen_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    model: Any = load_whole(folder)
    state = model.state_dict()
    with pytest.raises(MachineError, match=r"Unexpected key.*model.layers.9.bias"):
        write_model_folder(tmp_path, model.config, state | {"model.layers.9.bias": torch.ones(1)})
    with pytest.raises(MachineError, match=r"size mismatch for model.norm.weight"):
        write_model_folder(tmp_path, model.config, state | {"model.norm.weight": torch.ones(16)})
    assert [*tmp_path.iterdir()] == []


# Adapters

# peft 0.21 asks transformers 5.23 for an attribute under its old name.
with_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def _with_adapter(model: nn.Module) -> Any:
    targets = ["q_proj", "o_proj", "down_proj"]
    return add_lora(model, "default", target_modules=targets, task_type="CAUSAL_LM")


def _differing_adapters(saved: Path, folder: Path, held: dict[str, Tensor]) -> list[str]:
    """Tensors of the adapter as peft loads it, that are not those that the ranks hold."""
    import peft

    base: Any = load_model(str(folder), dtype="float32", attention="eager").model
    loaded: Any = peft.PeftModel.from_pretrained(base, saved)
    state = {key: value for key, value in loaded.state_dict().items() if "lora_" in key}
    assert state.keys() == {key for key in held if "lora_" in key}
    assert len(state) == 2 * 3 * NUM_LAYERS
    return sorted(key for key, value in state.items() if not value.equal(held[key]))


@with_peft
@pytest.mark.world(dp=2)
def test_sharded_adapter_is_saved_as_peft_loads_it(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    model = _with_adapter(load_whole(folder, mesh.device_type))
    shard_parameters(model, mesh)
    save_adapter(tmp_path, model)
    dist.barrier()
    held = _held_by_ranks(model)
    assert _differing_adapters(tmp_path, folder, held) == []
    changed = next(name for name in held if "lora_A" in name)
    held[changed] = held[changed] * 1.001
    assert _differing_adapters(tmp_path, folder, held) == [changed]


@with_peft
@pytest.mark.world(pp=2)
def test_adapter_of_stages_is_saved_as_peft_loads_it(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    model = _with_adapter(load_divided(folder, mesh))
    save_adapter(tmp_path, model)
    dist.barrier()
    assert _differing_adapters(tmp_path, folder, _held_by_ranks(model)) == []


@pytest.mark.world(pp=2)
def test_folder_names_the_adapted_layers_of_all_stages(
    mesh: DeviceMesh, folder: Path, tmp_path: Path
) -> None:
    stage: Any = load_divided(folder, mesh)
    own = [path for path, module in stage.named_modules() if path.endswith("down_proj")]
    save_adapter(tmp_path, add_lora(stage, target_modules=own))
    dist.barrier()
    saved = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert own
    assert set(own) < set(saved["target_modules"])


@pytest.mark.world(dp=2)
def test_adapter_with_trained_biases_is_refused(mesh: DeviceMesh, folder: Path) -> None:
    model = _with_adapter(load_whole(folder, mesh.device_type))
    model.peft_config["default"].bias = "all"
    with pytest.raises(UsageError, match="without biases"):
        save_adapter(folder, model)
