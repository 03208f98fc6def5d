"""Worlds of ranks: fresh processes with one process group and a mesh. Imports no torch."""

from assay.launch.errors import (
    RankSkipped,
    UnsendableError,
    WorldError,
    WorldHungError,
    WorldSkipped,
)
from assay.launch.launching import launch_world, start_ahead
from assay.launch.leading import is_first_rank, leave_together, on_first_rank, require_one_machine
from assay.launch.rank import Rank
from assay.launch.sides import answer_on_rank, ask_side
from assay.launch.world import TimeLimits, World, outer_world_size

__all__ = [
    "Rank",
    "RankSkipped",
    "TimeLimits",
    "UnsendableError",
    "World",
    "WorldError",
    "WorldHungError",
    "WorldSkipped",
    "answer_on_rank",
    "ask_side",
    "is_first_rank",
    "launch_world",
    "leave_together",
    "on_first_rank",
    "outer_world_size",
    "require_one_machine",
    "start_ahead",
]
