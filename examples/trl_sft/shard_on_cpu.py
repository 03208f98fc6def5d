"""train.py under FSDP where there is no accelerator: accelerate 1.15 shards on accelerators only.

    accelerate launch --num_processes 2 --use_fsdp shard_on_cpu.py --model FOLDER --output runs/sft

accelerate is made to take the CPU's ranks for those of an accelerator; what shards, trains and saves
is its own code and TRL's.
"""

import runpy
from pathlib import Path
from typing import Any

from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState

_begin = PartialState.__init__


def begin(state: PartialState, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
    """As accelerate begins, but for the kind of its ranks."""
    _begin(state, *arguments, **options)
    if state.distributed_type is DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = begin
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
    if (kind := AcceleratorState().distributed_type) is not DistributedType.FSDP:
        raise SystemExit(f"this was to be FSDP, and accelerate trained with {kind}")
