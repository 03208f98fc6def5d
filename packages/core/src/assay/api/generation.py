"""`assay.check_generate`."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from assay.api import options
from assay.api.options import Option, command_line, run_and_publish, seconds_of_timeout
from assay.errors import UsageError
from assay.sites import CheckLevel

if TYPE_CHECKING:
    from torch import nn

    from assay.api.verdict import CheckedVerdict


def check_generate(  # noqa: PLR0913 - one for each option
    model: options.Model,
    *,
    candidate: options.Candidate,
    reference: Annotated[str | None, options.Reference] = None,
    golden: Annotated[
        str | Path | None, Option("A golden captured elsewhere, instead of --reference.", "TRACE")
    ] = None,
    no_verify: Annotated[bool, Option("Do not compare the golden with its hashes.")] = False,
    candidate_setup: Annotated[
        "str | Callable[[nn.Module], nn.Module | None] | None",
        Option("Called with the candidate's model before it runs.", "FILE.py:FUNC"),
    ] = None,
    candidate_model: "nn.Module | Callable[[], nn.Module] | None" = None,
    candidate_option: Annotated[
        Mapping[str, str | int] | None,
        Option(
            "threads=N, attention=NAME, experts=NAME, batch-size=1, compile=1, padding=left.",
            "NAME=VALUE",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        Option("Divide the candidate's heads, features, vocabulary over N ranks.", "tp=N"),
    ] = None,
    prompts: options.Prompts = None,
    prompt_length: options.PromptLength = None,
    batch_size: options.BatchSize = None,
    max_new_tokens: options.MaxNewTokens = None,
    chat: options.Chat = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    generation_config: options.GenerationConfigFile = None,
    level: Annotated[
        CheckLevel, Option("auto runs all levels; others stop early and see less.")
    ] = "auto",
    limits: options.Limits = "noise",
    allow_unused: options.AllowUnused = None,
    seed: options.Seed = None,
    disk: options.Disk = None,
    memory: Annotated[
        str | None,
        Option(
            "Memory for the reference: 8G. If weights do not fit, it widens one module at a time.",
            "SIZE",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Option("Time for both sides: 5m. Fewer tokens are generated where needed.", "TIME"),
    ] = None,
    keep: options.Keep = "full",
    timeout: options.Timeout = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that `model` generates the same on the candidate as on the reference.

    Progress goes to standard error. Each side runs in its own process. The candidate's process does
    not see definitions or patches of this process, only what it imports.

    Each option is described at its parameter. In addition:
    golden: a folder captured by `assay capture`, or the folder of an earlier check that kept its golden;
        its bytes are compared with their recorded hashes, unless `no_verify`.
    candidate_setup: also an importable function; it changes the loaded model or returns another.
    candidate_model: the model under test, or a function that makes it, instead of `model`. It is moved
        to the candidate's device and dtype.
    candidate_option: such as {"attention": "eager"}.
    keep: what stays in the folder of the run, which holds gigabytes for a large model. A given golden
        is never removed.

    Returns: the verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.
    Raises: UsageError for what cannot be checked, MachineError for what this machine lacks.
    """
    arguments = dict(locals())
    from assay.api.inputs import globs, input_options
    from assay.devices.run_string import parse_run
    from assay.generate.check import check_generate as run_check
    from assay.generate.spec import AXES, GenerateCheck
    from assay.launch import parse_mesh
    from assay.models.candidate_code import candidate_code
    from assay.models.remote_code import remote_code_of
    from assay.recording.capturing.budget import parse_size, parse_time
    from assay.runs import RunFolder
    from assay.runs.results import find_golden

    if (reference is None) == (golden is None):
        raise UsageError("give either --reference RUN or --golden TRACE")
    for name, limit in (("--disk", disk), ("--budget", budget)):
        if golden is not None and limit is not None:
            raise UsageError(f"{name} limits the golden of --reference; --golden is there already")
    if budget is not None and level not in ("auto", "modules"):
        raise UsageError("--budget is for --level modules: other levels only generate")
    max_disk, max_memory = (None if one is None else parse_size(one) for one in (disk, memory))
    max_seconds = None if budget is None else parse_time(budget)
    inputs = input_options(
        **{name: arguments[name] for name in signature(input_options).parameters}
    )
    chosen = {name: str(value) for name, value in (candidate_option or {}).items()}
    ranks = parse_mesh(mesh, AXES) if mesh else {}
    candidate_run = parse_run(candidate)
    reference_run = None if reference is None else parse_run(reference)
    time_allowed = seconds_of_timeout(timeout)
    code = candidate_code(candidate_setup, arguments.pop("candidate_model"), candidate)
    golden_folder = None if golden is None else find_golden(Path(golden))
    folder = RunFolder.create("check generate", output).path
    setup = code.write(folder)
    arguments |= {"candidate_setup": setup, "candidate_option": chosen or None}
    check = GenerateCheck(
        model=str(model),
        candidate=candidate_run,
        reference=reference_run,
        golden=golden_folder,
        verify_golden=not no_verify,
        inputs=inputs,
        given=frozenset(inputs.model_fields_set),
        level="modules" if level == "auto" else level,
        setup=setup,
        options=chosen,
        mesh=ranks,
        limits=limits,
        allow_unused=globs(allow_unused),
        keep=keep,
        max_disk=max_disk,
        max_memory=max_memory,
        max_seconds=max_seconds,
        remote_code=remote_code_of(trusted=trust_remote_code),
        command=command_line(check_generate, arguments),
    )
    return run_and_publish(partial(run_check, check), folder, time_allowed)
