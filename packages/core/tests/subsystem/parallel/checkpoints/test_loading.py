"""The tensors that a rank reads of a Hugging Face folder: sets of names, and bitwise values.

The names that are expected are written out here, by the layouts of the published models.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from assay.errors import UsageError
from assay.models.loading.loaded_model import load_model
from assay.models.weight_files.mapping import map_folder
from assay.parallel.checkpoints import weight_loading
from assay.parallel.checkpoints.weight_loading import open_weights
from assay.parallel.pipeline_parallel.stages import StagePlan, cut_stage
from packages.core.tests.subsystem.parallel.divided_models import load_stage
from packages.core.tests.subsystem.parallel.tiny_models import build_model
from packages.core.tests.subsystem.parallel.training_steps import NUM_LAYERS

_ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
_NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
_MLP = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
_EXPERTS = [f"experts.{expert}.w{number}.weight" for expert in range(4) for number in (1, 2, 3)]

# Of one layer, what the files of each architecture hold.
STORED = {
    "llama": [
        *(f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")),
        *(f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down")
          for kind in ("weight", "bias")),
        *_NORMS,
    ],
    "granite": [*_ATTENTION, *_MLP, *_NORMS],
    "qwen3": [*_ATTENTION, "self_attn.q_norm.weight", "self_attn.k_norm.weight", *_MLP, *_NORMS],
    "mistral": [*_ATTENTION, *_MLP, *_NORMS],
    "mixtral": [
        *_ATTENTION,
        *(f"block_sparse_moe.{name}" for name in ("gate.weight", *_EXPERTS)),
        *_NORMS,
    ],
}  # fmt: skip
TIED = {"granite", "qwen3"}
PLAN = StagePlan((range(1), range(1, 3), range(3, 4)))


def _stored_names(architecture: str, stage: int) -> set[str]:
    names = {
        f"model.layers.{layer}.{name}"
        for layer in PLAN.layers[stage]
        for name in STORED[architecture]
    }
    embedding = "model.embed_tokens.weight"
    head = embedding if architecture in TIED else "lm_head.weight"
    ends: list[set[str]] = [{embedding}, set(), {"model.norm.weight", head}]
    return names | ends[stage]


class _NotedTensors(dict[str, Tensor]):
    """Mapped tensors that note the names of those whose values are read."""

    def __init__(self, tensors: dict[str, Tensor], names: set[str]) -> None:
        super().__init__(tensors)
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        self._names.add(name)
        return super().__getitem__(name)


@contextmanager
def _reads_noted() -> Iterator[set[str]]:
    """The names of all tensors whose values are read inside."""
    names: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weight_loading, "map_folder", lambda folder: _NotedTensors(map_folder(folder), names)
        )
        yield names


@pytest.fixture
def reads() -> Iterator[set[str]]:
    with _reads_noted() as names:
        yield names


def _named_differences(actual: set[str], expected: set[str]) -> dict[str, list[str]]:
    assert expected
    return {"missing": sorted(expected - actual), "extra": sorted(actual - expected)}


NONE: dict[str, list[str]] = {"missing": [], "extra": []}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("architecture", sorted(STORED))
def test_stage_reads_its_own_tensors_and_no_other(
    folders: Callable[[str], Path], reads: set[str], architecture: str, stage: int
) -> None:
    load_stage(folders(architecture), stage, PLAN)
    assert _named_differences(reads, _stored_names(architecture, stage)) == NONE


def test_layer_of_another_stage_is_named(folder: Path, reads: set[str]) -> None:
    load_stage(folder, 1, StagePlan((range(1), range(1, 2), range(2, 4))))
    differences = _named_differences(reads, _stored_names("llama", 1))
    assert differences["extra"] == []
    assert differences["missing"] == sorted(f"model.layers.2.{name}" for name in STORED["llama"])


def test_reading_more_than_a_stage_has_is_named(folder: Path, reads: set[str]) -> None:
    load_stage(folder, 1, PLAN)
    with open_weights(str(folder), dtype="float32") as weights:
        weights.read("model.norm.weight", (32,), (0,))
    assert _named_differences(reads, _stored_names("llama", 1)) == {
        "missing": [],
        "extra": ["model.norm.weight"],
    }


def _parameters_over_ranks(mesh: DeviceMesh, folder: Path, plan: StagePlan) -> list[set[str]]:
    stage = load_stage(folder, mesh.get_local_rank(), plan)
    everything: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everything, {name for name, _ in stage.named_parameters()})
    return everything


@pytest.mark.world(pp=2)
def test_ranks_together_have_every_parameter_once(mesh: DeviceMesh, folder: Path) -> None:
    first, last = _parameters_over_ranks(mesh, folder, StagePlan.balanced(NUM_LAYERS, 2))
    whole = {name for name, _ in build_model("llama", num_hidden_layers=4).named_parameters()}
    assert first & last == set()
    assert _named_differences(first | last, whole) == NONE


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
@pytest.mark.world(pp=2)
def test_ends_of_a_tied_model_have_a_copy_each(mesh: DeviceMesh, folder: Path) -> None:
    first, last = _parameters_over_ranks(mesh, folder, StagePlan.balanced(NUM_LAYERS, 2))
    whole = {name for name, _ in build_model("qwen3", num_hidden_layers=4).named_parameters()}
    assert "model.embed_tokens.weight" in first
    assert _named_differences(first | last, whole) == {"missing": [], "extra": ["lm_head.weight"]}


@pytest.mark.parametrize("architecture", [*sorted(STORED), "phi3"])
def test_values_are_those_that_transformers_loads(
    folders: Callable[[str], Path], architecture: str
) -> None:
    expected = load_model(str(folders(architecture)), dtype="float32").model.state_dict()
    assert _unequal(folders(architecture), expected) == []


@pytest.mark.parametrize("reference", ["micro:llama", "micro:mixtral", "micro:llama?trained=0"])
def test_recipes_are_loaded_as_transformers_loads_them(reference: str) -> None:
    expected = load_model(reference, dtype="float32").model.state_dict()
    with open_weights(reference, dtype="float32") as weights:
        model = weights.empty_model()
        weights.fill(model)
    actual = model.state_dict()
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not actual[name].equal(expected[name])] == []


def test_experts_in_another_order_are_detected(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = load_model(str(folders("mixtral")), dtype="float32").model.state_dict()
    _rewrite(folders("mixtral"), tmp_path, _swap_two_experts)
    assert _unequal(tmp_path, expected) == [
        "model.layers.2.mlp.experts.down_proj",
        "model.layers.2.mlp.experts.gate_up_proj",
    ]


def _unequal(folder: Path, expected: dict[str, Tensor]) -> list[str]:
    """Over all stages: names whose values differ, or are in no stage."""
    tied = {"lm_head.weight"} & expected.keys()
    values: dict[str, Tensor] = {}
    for stage in range(3):
        values |= load_stage(folder, stage, PLAN).state_dict()
    assert values.keys() | tied == expected.keys()
    return sorted(name for name in expected if not values[name].equal(expected[name]))


def _swap_two_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    numbers = {"0": "1", "1": "0"}
    return {
        re.sub(
            r"(layers\.2\.block_sparse_moe\.experts\.)([01])\.",
            lambda match: f"{match[1]}{numbers[match[2]]}.",
            name,
        ): tensor
        for name, tensor in tensors.items()
    }


def _rewrite(
    source: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Path:
    """A copy of a model folder in one file, with other tensors."""
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(change(tensors), folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def _without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def test_missing_and_an_extra_tensor_are_named_before_any_value_is_read(
    folder: Path, tmp_path: Path, reads: set[str]
) -> None:
    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.replace("2.mlp.up_proj.w", "2.mlp.upp_proj.w"): tensors[name] for name in tensors
        }

    _rewrite(folder, tmp_path, rename)
    with pytest.raises(
        UsageError,
        match=r"does not hold the tensors of its model; "
        r"missing: model.layers.2.mlp.up_proj.weight; extra: model.layers.2.mlp.upp_proj.weight$",
    ):
        load_stage(tmp_path, 0, PLAN)
    assert reads == set()


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_missing_expert_is_named_by_its_parameter(folder: Path, tmp_path: Path) -> None:
    _rewrite(folder, tmp_path, _without("model.layers.1.block_sparse_moe.experts.2.w3.weight"))
    with pytest.raises(UsageError, match=r"missing: model.layers.1.mlp.experts.gate_up_proj"):
        load_stage(tmp_path, 0, PLAN)


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_too_few_experts_are_a_wrong_shape(folder: Path, tmp_path: Path) -> None:
    lost = [f"model.layers.1.block_sparse_moe.experts.3.w{number}.weight" for number in (1, 2, 3)]
    _rewrite(folder, tmp_path, _without(*lost))
    with pytest.raises(UsageError, match=r"has the shape \[3, .*, the model needs \[4, "):
        load_stage(tmp_path, 0, PLAN)


def test_tensor_of_another_shape_is_named(folder: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"model.norm.weight": tensors["model.norm.weight"][:30].clone()}

    _rewrite(folder, tmp_path, cut)
    with pytest.raises(
        UsageError, match=r"model.norm.weight has the shape \[30\], the model needs \[32\]"
    ):
        load_stage(tmp_path, 0, PLAN)


def test_stored_frequencies_are_no_extra_tensors(folder: Path, tmp_path: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _rewrite(folder, tmp_path, lambda tensors: tensors | frequencies)
    state = load_stage(tmp_path, 0, PLAN).state_dict()
    assert state.keys() == load_stage(folder, 0, PLAN).state_dict().keys()


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UsageError, match="needs safetensors, these weights are pickled"):
        load_stage(tmp_path, 0, PLAN)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="4 layers cannot be divided over 5 pipeline stages"):
        StagePlan.balanced(4, 5)


def test_plan_for_another_number_of_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="planned for 4 layers, the model has 2"):
        cut_stage(build_model("llama"), PLAN, 0)


def test_loss_of_a_router_is_refused() -> None:
    with pytest.raises(UsageError, match="output_router_logits"):
        cut_stage(build_model("mixtral", num_hidden_layers=4), PLAN, 0)


def _filled_shards(folder: Path, mesh: DeviceMesh) -> tuple[nn.Module, set[str]]:
    """A stage sharded while it is empty, and the tensors it read."""
    with _reads_noted() as names, open_weights(str(folder), dtype="float32") as weights:
        stage = cut_stage(weights.empty_model("eager"), PLAN, 1)
        body: Any = stage.model
        for layer in body.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(stage, mesh=mesh)
        weights.fill(stage)
        return stage, names


def _unequal_shards(
    folder: Path, mesh: DeviceMesh, change: Callable[[dict[str, Any]], None]
) -> list[str]:
    stage, _ = _filled_shards(folder, mesh)
    expected = load_stage(folder, 1, PLAN).state_dict()
    state = stage.state_dict()
    change(state)
    assert {type(value) for value in state.values()} == {DTensor}
    assert state.keys() == expected.keys()
    return [name for name in expected if not state[name].full_tensor().equal(expected[name])]


@pytest.mark.parametrize("folder", ["llama", "mixtral"], indirect=True)
@pytest.mark.world(dp=2)
def test_stage_that_is_sharded_while_empty_is_filled_shard_by_shard(
    mesh: DeviceMesh, folder: Path
) -> None:
    assert _unequal_shards(folder, mesh, lambda state: None) == []
    assert _filled_shards(folder, mesh)[1] == _stored_names(folder.name, 1)


@pytest.mark.world(dp=2)
def test_shards_of_the_wrong_rank_are_detected(mesh: DeviceMesh, folder: Path) -> None:
    def swap(state: dict[str, Any]) -> None:
        local = state["model.layers.1.mlp.up_proj.weight"].to_local()
        other = torch.empty_like(local)
        peer = 1 - mesh.get_local_rank()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, local.clone(), peer), dist.P2POp(dist.irecv, other, peer)]
        ):
            work.wait()
        local.copy_(other)

    assert _unequal_shards(folder, mesh, swap) == ["model.layers.1.mlp.up_proj.weight"]


def test_sliced_read_reads_only_the_slice(folder: Path) -> None:
    with open_weights(str(folder), dtype="float32") as weights:
        part = weights.read("model.layers.0.mlp.up_proj.weight", (5, 32), (10, 0))
        whole = weights.read("model.layers.0.mlp.up_proj.weight", (48, 32), (0, 0))
    assert part.equal(whole[10:15])
    assert not part.equal(whole[9:14])


def test_rotary_tables_of_a_stage_are_computed(folder: Path) -> None:
    stage: Any = load_stage(folder, 1, PLAN)
    # 10000 ** (-2 i / 8) of a head of 8 features.
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(stage.model.rotary_emb.inv_freq, expected)
