"""`assay capture`: record the reference as a golden, or the models of any command."""

from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from assay.api.options import Option, TrustRemoteCode, input_options
from assay.cli.derived_commands import read_values, with_options, with_options_of
from assay.errors import UsageError
from assay.output.streams import print_text
from assay.sites import CapturedLevel

_COMMAND = "assay.command"
_MIN_PARAMETERS = 1_000_000


class CaptureCommand(TyperCommand):
    """A command that keeps the words after `--`, which click would parse."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's or typer's
        """Parse the words before `--`."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


@with_options_of(input_options)
@with_options
def capture(  # noqa: PLR0913 - one for each option
    context: typer.Context,
    model: Annotated[str | None, Option("Folder, hub name, or micro:RECIPE.", "MODEL")] = None,
    *,
    run: Annotated[
        str | None, Option("The trusted device: cpu/float32.", "RUN", group="Options")
    ] = None,
    output: Annotated[str, Option("Folder of the golden; folder or URL of the trace.", "TRACE")],
    include: Annotated[
        list[str] | None,
        Option("Modules to record.", "GLOB", group="Recording a command (after --)"),
    ] = None,
    exclude: Annotated[list[str] | None, Option("Modules to leave out.", "GLOB")] = None,
    steps: Annotated[str | None, Option("Steps to record, such as 0,100:102.", "RANGES")] = None,
    tokens: Annotated[
        str | None, Option("Forward passes to record in each generation, such as 0:16.", "RANGES")
    ] = None,
    weights: Annotated[bool, Option("Also record parameters and their gradients.")] = False,
    stats_only: Annotated[bool, Option("Record statistics instead of values.")] = False,
    warmup: Annotated[
        str | None,
        Option("Forward passes to skip at the start: 3, or those of shape 8x512.", "N|SHAPE"),
    ] = None,
    max_disk: Annotated[
        str | None, Option("Largest size of the trace, such as 20G.", "SIZE")
    ] = None,
    max_seconds: Annotated[
        float | None,
        Option("Longest time that the command may wait for writing the trace.", "SECONDS"),
    ] = None,
    max_memory: Annotated[
        str | None, Option("Memory for copies that wait to be written.  [default: 256M]", "SIZE")
    ] = None,
    control: Annotated[
        str | None, Option("A JSON file that turns the capture off and on.", "FILE")
    ] = None,
    min_parameters: Annotated[
        int, Option("Leave out smaller modules.", "N", minimum=0)
    ] = _MIN_PARAMETERS,
    model_name: Annotated[
        str | None, Option("Record only this model, such as Llama or 2-Llama.", "NAME")
    ] = None,
    noise_for: Annotated[
        str | None,
        Option(
            "Dtypes of later candidates.  [default: bfloat16,float16; with a command: none]",
            "DTYPES",
            group="Options",
        ),
    ] = None,
    level: Annotated[CapturedLevel, Option("What to record. op needs a command.")] = "module",
    trust_remote_code: TrustRemoteCode = False,
    **inputs: Any,  # noqa: ANN401 - the options of `input_options`
) -> None:
    """Record a model as a golden, or a command's models as a trace.

    Example: assay capture micro:llama --run cpu/float32 --output golden --noise-for bfloat16

    Example: assay capture --output trace --steps 0:2 -- torchrun --nproc-per-node 2 train.py

    A golden is for `assay check generate --golden`, a trace for `assay compare`. With `-- COMMAND` the
    script is unchanged, and the exit code is the command's.
    """
    chosen = {
        "include": include, "exclude": exclude, "steps": steps, "tokens": tokens, "weights": weights,
        "stats_only": stats_only, "warmup": warmup, "max_disk": max_disk, "max_seconds": max_seconds,
        "max_memory": max_memory, "control": control,
    }  # fmt: skip
    recorded = _find_given(chosen)
    if _COMMAND in context.meta:
        recorded["level"] = level
        if noise_for is not None:
            recorded["noise_for"] = noise_for
        of_model = {"run": run, "trust_remote_code": trust_remote_code, **inputs}
        _refuse(_find_given(of_model), "not for a command after --")
        from assay.recording.command import run_captured

        command: list[str] = context.meta[_COMMAND]
        if model is not None or not command:
            raise UsageError("give either a model, or a command after --")
        raise typer.Exit(run_captured(command, output, min_parameters, model_name, recorded))
    if model is None or run is None:
        raise UsageError("name a model and its --run, or a command after --")
    _refuse(recorded | _find_given({"model_name": model_name}), "only for a command after --")
    if level == "op":
        raise UsageError("--level op: only for a command after --")
    from assay.devices.run_string import parse_run
    from assay.files import parse_location
    from assay.generate.check import capture as capture_golden
    from assay.generate.golden import GoldenSection
    from assay.generate.spec import GoldenSpec
    from assay.judge.coverage import CoverageParts, describe_coverage, judge_coverage
    from assay.models.sources import remote_code_of
    from assay.runs import RunFolder, open_progress

    dtypes = _dtypes("bfloat16,float16" if noise_for is None else noise_for)
    if not isinstance(parse_location(output), Path):
        raise UsageError(f"--output {output}: a golden is written to a local folder")
    reference = parse_run(run)
    folder = RunFolder.create("capture", output)
    spec = GoldenSpec(
        model=model,
        reference=reference,
        noise_for=dtypes,
        inputs=input_options(**read_values(input_options, inputs)),
        level=level,
        folder=folder.path,
        remote_code=remote_code_of(trusted=trust_remote_code),
    )
    with open_progress() as progress:
        try:
            capture_golden(spec, folder.path, progress)
        except UsageError:
            rmtree(folder.path, ignore_errors=True)
            raise
        usage = GoldenSection.open(folder.path, dtypes[0]).usage()
        progress.note(describe_coverage(judge_coverage(CoverageParts(usage, usage))))
    print_text(folder.path)


def _find_given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are on the command line. A zero is a value, and may be refused later."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != []
    }


def _refuse(given: dict[str, Any], reason: str) -> None:
    if names := [f"--{name.replace('_', '-')}" for name in given]:
        raise UsageError(f"{', '.join(names)}: {reason}")


def _dtypes(text: str) -> list[str]:
    from assay.devices.run_string import RUN_DTYPES

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RUN_DTYPES:
            known = ", ".join(RUN_DTYPES)
            raise UsageError(f"--noise-for {text!r}: unknown dtype {name!r}; known: {known}")
        if names.count(name) > 1:
            raise UsageError(f"--noise-for {text!r}: {name} is given twice")
    return names
