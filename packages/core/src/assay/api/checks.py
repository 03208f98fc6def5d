"""`assay.check_generate`, `assay.check_train`, `assay.check_load` and `assay.compare`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from assay.api import options
from assay.api.options import (
    Option,
    command_line,
    globs,
    input_options,
    run_and_publish,
    seconds_of_timeout,
)
from assay.errors import UsageError
from assay.sites import CheckLevel, ComparedLevel

if TYPE_CHECKING:
    from torch import nn

    from assay.api.verdict import CheckedVerdict
    from assay.generate.spec import GenerateCheck
    from assay.load import LoadRequest
    from assay.training.reports import TrainCheck, TrainOptions


def check_generate(  # noqa: PLR0913 - one for each option
    model: options.Model,
    *,
    candidate: options.Candidate,
    reference: Annotated[str | None, options.Reference] = None,
    golden: Annotated[
        str | Path | None,
        Option("A golden, or an earlier check's folder, instead of --reference.", "FOLDER"),
    ] = None,
    no_verify: Annotated[bool, Option("Do not compare the golden with its hashes.")] = False,
    candidate_setup: Annotated[
        "str | Callable[[nn.Module], nn.Module | None] | None",
        Option("Call FUNC with the candidate's model before it runs.", "FILE.py:FUNC"),
    ] = None,
    candidate_model: Annotated[
        "str | Path | nn.Module | Callable[[], nn.Module] | None",
        Option("A quantized form of MODEL, which the candidate loads.", "FOLDER|FILE.gguf"),
    ] = None,
    candidate_option: Annotated[
        Mapping[str, str | int] | None,
        Option(
            "threads=N, attention=NAME, experts=NAME, batch-size=1, compile=1, padding=left.",
            "NAME=VALUE",
        ),
    ] = None,
    candidate_python: Annotated[
        str | Path | None,
        Option("Another environment with assay-core, where the candidate runs.", "PATH"),
    ] = None,
    matrix: Annotated[
        Sequence[str],
        Option(
            "Like --candidate-python, for several environments; prints one table of all.", "PATH"
        ),
    ] = (),
    mesh: Annotated[
        str | None,
        Option("Shard the candidate's heads, features and vocabulary over N ranks.", "tp=N"),
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
    seed: options.Seed = None,
    level: Annotated[
        CheckLevel,
        Option("auto runs all levels; others stop early and see less.", group="Judgment"),
    ] = "auto",
    limits: options.Limits = "noise",
    allow_unused: options.AllowUnused = None,
    disk: options.Disk = None,
    memory: Annotated[
        str | None,
        Option(
            "Memory for the reference, such as 8G. If weights do not fit, it widens one module at a time.",
            "SIZE",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Option("Time for both sides, such as 5m. Generates fewer tokens if needed.", "TIME"),
    ] = None,
    keep: options.Keep = "full",
    timeout: options.Timeout = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that `model` generates the same on the candidate as on the reference.

    Progress goes to standard error. Each side runs in its own process. The candidate's process does
    not see definitions or patches of this process, only what it imports.

    Args:
        golden: A folder captured by `assay capture`, or the folder of an earlier check that kept its golden;
            its bytes are compared with their recorded hashes, unless `no_verify`.
        candidate_setup: Also an importable function; it changes the loaded model or returns another.
        candidate_model: The model under test, or a function that makes it, instead of `model`. It is moved
            to the candidate's device and dtype. A folder, GGUF file or hub name is a quantized form of `model`: its
            library loads it, the reference computes with its dequantized weights, and these are compared
            with those of `model`.
        candidate_option: Such as {"attention": "eager"}.
        keep: What stays in the folder of the run, which holds gigabytes for a large model. A given golden
            is never removed.

    Returns:
        The verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.

    Raises:
        UsageError: What cannot be checked.
        MachineError: What this machine lacks.
    """
    arguments = dict(locals())
    from assay.generate.check import check_generate as run_check
    from assay.models.candidate_code import candidate_code
    from assay.models.sources import require_model
    from assay.runs import RunFolder

    require_model(str(model))  # before devices are looked for
    time_allowed = seconds_of_timeout(timeout)
    check = generate_check_of(arguments)
    require_model(check.model)
    in_memory = None
    if not isinstance(candidate_model, (str, Path)):
        in_memory = candidate_model
        del arguments["candidate_model"]
    code = candidate_code(candidate_setup, in_memory, candidate)
    folder = RunFolder.create("check generate", output).path
    arguments["candidate_setup"] = setup = code.write(folder)
    arguments["candidate_option"] = check.options or None
    check = replace(check, setup=setup, command=command_line(check_generate, arguments))
    run: Callable[..., object] = partial(run_check, check)
    if matrix:
        from assay.generate.matrix import check_matrix

        run = partial(check_matrix, check, [*filter(None, map(_interpreter, matrix))])
    return run_and_publish(run, folder, time_allowed)


