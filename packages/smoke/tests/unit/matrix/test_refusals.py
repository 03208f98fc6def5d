"""Tries the rules with the trainers: an outdated rule fails here."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from assay.errors import UsageError
from assay.models.config_files import load_config
from assay.models.sources import local_folder, resolve_model
from assay.parallel.pipeline import MODEL_TYPES, divide_layers
from assay.parallel.rank_boundaries import HeadsError, share_heads
from assay.training.protocol import LOSS_SCALING, PACKED, TrainingPlan
from assay.training.trainers.adapters import adapter_tensors
from assay.training.trainers.parallel import (
    DDPTrainer,
    FSDPTrainer,
    PipelineTrainer,
    TensorParallelTrainer,
)
from assay.training.trainers.reference import ReferenceTrainer
from assay.training.trainers.registry import construct_trainer
from assay_smoke.cases.running import TRAINERS, features_of
from assay_smoke.matrix.rules import (
    FEATURES,
    RULES,
    Batches,
    Case,
    Framework,
    Precision,
    check_compatible,
)
from assay_smoke.trainers.deepspeed.trainer import DeepSpeedTrainer, Zero1Trainer, Zero3Trainer

# Features that a trainer knows and that rules refuse in all cases of its framework.
IN_NO_CASE: dict[Framework, set[str]] = {
    "tensor-parallel": {"cpu-offload", "mixed-precision"},
    "pipeline": {"cpu-offload", "mixed-precision"},
}

FAMILIES = ("llama", "mistral", "gemma2", "mixtral")


def plan(
    *features: str, mesh: dict[str, int] | None = None, model: str = "micro:llama"
) -> TrainingPlan:
    return TrainingPlan(
        model=model,
        run="cpu/float32",
        mesh=mesh or {},
        features=frozenset(features),
        adapter_dropout=0.0,
    )


def config_of(family: str) -> Any:
    with local_folder(resolve_model(f"micro:{family}"), "refuse") as folder:
        return load_config(folder, "refuse")


@contextmanager
def rank_0_of(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of several, whose messages reach nobody."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_spread(trainer: Any) -> bool:
    """Return whether a rank has less than the whole model, or reduces gradients."""
    return (
        trainer.network is not trainer.model
        or hasattr(trainer, "pipeline")
        or any(isinstance(module, FSDPModule) for module in trainer.model.modules())
        or any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    )


def test_one_process_has_no_second_rank() -> None:
    with pytest.raises(UsageError, match="a mesh of dp=2 has 2 ranks, and this world 1"):
        ReferenceTrainer().setup(plan(mesh={"dp": 2}))


@pytest.mark.parametrize(
    ("trainer", "axis", "features"),
    [
        (DDPTrainer(), "dp", []),
        (FSDPTrainer(), "dp", ["cpu-offload"]),
        (TensorParallelTrainer(), "tp", []),
        (PipelineTrainer(), "pp", []),
    ],
    ids=["ddp", "fsdp", "tensor-parallel", "pipeline"],
)
def test_on_one_card_nothing_is_spread(trainer: Any, axis: str, features: list[str]) -> None:
    trainer.setup(plan(*features, mesh={axis: 1}))
    assert not is_spread(trainer)


@pytest.mark.parametrize(
    ("trainer", "axis"),
    [(DDPTrainer(), "dp"), (FSDPTrainer(), "dp"), (TensorParallelTrainer(), "tp")],
    ids=["ddp", "fsdp", "tensor-parallel"],
)
def test_on_two_cards_it_is(trainer: Any, axis: str) -> None:
    with rank_0_of(2):
        trainer.setup(plan(mesh={axis: 2}))
        assert is_spread(trainer)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_cannot_be_shared_out_are_refused(family: str) -> None:
    config = config_of(family)
    heads = config.num_attention_heads, config.num_key_value_heads
    assert heads == (4, 2)
    with pytest.raises(HeadsError, match="4 is not a multiple of 8"):
        share_heads(*heads, 8)
    assert [len(share.query_heads) for share in share_heads(*heads, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_more_stages_than_layers_are_refused(family: str) -> None:
    layers = config_of(family).num_hidden_layers
    with pytest.raises(UsageError, match="4 layers cannot be divided over 8 pipeline stages"):
        divide_layers(layers, 8)
    assert len(divide_layers(layers, 4)) == 4


def test_a_tied_head_is_refused_in_a_pipeline() -> None:
    tied = {family: config_of(family).tie_word_embeddings for family in FAMILIES}
    assert tied == {"llama": False, "mistral": False, "gemma2": True, "mixtral": False}
    assert {family for family, is_tied in tied.items() if not is_tied} <= MODEL_TYPES
    with rank_0_of(2), pytest.raises(UsageError, match="the head is tied"):
        PipelineTrainer().setup(plan(mesh={"pp": 2}, model="micro:gemma2"))


def test_a_scaled_embedding_cannot_be_divided() -> None:
    with rank_0_of(2), pytest.raises(UsageError, match="only a plain Embedding can be divided"):
        TensorParallelTrainer().setup(plan(mesh={"tp": 2}, model="micro:gemma2"))


def unknown_features() -> list[tuple[Framework, str]]:
    """Return frameworks with a feature that a rule refuses because the trainer does not know it."""
    pairs: set[tuple[Any, str]] = {("tensor-parallel", LOSS_SCALING), ("pipeline", LOSS_SCALING)}
    for rule in RULES:
        if rule.shown_by.endswith("::test_what_a_trainer_does_not_know_is_an_error"):
            (axis,) = rule.refuses.keys() - {"framework"}
            asked = FEATURES[axis].trainer_feature if axis in FEATURES else PACKED
            pairs |= {(framework, str(asked)) for framework in rule.refuses["framework"]}
    return sorted(pairs)


# What torch warns of as DeepSpeed is imported.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("framework", "feature"), unknown_features())
def test_what_a_trainer_does_not_know_is_an_error(framework: Framework, feature: str) -> None:
    trainer: Any = construct_trainer(TRAINERS[framework])
    with pytest.raises(UsageError, match=f"does not know the features {feature}"):
        trainer.setup(plan(feature))


@pytest.mark.parametrize("framework", list(TRAINERS))
def test_cases_that_are_not_refused_ask_for_what_the_trainer_knows(framework: Framework) -> None:
    trainer: Any = construct_trainer(TRAINERS[framework])
    asked_for = {
        feature
        for precision, batches in product(get_args(Precision), get_args(Batches))
        for number in range(len(FEATURES) + 1)
        for features in combinations(FEATURES, number)
        for feature in plan_features(framework, precision, batches, frozenset(features))
    }
    assert asked_for == trainer.features - IN_NO_CASE.get(framework, set())


def plan_features(
    framework: Framework, precision: Precision, batches: Batches, features: frozenset[str]
) -> list[str]:
    """Return the features that a case asks its trainer for, none if it is refused."""
    case = Case(
        framework=framework,
        cards=1 if framework == "one-process" else 2,
        precision=precision,
        batches=batches,
        features=features,
    )
    if check_compatible(case) is not None:
        return []
    return [*features_of(case), *(features & {"lora"})]


def test_a_divided_model_is_not_sharded() -> None:
    asked = ("cpu-offload", "mixed-precision")
    for trainer, axis in ((TensorParallelTrainer(), "tp"), (PipelineTrainer(), "pp")):
        with rank_0_of(2):
            trainer.setup(plan(*asked, mesh={axis: 2}))
            units = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
            assert units == []
    with rank_0_of(2):
        sharded = FSDPTrainer()
        sharded.setup(plan(*asked, mesh={"dp": 2}))
        assert sum(isinstance(module, FSDPModule) for module in sharded.model.modules()) == 5


def test_without_lora_there_is_no_adapter() -> None:
    trainer = ReferenceTrainer()
    trainer.setup(plan())
    with pytest.raises(AttributeError, match="peft_config"):
        adapter_tensors(trainer.model)


def test_under_lora_no_whole_model_is_saved(tmp_path: Path) -> None:
    for name, features in (("adapter", ["lora"]), ("whole", [])):
        trainer = ReferenceTrainer()
        trainer.setup(plan(*features))
        trainer.save(tmp_path / name)
    saved = {name: files_in(tmp_path / name / "model") for name in ("adapter", "whole")}
    assert "adapter_model.safetensors" in saved["adapter"]
    assert "model.safetensors" not in saved["adapter"]
    assert "model.safetensors" in saved["whole"]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_only_replicas_have_all_of_the_state() -> None:
    held = {}
    for trainer, axis in (
        (DDPTrainer(), "dp"), (FSDPTrainer(), "dp"), (TensorParallelTrainer(), "tp"),
        (PipelineTrainer(), "pp"),
    ):  # fmt: skip
        with rank_0_of(2):
            trainer.setup(plan(mesh={axis: 2}))
            held[type(trainer)] = sum(num_held(one) for one in trainer.model.parameters())
    whole = held.pop(DDPTrainer)
    reference = ReferenceTrainer()
    reference.setup(plan())
    assert whole == sum(parameter.numel() for parameter in reference.model.parameters())
    assert len(held) == 3
    assert all(0 < part < whole for part in held.values())


def num_held(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel()


# What torch warns of as DeepSpeed is imported, and as it calls a function by its old name.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("trainer", [Zero1Trainer, DeepSpeedTrainer, Zero3Trainer])
def test_every_rank_of_zero_has_a_part_of_the_state(
    trainer: type[DeepSpeedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeepSpeed 0.19 leaves its own function there, which torch.compile cannot trace.
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    with rank_0_of(2):
        divided = trainer()
        divided.setup(plan(mesh={"dp": 2}))
        held = sum(flat.numel() for flat in divided.partitions.flats())
        whole = sum(parameter.numel() for parameter in divided.model.parameters())
        divided.teardown()
    assert held == whole / 2
