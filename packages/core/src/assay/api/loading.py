"""`assay.check_load`."""

from typing import TYPE_CHECKING, Annotated

from assay.api import options
from assay.api.options import Option, command_line, run_and_publish, seconds_of_timeout

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def check_load(
    model: options.Model,
    *,
    run: Annotated[
        str | None, Option("DEVICE/DTYPE; default: cpu, in the dtype of the files.", "RUN")
    ] = None,
    timeout: options.Timeout = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that a loaded model holds what its files say.

    Find every tensor of the weight files in the loaded model. Load again under another seed. Record
    which keys of config.json are read. Test the tokenizer and the chat template.

    Returns: the verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.
    Raises: UsageError for what cannot be loaded, MachineError for what this machine lacks.
    """
    arguments = dict(locals())
    from assay.load import LoadRequest
    from assay.load import check_load as run_check
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder

    time_allowed = seconds_of_timeout(timeout)
    folder = RunFolder.create("check load", output).path
    request = LoadRequest(
        model=str(model), run=run, remote_code=remote_code_of(trusted=trust_remote_code)
    )
    command = command_line(check_load, arguments)
    return run_and_publish(
        lambda folder, progress: run_check(request, folder, progress, command), folder, time_allowed
    )
