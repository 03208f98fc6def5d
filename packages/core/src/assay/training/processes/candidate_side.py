"""The candidate's trainer and its initial state, in one process or on one rank."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import count_parameters
from assay.models.load import choose_threads
from assay.plugins import load_object
from assay.runs import Progress
from assay.sites import unwrapped_path
from assay.training.batches import with_first_labels
from assay.training.processes.free_run import run_freely
from assay.training.processes.golden import Batches, plan_batches
from assay.training.processes.requests import TrainCheck, UserCodeReport
from assay.training.processes.trainer_report import FreeRun
from assay.training.protocol import PACKED
from assay.training.replay.conditions import comparable
from assay.training.replay.rank_scope import RankScope
from assay.training.shapes import OF_NAMED_PIPELINES
from assay.training.state.files import read_golden_state
from assay.training.state.generators import generator_states
from assay.training.state.sharding import PartialSums
from assay.training.state.states import State, collect_state, differing_parameters
from assay.training.trainers.registry import (
    OpenedTrainer,
    open_trainer,
    pipeline_shapes_of,
    stated_plan_of,
    try_trainer,
)


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state before the first step."""

    golden: State
    """The part of the golden's state that this process has."""
    own: State
    absent: list[str]
    """Parameters and buffers of the model that this process does not have."""
    different: list[str]
    """Parameters and buffers, but for an adapter's, that differ from the golden's."""


class CandidateSide:
    """Opens trainers of a candidate, and trains them freely."""

    def __init__(self, request: TrainCheck, rank: Rank | None) -> None:
        self._request, self._rank = request, rank
        self.run = parse_run(request.candidate)
        self.device = open_run(self.run) if rank is None else rank.device
        self.plan = request.options.plan(
            request.candidate if rank is None else f"{rank.device.name}/{self.run.dtype}",
            request.setup,
            request.mesh,
            request.features,
        )
        self.golden = request.golden
        # Comes before any setup function, which may choose another number for all later trainers.
        choose_threads(count_parameters(request.options.model))

    @cached_property
    def batches(self) -> Batches:
        """Plan the batches of all steps."""
        batches = plan_batches(self._request.options)
        if PACKED not in self.plan.features:
            return batches
        return [[with_first_labels(one) for one in batch] for batch in batches]

    @property
    def num_free_steps(self) -> int:
        """Count the steps of `train_freely`, including those resumed from the checkpoint."""
        return 2 * len(self.batches) - self._request.options.resume_at

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this process on the mesh."""
        if self._rank is None:
            return {}
        return {axis: self._rank.mesh.get_local_rank(axis) for axis in self._rank.axes}

    def open(self) -> OpenedTrainer:
        """Open a fresh trainer of the candidate."""
        return open_trainer(self._request.trainer, self.plan)

    def begin(self, opened: OpenedTrainer) -> InitialState:
        """Return the initial state: the candidate's own weights, with the reference's adapter.

        Random initial values of an adapter depend on the dtype.
        """
        complete = read_golden_state(self.golden, 0)
        golden = self.own_part(opened, complete)
        own = collect_state(opened.trainer, self.device.torch_device)["model"]
        drawn = {name: value for name, value in golden["model"].items() if ".lora_" in name}
        absent = sorted(complete["model"].keys() - golden["model"].keys())
        differing = differing_parameters(golden, opened.trainer.model)
        different = [name for name in differing if ".lora_" not in name]
        return InitialState(golden, golden | {"model": own | drawn}, absent, different)

    def train_freely(self, opened: OpenedTrainer, begin: InitialState) -> FreeRun:
        """Train every step, with a checkpoint in the middle, and once more from the checkpoint."""
        start = begin.own
        if self._rank is not None:  # each rank has its own generator states
            start = start | {"generators": generator_states(self.device.torch_device)}
        end = read_golden_state(self.golden, len(self.batches))
        with comparable(self.run.dtype, self.device):
            return run_freely(
                opened,
                self.open,
                self.batches,
                start,
                end,
                self._request,
                self.device.torch_device,
            )

    def own_part(self, opened: OpenedTrainer, state: State) -> State:
        """Return the part of a state that this process has."""
        scope = self.rank_scope(opened)
        return state if scope is None else scope.own_part(state)

    def rank_scope(self, opened: OpenedTrainer) -> RankScope | None:
        """Return the scope of this rank; None for a single process."""
        if self._rank is None:
            return None
        axes, mesh, traits = self._rank.axes, self._rank.mesh, opened.traits
        over_ranks = PartialSums(mesh.get_group("dp")) if axes.get("dp", 1) > 1 else None
        reduces = "reduce" not in opened.invisible_phases
        held = frozenset(unwrapped_path(path) for path, _ in opened.trainer.model.named_modules())
        return RankScope(
            over_ranks if reduces else None,
            over_ranks if not reduces else None,
            traits.layout,
            held if traits.partial_modules else None,
            traits.partial_modules,
        )


def load_user_code(request: TrainCheck, _progress: Progress) -> UserCodeReport:
    """Import the user's code, so that a typo costs no reference run.

    Raises: UsageError for code that a candidate could not run.
    """
    shapes, stated = OF_NAMED_PIPELINES, {}
    if request.trainer is not None:
        try_trainer(request.trainer, prod(request.mesh.values()))
        shapes, stated = pipeline_shapes_of(request.trainer), stated_plan_of(request.trainer)
    if request.setup is not None:
        load_object(request.setup)
    return UserCodeReport(pipeline_shapes=shapes, stated_plan=stated)
