"""The candidate's trainer, and what it starts from: of one process, or of one rank."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import estimate_size
from assay.models.size_policy import choose_threads
from assay.sites import unwrapped_path
from assay.training.batches import with_first_labels
from assay.training.processes.free_run import run_freely
from assay.training.processes.golden import Batches, plan_batches, read_golden_state
from assay.training.processes.requests import CandidateRequest, FreeRun
from assay.training.protocol import PACKED
from assay.training.replay.conditions import comparable
from assay.training.replay.rank_view import RankView
from assay.training.state.generators import generator_states
from assay.training.state.sharding import PartialSums
from assay.training.state.states import State, collect_state
from assay.training.trainers.registry import OpenedTrainer, open_trainer


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state before the first step.

    golden: the part of the golden's that this process has; own: with the candidate's own weights.
    absent: parameters and buffers of the model that this process does not have.
    """

    golden: State
    own: State
    absent: list[str]


class CandidateSide:
    """Opens trainers of a candidate, and trains them freely.

    run, plan, golden, batches: of the request; device: of this process.
    """

    def __init__(self, request: CandidateRequest, rank: Rank | None) -> None:
        self._request, self._rank = request, rank
        self.run = parse_run(request.candidate)
        self.device = open_run(self.run) if rank is None else rank.device
        self.plan = request.options.plan(
            request.candidate if rank is None else f"{rank.device.name}/{self.run.dtype}",
            request.setup,
            request.mesh,
            request.features,
        )
        self.golden = Path(request.golden)
        # Before any setup function, which may choose otherwise: then for all trainers of this run.
        choose_threads(estimate_size(request.options.model).num_parameters)

    @cached_property
    def batches(self) -> Batches:
        """What every step is trained on."""
        batches = plan_batches(self._request.options)
        if PACKED not in self.plan.features:
            return batches
        return [[with_first_labels(one) for one in batch] for batch in batches]

    @property
    def num_free_steps(self) -> int:
        """Return the number of steps of `train_freely`, including those resumed from the checkpoint."""
        return 2 * len(self.batches) - self._request.options.resume_at

    @property
    def coordinates(self) -> dict[str, int]:
        """Of this process on the mesh."""
        if self._rank is None:
            return {}
        return {axis: self._rank.mesh.get_local_rank(axis) for axis in self._rank.axes}

    def open(self) -> OpenedTrainer:
        """A trainer of the candidate, fresh after its `setup`."""
        return open_trainer(self._request.trainer, self.plan)

    def begin(self, opened: OpenedTrainer) -> Beginning:
        """What the first step starts from: the candidate's own weights, the reference's adapter.

        An adapter is drawn at random, in another dtype with other numbers.
        """
        complete = read_golden_state(self.golden, 0)
        golden = self.own_part(opened, complete)
        own = collect_state(opened.trainer, self.device.torch_device)["model"]
        drawn = {name: value for name, value in golden["model"].items() if ".lora_" in name}
        absent = sorted(complete["model"].keys() - golden["model"].keys())
        return Beginning(golden, golden | {"model": own | drawn}, absent)

    def train_freely(self, opened: OpenedTrainer, begin: Beginning) -> FreeRun:
        """Train every step, with a checkpoint in the middle, and once more from the checkpoint."""
        start = begin.own
        if self._rank is not None:  # what ranks draw, they draw from numbers of their own
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
        """The part of a state that this process has."""
        rank_view = self.rank_view(opened)
        return state if rank_view is None else rank_view.own_part(state)

    def rank_view(self, opened: OpenedTrainer) -> RankView | None:
        """What the other ranks have of a step; None for a single process."""
        if self._rank is None:
            return None
        axes, mesh, traits = self._rank.axes, self._rank.mesh, opened.traits
        over_ranks = PartialSums(mesh.get_group("dp")) if axes.get("dp", 1) > 1 else None
        reduces = "reduce" not in opened.invisible_phases
        held = frozenset(unwrapped_path(path) for path, _ in opened.trainer.model.named_modules())
        return RankView(
            over_ranks if reduces else None,
            over_ranks if not reduces else None,
            traits.layout,
            held if traits.partial_modules else None,
            traits.partial_modules,
        )
