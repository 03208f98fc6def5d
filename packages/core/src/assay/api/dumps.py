"""`assay.compare`."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from assay.api import options
from assay.api.options import Option, command_line
from assay.sites import ComparedLevel

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


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
    map: Annotated[  # noqa: A002 - the name of the option
        str | Path | None, Option("TOML or JSON: module names, EXPECTED's to ACTUAL's.", "FILE")
    ] = None,
    order: Annotated[
        str | Path | None,
        Option("Text: EXPECTED's modules in the order of their calls, for tensor files.", "FILE"),
    ] = None,
    stats: Annotated[
        bool, Option("Compare norms only; dumps may hold statistics instead of values.")
    ] = False,
    allow_unmatched: Annotated[
        Sequence[str], Option("Module or MODULE:PORT that may lack a partner.", "GLOB")
    ] = (),
    rank: Annotated[int | None, Option("Compare this rank alone.", "N")] = None,
    token_shift: Annotated[
        int | None, Option("Pass of ACTUAL minus pass of EXPECTED; default: found.", "N")
    ] = None,
    format: Annotated[str | None, Option("Default: recognized.", "NAME")] = None,  # noqa: A002 - the name of the option
    model_name: Annotated[
        str | None, Option("The model to compare, if both captures hold several.", "NAME")
    ] = None,
    limits: Annotated[str, Option("Shipped limits, or a TOML file.", "NAME|FILE")] = "noise",
    metric: Annotated[
        Sequence[str],
        Option(
            "A function (golden, my) -> (value, message), which becomes a column of the table.",
            "FILE.py:FUNC",
        ),
    ] = (),
    compat: Annotated[bool, Option("Metrics by the formulas as published, uncorrected.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    output: Annotated[
        str | Path | None,
        Option(
            "Folder of the run, by default runs/<time>-compare; or a table of all tensors.",
            "DIR|FILE.csv|.xlsx|.parquet",
        ),
    ] = None,
) -> "CheckedVerdict":
    """Compare two dumps on disk and locate the first place that differs.

    Each option is described at its parameter. In addition:
    model: a folder, a hub name or micro:RECIPE.
    level: "logits", "layer" (repeated blocks), "module" or "op".
    map: `*` is the same text on both sides.
    order: one name a line.
    limits: noise ratios, or metrics such as those of "ascend".
    output: with `metric` or `compat` and a folder, the table is tensors.csv in the folder.

    Under torchrun every rank calls this function, and the ranks share the work.

    Returns: the verdict, with `verdict.passed`, `str(verdict)` and `verdict.folder`.
    Raises: UsageError if a dump cannot be read; WorldError if another rank fails.
    """
    arguments = dict(locals())
    from assay.plugins import import_torch_alone

    import_torch_alone()
    from assay.launch import is_first_rank, on_first_rank
    from assay.models.remote_code import remote_code_of
    from assay.offline.check import CompareOptions
    from assay.offline.check import compare as run_comparison
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
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return on_first_rank(lambda: CheckedVerdict.publish(folder))
