"""`assay.check_load`."""

from typing import TYPE_CHECKING, Annotated

from assay.api import options
from assay.api.command_line import command_line
from assay.api.options import Option

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def check_load(
    model: options.Model,
    *,
    run: Annotated[
        str | None, Option("DEVICE/DTYPE; default: cpu, in the dtype of the files.", "RUN")
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that a loaded model holds what its files say.

    Look for every tensor of the weight files in the loaded model. Load a second time under another
    seed. Follow which keys of config.json are read. Try the tokenizer and the chat template.

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
