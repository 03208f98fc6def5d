"""Whole models on several ranks against one process: loss, gradients, norm, updated weights.

Every model here has 4 query and 2 key/value heads: on 4 ranks, two of them hold the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from assay.devices.base import Device
from assay.errors import UsageError
from assay.parallel import tensor_parallel
from assay.parallel.pipeline import cut_stage
from assay.parallel.rank_boundaries import HeadsError
from assay.parallel.tensor_parallel import VocabularyParallelEmbedding, apply_tensor_parallel
from packages.core.tests.subsystem.parallel.judging import differing, plain
from packages.core.tests.subsystem.parallel.tiny_models import (
    ARCHITECTURES,
    batch,
    build_model,
)
from packages.core.tests.subsystem.parallel.training_runs import (
    Oracle,
    Results,
    differing_after_training,
    train,
    train_whole,
)


def compare(
    mesh: DeviceMesh, device: Device, oracle: Oracle, model: nn.Module, fault: str | None = None
) -> list[str]:
    def divide(model: nn.Module) -> None:
        if fault:
            FAULTS[fault](model, mesh)
        apply_tensor_parallel(model, mesh["tp"])

    return differing_after_training(oracle, model, device.torch_device, divide)


@pytest.mark.parametrize(
    ("architecture", "num_ranks"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.world(tp=2)) for name in ARCHITECTURES),
        *(pytest.param(name, 4, marks=pytest.mark.world(tp=4)) for name in ARCHITECTURES),
    ],
)
def test_model_trains_on_several_ranks_as_on_one(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str, num_ranks: int
) -> None:
    assert compare(mesh, device, oracle, build_model(architecture)) == []


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "options"),
    [
        pytest.param(architecture, n, options, marks=pytest.mark.world(tp=n), id=name)
        for name, architecture, n, options in (
            ("sdpa", "llama", 2, {"attn_implementation": "sdpa"}),
            ("batched-experts", "mixtral", 2, {"experts_implementation": "batched_mm"}),
            ("uneven", "llama", 2, {"vocab_size": 65, "intermediate_size": 49}),
            ("untied", "qwen3", 2, {"tie_word_embeddings": False}),
            ("no-groups", "phi3", 2, {"num_key_value_heads": 4}),
            ("one-group", "qwen3", 2, {"num_key_value_heads": 1}),
            ("rank-between-groups", "qwen3", 3, {"num_attention_heads": 6}),
            ("fused-between-groups", "phi3", 3, {"num_attention_heads": 6, "hidden_size": 48}),
        )
    ],
)
def test_variant_of_a_model_trains_as_on_one_rank(
    mesh: DeviceMesh, device: Device, architecture: str, num_ranks: int, options: dict[str, Any]
) -> None:
    oracle = train_whole(partial(build_model, architecture, **options), device.torch_device)
    assert compare(mesh, device, oracle, build_model(architecture, **options)) == []


# What transformers uses by default has no float64 on the host: the oracle's experts are eager.
@pytest.mark.world(tp=2)
@pytest.mark.parametrize("architecture", ["mixtral"])
def test_experts_that_are_multiplied_in_groups_train_as_one_by_one(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str
) -> None:
    model = build_model(architecture, experts_implementation="grouped_mm")
    assert compare(mesh, device, oracle, model) == []


@pytest.mark.world(dp=2, tp=2)
@pytest.mark.parametrize("architecture", ["granite", "mixtral", "phi3"])
def test_divided_model_is_sharded_by_fsdp_too(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str
) -> None:
    def divide(model: nn.Module) -> None:
        apply_tensor_parallel(model, mesh["tp"])
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    model = build_model(architecture)
    assert differing_after_training(oracle, model, device.torch_device, divide) == []


def train_tensors(model: nn.Module, device: str) -> Results:
    """Without loss and norm: how exact a single number comes out in bfloat16 is luck."""
    return {name: value for name, value in train(model, device).items() if value.dim()}


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("architecture", "fault"),
    [
        ("llama", None),
        ("granite", None),
        ("qwen3", None),
        ("phi3", None),
        ("llama", "inputs get no summed gradient"),
    ],
)
def test_bfloat16_model_is_as_far_from_float64_on_several_ranks_as_on_one(
    mesh: DeviceMesh, device: Device, architecture: str, fault: str | None
) -> None:
    # Not for mixtures of experts: a rounding may send a token to another expert.
    where = device.torch_device
    exact = train_tensors(build_model(architecture).bfloat16().double(), "cpu")
    noise = train_tensors(build_model(architecture).to(where, torch.bfloat16), where)
    model = build_model(architecture).to(where, torch.bfloat16)
    apply_tensor_parallel(model, mesh["tp"])
    if fault:
        FAULTS[fault](model, mesh)
    found = differing(train_tensors(model, where), noise, exact)
    assert ("gradient 0 model.layers.0.mlp.up_proj.weight" in found) == bool(fault)
    assert fault or found == []


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.world(tp=2)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_recomputed_activations_change_nothing(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str
) -> None:
    model: Any = build_model(architecture)
    model.gradient_checkpointing_enable()
    assert compare(mesh, device, oracle, model) == []


def generate(model: nn.Module, device: str) -> Tensor:
    """Tokens, and the logits of each, decoded with a cache."""
    generating: Any = model.eval()
    prompt = batch(0)["input_ids"][:1, :9].to(device)
    generated = generating.generate(
        prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    return torch.cat([generated.sequences[0, 9:, None].float(), torch.cat(generated.logits)], 1)


@pytest.mark.world(tp=4)
@pytest.mark.parametrize(
    ("architecture", "fault"),
    [("llama", None), ("phi3", None), ("qwen3", "outputs are not summed")],
)
def test_divided_model_generates_from_its_cache(
    mesh: DeviceMesh, device: Device, architecture: str, fault: str | None
) -> None:
    where = device.torch_device
    noise = {"logits": plain(generate(build_model(architecture).to(where), where))}
    exact = {"logits": plain(generate(build_model(architecture).double(), "cpu"))}
    model = build_model(architecture).to(where)
    if fault:
        FAULTS[fault](model, mesh)
    apply_tensor_parallel(model, mesh["tp"])
    found = differing({"logits": plain(generate(model, where))}, noise, exact)
    assert found == (["logits"] if fault else [])


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("architecture", "fault"),
    [("granite-untied", None), ("phi3", None), ("llama", "outputs are not summed")],
)
def test_stages_of_a_pipeline_are_divided_too(
    mesh: DeviceMesh, device: Device, architecture: str, fault: str | None
) -> None:
    where = device.torch_device
    ids = batch(0)["input_ids"][:1, :9]
    noise = {"logits": plain(build_model(architecture).to(where)(ids.to(where)).logits)}
    exact = {"logits": plain(build_model(architecture).double()(ids).logits)}
    values = ids.to(where)
    for number in range(2):
        stage = cut_stage(build_model(architecture), 2, number).to(where)
        apply_tensor_parallel(stage, mesh["tp"])
        if fault:
            FAULTS[fault](stage, mesh)
        values = stage(values)
    assert differing({"logits": plain(values)}, noise, exact) == (["logits"] if fault else [])


@pytest.mark.world(tp=2)
def test_whole_states_are_read_and_written_by_their_names(mesh: DeviceMesh) -> None:
    whole = build_model("phi3").state_dict()
    divided = build_model("phi3")
    apply_tensor_parallel(divided, mesh["tp"])
    options = StateDictOptions(full_state_dict=True)
    for parameter in divided.parameters():
        with torch.no_grad():
            parameter.mul_(2)
    changed: dict[str, Any] = get_model_state_dict(divided, options=options)
    assert changed.keys() == whole.keys()
    assert [name for name, value in whole.items() if not changed[name].equal(2 * value)] == []
    set_model_state_dict(divided, dict(whole), options=options)
    after: dict[str, Any] = get_model_state_dict(divided, options=options)
    assert [name for name, value in whole.items() if not after[name].equal(value)] == []


def keep_norms_of_heads(_model: nn.Module, _mesh: DeviceMesh) -> None:
    """Each rank's gradient of q_norm and k_norm is of its own heads only."""
    setattr(tensor_parallel, "replace_forward_of", lambda *_: None)  # noqa: B010 - mypy


