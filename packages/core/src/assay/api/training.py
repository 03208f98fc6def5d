"""`assay.check_train`."""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from assay.api.command_line import command_line
from assay.api.train_mode import TrainMode
from assay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from assay.api.verdict import CheckedVerdict


def check_train(  # noqa: PLR0913 - one for each option
    model: str,
    *,
    reference: str,
    candidate: str,
    candidate_trainer: str | None = None,
    candidate_setup: "str | Callable[[nn.Module], nn.Module | None] | None" = None,
    candidate_model: "nn.Module | Callable[[], nn.Module] | None" = None,
    steps: int | None = None,
    resume_at: int | None = None,
    overfit: bool = False,
    overfit_steps: int | None = None,
    learning_rate: float | None = None,
    track: str | None = None,
    micro_batches: int | None = None,
    mesh: str | None = None,
    world: int | None = None,
    cpu_offload: bool = False,
    recompute: bool = False,
    mixed_precision: bool = False,
    loss_scaling: bool = False,
    packed: bool = False,
    compile: bool = False,  # noqa: A002 - as the option is called
    lora: bool = False,
    seed: int = 0,
    limits: str = "training",
    allow_unused: "str | Sequence[str] | None" = None,
    trust_remote_code: bool = False,
    output: str | Path | None = None,
) -> "CheckedVerdict":
    """Does `model` train on the candidate as on the reference?

    The options are those of `assay check train`, whose help describes them; for those that are
    also options of `check_generate`, and for what holds of both, see there.

    candidate_trainer: the name of a trainer, or FILE.py:CLASS.
    mesh: ranks of the candidate by axis, such as "dp=2,tp=2".

    Returns: the verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.
    Raises: UsageError for what cannot be checked, MachineError for what this machine lacks.
    """
    arguments = dict(locals())
    from assay.api.inputs import globs
    from assay.launch.mesh_string import parse_mesh
    from assay.models.candidate_code import candidate_code
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder, open_progress
    from assay.training.check import TrainCheck
    from assay.training.processes.requests import TrainOptions

    mode = TrainMode(steps, resume_at, learning_rate, overfit, overfit_steps, track)
    mode.check_consistency()
    ranks = parse_mesh(mesh) if mesh else {}
    if world is not None and world != prod(ranks.values()):
        if mesh:
            raise UsageError(f"--world {world}: the mesh {mesh} has {prod(ranks.values())} ranks")
        ranks = parse_mesh(f"dp={world}")
    features = {
        "cpu-offload": cpu_offload,
        "recompute": recompute,
        "mixed-precision": mixed_precision,
        "loss-scaling": loss_scaling,
        "packed": packed,
        "compile": compile,
    }
    code = candidate_code(candidate_setup, arguments.pop("candidate_model"), candidate)
    folder = RunFolder.create("check train", output).path
    setup = arguments["candidate_setup"] = code.write(folder)
    check = TrainCheck(
        TrainOptions(
            model=str(model),
            micro_batches=_default_micro_batches(ranks) if micro_batches is None else micro_batches,
            lora=lora,
            seed=seed,
            remote_code=remote_code_of(trusted=trust_remote_code),
        ),
        reference,
        candidate,
        trainer=candidate_trainer,
        setup=setup,
        limits=limits,
        allow_unused=globs(allow_unused),
        mesh=ranks,
        features=tuple(name for name, wanted in features.items() if wanted),
        command=command_line(check_train, arguments),
    )
    with open_progress() as progress:
        mode.run(check, folder, progress)
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return CheckedVerdict.publish(folder)


def _default_micro_batches(ranks: dict[str, int]) -> int:
    """Two, or one for every stage of every rank of dp."""
    return max(2, ranks.get("dp", 1) * ranks.get("pp", 1))
