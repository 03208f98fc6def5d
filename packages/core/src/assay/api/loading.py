"""`assay.check_load`."""

from pathlib import Path
from typing import TYPE_CHECKING

from assay.api.command_line import command_line

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def check_load(
    model: str,
    *,
    run: str | None = None,
    trust_remote_code: bool = False,
    output: str | Path | None = None,
) -> "CheckedVerdict":
    """Is what is in memory, once `model` is loaded, what its files say?

    Reads every tensor of the weight files once more, raw, and looks for it in the loaded model; loads
    a second time under another seed; follows which keys of config.json are read; tries tokenizer and
    chat template.

    model: a folder, a hub name, or micro:RECIPE.
    run: where it is loaded, as DEVICE/DTYPE, such as "cuda/bfloat16"; by default on the host, in the
        dtype that the files have.

    Returns: the verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.
    Raises: UsageError for what cannot be loaded, MachineError for what this machine lacks.
    """
    arguments = dict(locals())
    from assay.load.check import check_load as run_check
    from assay.load.worker import LoadRequest
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder, open_progress

    folder = RunFolder.create("check load", output).path
    request = LoadRequest(
        model=str(model), run=run, remote_code=remote_code_of(trusted=trust_remote_code)
    )
    with open_progress() as progress:
        run_check(request, folder, progress, command_line(check_load, arguments))
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return CheckedVerdict.publish(folder)