def generate_check_of(given: Mapping[str, Any]) -> "GenerateCheck":
    """Make the check for arguments of `check_generate`. Its setup is as given. Raises: UsageError."""
    from assay.devices.run_string import parse_run
    from assay.generate.spec import AXES, GenerateCheck
    from assay.launch import parse_mesh
    from assay.models.sources import remote_code_of
    from assay.recording.limits import parse_size, parse_time
    from assay.runs.results import find_golden

    one = _with_defaults(check_generate, given)
    if (one.reference is None) == (one.golden is None):
        raise UsageError("give either --reference RUN or --golden TRACE")
    for name, limit in (("--disk", one.disk), ("--budget", one.budget)):
        if one.golden is not None and limit is not None:
            raise UsageError(f"{name} limits the golden of --reference; --golden is there already")
    if one.matrix and one.candidate_python is not None:
        raise UsageError(
            "--matrix names all environments: give it alone, without --candidate-python"
        )
    if one.budget is not None and one.level not in ("auto", "modules"):
        raise UsageError("--budget is for --level modules: other levels only generate")
    inputs = input_options(
        **{name: getattr(one, name) for name in signature(input_options).parameters}
    )
    is_quantized = isinstance(one.candidate_model, (str, Path))
    return GenerateCheck(
        model=str(one.candidate_model if is_quantized else one.model),
        original=str(one.model) if is_quantized else None,
        candidate=parse_run(one.candidate),
        reference=None if one.reference is None else parse_run(one.reference),
        golden=None if one.golden is None else find_golden(Path(one.golden)),
        verify_golden=not one.no_verify,
        inputs=inputs,
        given=frozenset(inputs.model_fields_set),
        level="modules" if one.level == "auto" else one.level,
        setup=one.candidate_setup,
        python=_interpreter(one.candidate_python),
        options={name: str(value) for name, value in (one.candidate_option or {}).items()},
        mesh=parse_mesh(one.mesh, AXES) if one.mesh else {},
        limits=one.limits,
        allow_unused=globs(one.allow_unused),
        keep=one.keep,
        max_disk=None if one.disk is None else parse_size(one.disk),
        max_memory=None if one.memory is None else parse_size(one.memory),
        max_seconds=None if one.budget is None else parse_time(one.budget),
        remote_code=remote_code_of(trusted=one.trust_remote_code),
    )