def keep_gradients(_model: nn.Module, _mesh: DeviceMesh) -> None:
    setattr(tensor_parallel, "sum_gradients", lambda whole, _: whole)  # noqa: B010 - mypy


def keep_outputs(_model: nn.Module, _mesh: DeviceMesh) -> None:
    setattr(tensor_parallel, "sum_over_ranks", lambda summand, _: summand)  # noqa: B010 - mypy


def change_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """One rank starts with another row."""
    if mesh["tp"].get_local_rank() == 1:
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.down_proj.weight")[0] += 0.01


def change_norms(model: nn.Module, mesh: DeviceMesh) -> None:
    """One rank starts with another norm: a replica that differs."""
    if mesh["tp"].get_local_rank() == 1:
        with torch.no_grad():
            model.get_parameter("model.norm.weight")[0] += 0.01


FAULTS: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "norms of heads get no sum": keep_norms_of_heads,
    "inputs get no summed gradient": keep_gradients,
    "outputs are not summed": keep_outputs,
    "a rank has other rows": change_rows,
    "a replica differs": change_norms,
}


@pytest.mark.world(tp=2)
@pytest.mark.parametrize(
    ("architecture", "fault", "found"),
    [
        ("qwen3", "norms of heads get no sum", "gradient 0 model.layers.1.self_attn.q_norm.weight"),
        ("qwen3", "norms of heads get no sum", "gradient 0 model.layers.1.self_attn.k_norm.weight"),
        ("llama", "inputs get no summed gradient", "gradient 0 model.layers.0.mlp.up_proj.weight"),
        ("mixtral", "inputs get no summed gradient", "gradient 0 model.layers.1.mlp.gate.weight"),
        ("phi3", "outputs are not summed", "loss 0"),
        ("mistral", "a rank has other rows", "loss 0"),
        ("llama", "a replica differs", "gradient 0 model.norm.weight"),
    ],
)
def test_broken_model_is_found(
    mesh: DeviceMesh, device: Device, oracle: Oracle, architecture: str, fault: str, found: str
) -> None:
    assert found in compare(mesh, device, oracle, build_model(architecture), fault)


