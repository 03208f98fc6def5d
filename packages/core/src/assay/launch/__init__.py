"""Functions in other processes, alone or as the ranks of a world. Imports no torch.

A call passes through these files, in this order: `calling` pickles it, `process_groups` has the fork
server start a group, `fork_server` forks its leader and its processes, `child_process` runs the function
(on a rank after `process_group`), `calling` waits for all, and `failures` words what went wrong. All
processes end with this one, however it ends.
"""

from assay.launch.calling import (
    RemoteFunction,
    call,
    seconds_left,
    start_ahead,
    time_limit,
    world_of,
)
from assay.launch.failures import (
    ForkServerError,
    ProcessError,
    RankSkipped,
    UnsendableError,
    WorldError,
    WorldHungError,
    WorldSkipped,
)
from assay.launch.first_rank import (
    is_first_rank,
    leave_together,
    on_first_rank,
    require_one_machine,
)
from assay.launch.process_groups import (
    FORK_SERVER,
    end_command,
    find_python,
    interrupt_all,
    own_variables,
    require_candidate_python,
)
from assay.launch.world import Rank, TimeLimits, World, outer_world_size, parse_mesh

__all__ = [
    "FORK_SERVER",
    "ForkServerError",
    "ProcessError",
    "Rank",
    "RankSkipped",
    "RemoteFunction",
    "TimeLimits",
    "UnsendableError",
    "World",
    "WorldError",
    "WorldHungError",
    "WorldSkipped",
    "call",
    "end_command",
    "find_python",
    "interrupt_all",
    "is_first_rank",
    "leave_together",
    "on_first_rank",
    "outer_world_size",
    "own_variables",
    "parse_mesh",
    "require_candidate_python",
    "require_one_machine",
    "seconds_left",
    "start_ahead",
    "time_limit",
    "world_of",
]