def check_train(  # noqa: PLR0913 - one for each option
    model: options.Model,
    *,
    candidate: options.Candidate,
    reference: Annotated[str | None, options.Reference] = None,
    golden: Annotated[
        str | Path | None,
        Option("A golden, or an earlier check's folder, instead of --reference.", "FOLDER"),
    ] = None,
    candidate_trainer: Annotated[
        str | None,
        Option(
            "reference, ddp, fsdp, tensor-parallel, pipeline; default: what fits the mesh.",
            "NAME|FILE.py:CLASS",
        ),
    ] = None,
    candidate_setup: Annotated[
        "str | Callable[[nn.Module], nn.Module | None] | None",
        Option("Call FUNC with the candidate's model before LoRA is added.", "FILE.py:FUNC"),
    ] = None,
    candidate_model: "nn.Module | Callable[[], nn.Module] | None" = None,
    candidate_python: Annotated[
        str | Path | None,
        Option("Another environment with assay-core, where the candidate runs.", "PATH"),
    ] = None,
    steps: Annotated[int | None, Option("Optimizer steps; default: 3.", group="Training")] = None,
    resume_at: Annotated[
        int | None,
        Option("Steps before the checkpoint from which training is resumed; default: 2."),
    ] = None,
    micro_batches: Annotated[
        int | None,
        Option("Micro-batches of each step, of unequal token counts; default: 2, or dp times pp."),
    ] = None,
    learning_rate: Annotated[
        float | None, Option("Default: 0.001; with --overfit and --lora 0.01.")
    ] = None,
    freeze: Annotated[
        str | Sequence[str] | None,
        Option("Parameters that neither side trains: model.vision_tower.*", "GLOB"),
    ] = None,
    seed: Annotated[int, Option("Seed of the texts, their lengths and random numbers.")] = 0,
    mesh: Annotated[
        str | None,
        Option("Ranks of the candidate by axis: dp, tp, pp.", "dp=2,tp=2", group="Features"),
    ] = None,
    world: Annotated[
        int | None, Option("Number of ranks; without --mesh, all belong to dp.", "N")
    ] = None,
    cpu_offload: Annotated[bool, Option("Keep parameters and moments on the host.")] = False,
    recompute: Annotated[bool, Option("Recompute activations in backward.")] = False,
    mixed_precision: Annotated[
        bool, Option("Keep weights, moments and sums of gradients in float32, and check it.")
    ] = False,
    loss_scaling: Annotated[
        bool, Option("Scale the loss for float16, and skip steps that overflow.")
    ] = False,
    packed: Annotated[bool, Option("Pack the rows of a rank's batch into one row.")] = False,
    compile: Annotated[bool, Option("Compile every decoder layer.")] = False,  # noqa: A002 - as the option is called
    lora: Annotated[bool, Option("Train a LoRA adapter only.")] = False,
    overfit: Annotated[
        bool,
        Option(
            "Run only this test: does the candidate memorize a few sequences?", group="Overfitting"
        ),
    ] = False,
    overfit_steps: Annotated[
        int | None, Option("Steps of --overfit; default: 120, with --lora 160.", "N")
    ] = None,
    track: Annotated[
        str | None, Option("Also log the curves of --overfit there.", "tensorboard|wandb")
    ] = None,
    limits: options.Limits = "training",
    allow_unused: options.AllowUnused = None,
    disk: options.Disk = None,
    keep: options.Keep = "full",
    timeout: options.Timeout = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that `model` trains on the candidate as on the reference.

    Arguments that `check_generate` also has mean the same.

    Args:
        golden: The folder of an earlier check that kept its golden. Its plan is that of this check: an option
            that differs from it is refused, except `resume_at`.

    Returns:
        The verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.

    Raises:
        UsageError: What cannot be checked.
        MachineError: What this machine lacks.
    """
    arguments = dict(locals())
    from assay.models.candidate_code import candidate_code
    from assay.models.sources import require_model
    from assay.runs import RunFolder
    from assay.training.check import check_train as run_check
    from assay.training.overfit.check import check_overfit

    require_model(str(model))  # before devices are looked for
    time_allowed = seconds_of_timeout(timeout)
    code = candidate_code(candidate_setup, arguments.pop("candidate_model"), candidate)
    check = train_check_of(arguments)
    folder = RunFolder.create("check train", output).path
    setup = arguments["candidate_setup"] = code.write(folder)
    check = replace(check, setup=setup, command=command_line(check_train, arguments))
    run: Callable[..., object] = partial(check_overfit, tracker=track) if overfit else run_check
    return run_and_publish(partial(run, check), folder, time_allowed)


def train_check_of(given: Mapping[str, Any]) -> "TrainCheck":
    """Make the check for arguments of `check_train`. Its setup is as given. Raises: UsageError."""
    from assay.launch import parse_mesh
    from assay.models.sources import remote_code_of
    from assay.recording.limits import parse_size
    from assay.runs.results import find_golden
    from assay.training.check import read_plan
    from assay.training.overfit.check import overfit_options
    from assay.training.reports import TrainCheck, TrainOptions

    one = _with_defaults(check_train, given)
    if (one.reference is None) == (one.golden is None):
        raise UsageError("give either --reference RUN or --golden FOLDER")
    golden = None if one.golden is None else find_golden(Path(one.golden))
    plan = None if golden is None else read_plan(golden)
    start = TrainOptions(model=str(one.model)) if plan is None else plan.options
    of_overfit = {"--overfit-steps": one.overfit_steps, "--track": one.track}
    of_steps = {
        "--steps": one.steps,
        "--resume-at": one.resume_at,
        "--disk": one.disk,
        "--golden": one.golden,
    }
    refuse_other_mode(of_steps, of_overfit, overfit=one.overfit)
    ranks = parse_mesh(one.mesh) if one.mesh else {}
    if one.world is not None and one.world != prod(ranks.values()):
        if one.mesh:
            raise UsageError(
                f"--world {one.world}: the mesh {one.mesh} has {prod(ranks.values())} ranks"
            )
        ranks = parse_mesh(f"dp={one.world}")
    features = (
        "cpu_offload", "recompute", "mixed_precision", "loss_scaling", "packed", "compile",
    )  # fmt: skip
    micro_batches = one.micro_batches
    if micro_batches is None:
        # Two, or one for every stage of every rank of dp.
        of_ranks = max(2, ranks.get("dp", 1) * ranks.get("pp", 1))
        micro_batches = of_ranks if plan is None else start.micro_batches
    options = TrainOptions(
        model=str(one.model),
        steps=start.steps,
        resume_at=start.resume_at,
        learning_rate=start.learning_rate,
        micro_batches=micro_batches,
        lora=one.lora or start.lora,
        frozen=globs(one.freeze) or start.frozen,
        seed=one.seed or start.seed,
        remote_code=remote_code_of(trusted=one.trust_remote_code),
    )
    if one.overfit:
        options = overfit_options(options, one.overfit_steps, one.learning_rate)
    else:
        options = _choose_steps(options, one.steps, one.resume_at, one.learning_rate)
    return TrainCheck(
        options,
        one.reference if plan is None else plan.reference,
        one.candidate,
        recorded=golden,
        trainer=one.candidate_trainer,
        setup=one.candidate_setup,
        python=_interpreter(one.candidate_python),
        limits=one.limits,
        allow_unused=globs(one.allow_unused),
        max_disk=None if one.disk is None else parse_size(one.disk),
        keep=one.keep,
        mesh=ranks,
        features=tuple(name.replace("_", "-") for name in features if getattr(one, name)),
    )


def _interpreter(path: str | Path | None) -> Path | None:
    from assay.launch import find_python

    found = None if path is None else find_python(Path(path).expanduser())
    if path is not None and found is None:
        raise UsageError(f"{path} is neither a folder with bin/python nor a Python executable")
    return found


def _with_defaults(function: Callable[..., object], given: Mapping[str, Any]) -> SimpleNamespace:
    """Return all arguments of a function as attributes."""
    parameters = signature(function).parameters.items()
    return SimpleNamespace(**{name: given.get(name, one.default) for name, one in parameters})


def refuse_other_mode(
    of_steps: Mapping[str, object], of_overfit: Mapping[str, object], *, overfit: bool
) -> None:
    """Raise UsageError for options of the mode that is not asked for: some steps, or --overfit."""
    others = of_steps if overfit else of_overfit
    given = " and ".join(name for name, value in others.items() if value is not None)
    if given and overfit:
        raise UsageError(
            f"{given} with --overfit: it trains for --overfit-steps, without a checkpoint or a recording"
        )
    if given:
        raise UsageError(f"{given} without --overfit: nothing would come of it")


def _choose_steps(
    options: "TrainOptions", steps: int | None, resume_at: int | None, learning_rate: float | None
) -> "TrainOptions":
    """Return `options` with the given values; a shorter run resumes earlier by default."""
    if steps is not None and resume_at is None:
        resume_at = max(1, min(options.resume_at, steps - 1))
    given = {"steps": steps, "resume_at": resume_at, "learning_rate": learning_rate}
    return options.model_copy(update={name: v for name, v in given.items() if v is not None})


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

    Returns:
        The verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.

    Raises:
        UsageError: What cannot be loaded.
        MachineError: What this machine lacks.
    """
    arguments = dict(locals())
    from assay.load import check_load as run_check
    from assay.models.sources import require_model
    from assay.runs import RunFolder

    require_model(str(model))  # before devices are looked for
    time_allowed = seconds_of_timeout(timeout)
    folder = RunFolder.create("check load", output).path
    request = load_request_of(arguments)
    command = command_line(check_load, arguments)
    return run_and_publish(
        lambda folder, progress: run_check(request, folder, progress, command), folder, time_allowed
    )


def load_request_of(given: Mapping[str, Any]) -> "LoadRequest":
    """Make the request for arguments of `check_load`."""
    from assay.load import LoadRequest
    from assay.models.sources import remote_code_of

    one = _with_defaults(check_load, given)
    code = remote_code_of(trusted=one.trust_remote_code)
    return LoadRequest(model=str(one.model), run=one.run, remote_code=code)


def compare(  # noqa: PLR0913 - one for each option
    expected: Annotated[
        str | Path, Option("A dump. docs/foreign-formats.md lists the formats.", "EXPECTED")
    ],
    actual: Annotated[str | Path, Option("The dump that is judged.", "ACTUAL")],
    *,
    model: Annotated[
        str | None,
        Option("A trusted model, which recomputes ACTUAL from its dumped inputs.", "MODEL"),
    ] = None,
    noise: Annotated[
        str | Path | None,
        Option(
            "The same model in ACTUAL's precision, from a trusted machine. It sets the noise.",
            "DUMP",
        ),
    ] = None,
    level: Annotated[
        ComparedLevel | None, Option("Compare no deeper than this; default: everything.")
    ] = None,
    stats: Annotated[
        bool, Option("Compare norms only; dumps may hold statistics instead of values.")
    ] = False,
    map: Annotated[  # noqa: A002 - the name of the option
        str | Path | None,
        Option("TOML or JSON: module names, EXPECTED's to ACTUAL's.", "FILE", group="Matching"),
    ] = None,
    order: Annotated[
        str | Path | None,
        Option("Text: EXPECTED's modules in the order of their calls, for tensor files.", "FILE"),
    ] = None,
    allow_unmatched: Annotated[
        Sequence[str], Option("Module or MODULE:PORT that may lack a partner.", "GLOB")
    ] = (),
    rank: Annotated[int | None, Option("Compare this rank alone.", "N")] = None,
    token_shift: Annotated[
        int | None, Option("Pass of ACTUAL minus pass of EXPECTED; default: found.", "N")
    ] = None,
    format: Annotated[  # noqa: A002 - the name of the option
        str | None,
        Option(
            "The format of both dumps, by default recognized: assay, atb, model, msit, msprobe, sglang, tensors,"
            " transformers-debugger.",
            "NAME",
        ),
    ] = None,
    model_name: Annotated[
        str | None, Option("The model to compare, if both captures hold several.", "NAME")
    ] = None,
    limits: Annotated[
        str,
        Option(
            "Shipped limits (noise, training, ascend), or a TOML file.",
            "NAME|FILE",
            group="Judgment",
        ),
    ] = "noise",
    metric: Annotated[
        Sequence[str],
        Option(
            "A function (golden, my) -> (value, message), which becomes a column of the table.",
            "FILE.py:FUNC",
        ),
    ] = (),
    compat: Annotated[
        bool, Option("Compute metrics by the published formulas, without corrections.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    output: Annotated[
        str | Path | None,
        Option(
            "Folder of the run, by default runs/<time>-compare; or a table of all tensors.",
            "DIR|FILE.csv|.xlsx|.parquet",
            group="Output",
        ),
    ] = None,
) -> "CheckedVerdict":
    """Compare two dumps on disk and locate the first place that differs.

    Args:
        model: A folder, a hub name or micro:RECIPE.
        level: "logits", "layer" (repeated blocks), "module" or "op".
        map: `*` is the same text on both sides.
        order: One name a line.
        limits: Noise ratios, or metrics such as those of "ascend".
        output: With `metric` or `compat` and a folder, the table is tensors.csv in the folder.

    Under torchrun every rank calls this function, and the ranks share the work.

    Returns:
        The verdict, with `verdict.passed`, `str(verdict)` and `verdict.folder`.

    Raises:
        UsageError: A dump cannot be read.
        WorldError: Another rank fails.
    """
    arguments = dict(locals())
    from assay.plugins import import_torch_alone

    import_torch_alone()
    from assay.comparison.check import CompareOptions
    from assay.comparison.check import compare as run_comparison
    from assay.launch import is_first_rank, on_first_rank
    from assay.models.sources import remote_code_of
    from assay.output.tables import is_table_file, prepare_table_file
    from assay.runs import RunFolder, SilentProgress, open_progress, removed_if_refused

    table = Path(output).expanduser() if output and is_table_file(output) else None
    if table is not None and is_first_rank():
        prepare_table_file(table)
    folder = on_first_rank(lambda: RunFolder.create("compare", None if table else output).path)
    if table is None and (metric or compat):
        table = folder / "tensors.csv"
    comparison = CompareOptions(
        expected=str(expected),
        actual=str(actual),
        model=model,
        remote_code=remote_code_of(trusted=trust_remote_code),
        noise=str(noise) if noise else None,
        level=level,
        name_map=str(map) if map else None,
        order=str(order) if order else None,
        allow_unmatched=tuple(allow_unmatched),
        rank=rank,
        token_shift=token_shift,
        format=format,
        model_name=model_name,
        limits=limits,
        stats=stats,
        metrics=tuple(metric),
        compat=compat,
        table=table,
        command=command_line(compare, arguments, ("expected", "actual")),
    )
    with open_progress() if is_first_rank() else nullcontext(SilentProgress()) as progress:
        with removed_if_refused():
            run_comparison(comparison, folder, progress)
        with progress.step("writing the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return on_first_rank(lambda: CheckedVerdict.publish(folder))
