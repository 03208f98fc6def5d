"""The self-test of an installation: a check that passes, and the same with a planted fault."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from assay.api.checks import check_generate
from assay.errors import MachineError
from assay.testing.marks import REQUIRE_HARDWARE, hardware_policy

if TYPE_CHECKING:
    from torch import nn

    from assay.api.verdict import CheckedVerdict

PLANTED_MODULE = "model.layers.1.mlp.down_proj"


def plant(model: "nn.Module") -> None:
    """Scale the weight of one projection by 1.02, in place."""
    model.get_submodule(PLANTED_MODULE).get_parameter("weight").data.mul_(1.02)


def run_self_test(candidate: str, max_new_tokens: int, folder: Path) -> Iterator["CheckedVerdict"]:
    """Check micro:llama against the host, then once more with the planted fault.

    candidate: a RUN.
    folder: gets the runs `clean` and `planted`.
    """
    check = partial(
        check_generate, "micro:llama", candidate=candidate, max_new_tokens=max_new_tokens
    )
    yield check(reference="cpu/float32", output=folder / "clean")
    yield check(
        golden=folder / "clean" / "golden",
        candidate_setup=f"{__file__}:{plant.__name__}",
        output=folder / "planted",
    )


def best_run(otherwise: str, timeout_seconds: float) -> str:
    """Return the first accelerator of this machine in bfloat16, or `otherwise` if it has none.

    Raises: MachineError if it has none, and ASSAY_REQUIRE_HARDWARE=1 promises one; UsageError for
        another value of that variable than 0 and 1.
    """
    from assay.devices.detection import list_devices

    policy = hardware_policy(os.environ)
    for line in list_devices(timeout_seconds):
        if line.status == "present" and line.device not in ("cpu", "sim"):
            return f"{line.device}/bfloat16"
    if policy == "fail":
        raise MachineError(
            f"{REQUIRE_HARDWARE}=1, but no accelerator can be used here; `assay devices` says what is missing"
        )
    return otherwise