@pytest.mark.world(tp=2)
def test_tied_weights_stay_one_parameter(mesh: DeviceMesh) -> None:
    model = build_model("granite")
    apply_tensor_parallel(model, mesh["tp"])
    head = model.get_parameter("lm_head.weight")
    assert model.get_parameter("model.embed_tokens.weight") is head
    assert isinstance(model.get_submodule("model.embed_tokens"), VocabularyParallelEmbedding)


@pytest.mark.world(tp=2)
def test_rank_keeps_the_memory_of_its_part_only(mesh: DeviceMesh) -> None:
    model = build_model("llama")
    apply_tensor_parallel(model, mesh["tp"])
    # 64 tokens, 32 features, float32, on 2 ranks.
    embedding: Any = model.get_parameter("model.embed_tokens.weight")
    assert embedding.to_local().untyped_storage().nbytes() == 64 * 32 * 4 // 2


@pytest.mark.world(tp=3)
def test_heads_that_do_not_divide_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(HeadsError) as caught:
        apply_tensor_parallel(build_model("llama"), mesh["tp"])
    assert str(caught.value) == (
        "4 query heads cannot be distributed evenly over 3 tensor-parallel ranks: "
        "4 is not a multiple of 3"
    )


@pytest.mark.world(dp=2, tp=1)
def test_unknown_parts_and_meshes_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UsageError, match="needs a mesh of one axis, not of 2"):
        apply_tensor_parallel(build_model("llama"), mesh)
    with pytest.raises(UsageError, match=r"^Sequential has no attention with q_proj"):
        apply_tensor_parallel(nn.Sequential(nn.Linear(2, 2)), mesh["tp"])
    model = build_model("qwen3")
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.register_parameter("sinks", nn.Parameter(torch.zeros(4)))
    with pytest.raises(UsageError) as caught:
        apply_tensor_parallel(model, mesh["tp"])
    assert str(caught.value) == (
        "model.layers.1.self_attn.sinks has shape (4,): what it would be on one tensor-parallel "
        "rank is not known"
    )
