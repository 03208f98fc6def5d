"""Runs that are saved on some ranks and resumed on others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from assay.errors import MachineError
from assay.launch import Rank, World, call
from assay.parallel.checkpoints import load_checkpoint, save_checkpoint
from assay.parallel.pipeline import Pipeline
from assay.progress import Progress
from packages.core.tests.subsystem.parallel.divided_models import load_divided
from packages.core.tests.subsystem.parallel.pipeline_parallel.pipeline_runs import (
    Case,
    train_pipeline,
)
from packages.core.tests.subsystem.parallel.training_steps import (
    Record,
    build_optimizer,
    disagreements,
    named_values,
    train_replicas,
    updates_since,
)

# A pipeline has no tied ends.
ARCHITECTURES = ("llama", "granite-untied", "mixtral")


def _train_and_save(folders: tuple[Path, Path], _: Progress, rank: Rank) -> Record:
    """Two steps on this world's ranks, then a checkpoint."""
    folder, target = folders
    torch.set_num_threads(1)
    record = Record()
    model = load_divided(folder, rank.mesh)
    optimizer = build_optimizer(model.parameters())
    _train(rank.mesh, model, optimizer, range(2), record)
    save_checkpoint(target, model, optimizer, {"losses": record.losses, "norms": record.norms})
    return record


def _train(
    mesh: DeviceMesh,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    record: Record,
) -> None:
    if "dp" in (mesh.mesh_dim_names or ()):
        train_replicas(model, optimizer, mesh["dp"], steps, record)
        return
    pipeline = Pipeline(model, mesh)
    train_pipeline(pipeline, [*model.named_parameters()], optimizer, mesh, steps, record)


@pytest.fixture(scope="session")
def checkpoints(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Checkpoints of two steps, by architecture and mesh, made in worlds of their own."""
    made: dict[tuple[str, str], Path] = {}
    worlds = {"dp4": {"dp": 4}, "pp2": {"pp": 2}}

    def make(architecture: str, mesh: str) -> Path:
        if (architecture, mesh) not in made:
            target = tmp_path_factory.mktemp(f"{architecture}-{mesh}")
            call(_train_and_save, (folders(architecture), target), world=World(worlds[mesh]))
            made[architecture, mesh] = target
        return made[architecture, mesh]

    return make


@pytest.fixture
def checkpoint(
    request: pytest.FixtureRequest, checkpoints: Callable[[str, str], Path]
) -> tuple[str, Path]:
    architecture, mesh = request.param
    return architecture, checkpoints(architecture, mesh)


@pytest.fixture
def uninterrupted(checkpoint: tuple[str, Path], cases: Callable[[str], Case]) -> Record:
    """Three steps on one process; gradients are not compared."""
    return replace(cases(checkpoint[0]).expected, gradients={})


def _resumed(
    mesh: DeviceMesh,
    folder: Path,
    checkpoint: Path,
    change: Callable[[torch.optim.Optimizer], object] = lambda optimizer: None,
) -> Record:
    model = load_divided(folder, mesh)
    optimizer = build_optimizer(model.parameters())
    before = named_values(model.named_parameters())
    extra = load_checkpoint(
        checkpoint, model, optimizer, {"losses": [0.0, 0.0], "norms": [0.0, 0.0]}
    )
    change(optimizer)
    record = Record(losses=extra["losses"], norms=extra["norms"])
    _train(mesh, model, optimizer, range(2, 3), record)
    record.gradients = {}
    record.updates = updates_since(before, model.named_parameters())
    return record


def _differences(actual: Record, expected: Record) -> list[str]:
    return [text for text in disagreements(actual, expected) if "nothing expected" not in text]


FOUR_TO_TWO = [("llama", "dp4"), ("granite-untied", "dp4"), ("mixtral", "dp4")]


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", FOUR_TO_TWO, indirect=True, ids=ARCHITECTURES)
@pytest.mark.world(dp=2)
def test_run_saved_by_four_ranks_resumes_on_two(
    mesh: DeviceMesh, checkpoint: tuple[str, Path], uninterrupted: Record, folders_of: Path
) -> None:
    assert _differences(_resumed(mesh, folders_of, checkpoint[1]), uninterrupted) == []


@pytest.mark.parametrize("checkpoint", FOUR_TO_TWO[:2], indirect=True, ids=ARCHITECTURES[:2])
@pytest.mark.world(pp=2)
def test_run_saved_by_shards_resumes_in_stages(
    mesh: DeviceMesh, checkpoint: tuple[str, Path], uninterrupted: Record, folders_of: Path
) -> None:
    assert _differences(_resumed(mesh, folders_of, checkpoint[1]), uninterrupted) == []


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", [("granite-untied", "pp2")], indirect=True, ids=["granite"])
@pytest.mark.world(dp=4)
def test_run_saved_by_stages_resumes_on_four_ranks(
    mesh: DeviceMesh, checkpoint: tuple[str, Path], uninterrupted: Record, folders_of: Path
) -> None:
    assert _differences(_resumed(mesh, folders_of, checkpoint[1]), uninterrupted) == []


@pytest.fixture
def folders_of(checkpoint: tuple[str, Path], folders: Callable[[str], Path]) -> Path:
    return folders(checkpoint[0])


@pytest.mark.parametrize("checkpoint", FOUR_TO_TWO[:1], indirect=True, ids=["llama"])
@pytest.mark.world(dp=2)
def test_lost_moments_are_detected(
    mesh: DeviceMesh, checkpoint: tuple[str, Path], uninterrupted: Record, folders_of: Path
) -> None:
    def forget(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    found = _differences(_resumed(mesh, folders_of, checkpoint[1], forget), uninterrupted)
    assert "updates of model.layers.0.mlp.up_proj.weight" in found
    assert "loss of step 2" not in found


@pytest.mark.parametrize("checkpoint", FOUR_TO_TWO[:1], indirect=True, ids=["llama"])
@pytest.mark.world(pp=2)
def test_tensor_missing_in_a_checkpoint_is_named(
    mesh: DeviceMesh, checkpoint: tuple[str, Path], folders_of: Path
) -> None:
    stage = load_divided(folders_of, mesh)
    stage.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(MachineError, match=r"Missing key in checkpoint state_dict: .*scale"):
        load_checkpoint(checkpoint[1], stage, build_optimizer(stage.parameters()), {})


@pytest.mark.world(dp=1)
def test_folder_without_a_checkpoint_is_refused(mesh: DeviceMesh, folder: Path) -> None:
    del mesh
    model = nn.Linear(1, 1)
    with pytest.raises(MachineError, match="cannot be loaded"):
        load_checkpoint(folder, model, build_optimizer(model.parameters()), {})
