"""`assay.check_generate`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from assay.api import options
from assay.api.command_line import command_line
from assay.api.options import Option
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
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that `model` generates the same on the candidate as on the reference.

    Progress goes to standard error. Each side runs in its own process. The candidate's process does
    not see definitions or patches of this process, only what it imports.

    model: a folder, a hub name, or micro:RECIPE.
    candidate: the device and dtype to judge, as DEVICE/DTYPE, such as "cuda/bfloat16".
    reference: the trusted device, such as "cpu/float32"; or `golden`, a folder captured by
        `assay capture` or kept by an earlier check, whose bytes are compared with the hashes that
        were captured with it, unless `no_verify`.
    candidate_setup: FILE.py:FUNC, or a function that can be imported; called with the loaded
        model, which it changes or replaces.
    candidate_model: the model that is judged, or a function that makes it, in place of the one
        that is loaded from `model`. It gets the candidate's device and dtype.
    candidate_option: by name, such as {"attention": "eager"}.
    mesh: ranks over which the candidate's model is divided, such as "tp=2": heads, features and
        vocabulary.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.

    Returns: the verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.
    Raises: UsageError for what cannot be checked, MachineError for what this machine lacks.
    """
    arguments = dict(locals())
    from assay.api.inputs import globs, input_options
    from assay.generate.check import check_generate as run_check
    from assay.generate.processes.ranks import AXES
    from assay.generate.processes.requests import GenerateCheck
    from assay.launch.mesh_string import parse_mesh
    from assay.models.candidate_code import candidate_code
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder, open_progress

    if (reference is None) == (golden is None):
        raise UsageError("give either --reference RUN or --golden TRACE")
    inputs = input_options(
        prompts=prompts,
        prompt_length=prompt_length,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        chat=chat,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        generation_config=generation_config,
        seed=seed,
    )
    chosen = {name: str(value) for name, value in (candidate_option or {}).items()}
    ranks = parse_mesh(mesh, AXES) if mesh else {}
    code = candidate_code(candidate_setup, arguments.pop("candidate_model"), candidate)
    folder = RunFolder.create("check generate", output).path
    setup = code.write(folder)
    arguments |= {"candidate_setup": setup, "candidate_option": chosen or None}
    check = GenerateCheck(
        model=str(model),
        candidate=candidate,
        reference=reference,
        golden=None if golden is None else Path(golden),
        verify_golden=not no_verify,
        inputs=inputs,
        given=frozenset(inputs.model_fields_set),
        level="modules" if level == "auto" else level,
        setup=setup,
        options=chosen,
        mesh=ranks,
        limits=limits,
        allow_unused=globs(allow_unused),
        remote_code=remote_code_of(trusted=trust_remote_code),
        command=command_line(check_generate, arguments),
    )
    with open_progress() as progress:
        run_check(check, folder, progress)
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # imported while the check ran

            return CheckedVerdict.publish(folder)
