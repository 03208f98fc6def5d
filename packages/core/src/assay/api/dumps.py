"""`assay.compare`."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from assay.api.command_line import command_line
from assay.sites import ComparedLevel

if TYPE_CHECKING:
    from assay.api.verdict import CheckedVerdict


def compare(  # noqa: PLR0913 - one for each option
    expected: str | Path,
    actual: str | Path,
    *,
    model: str | None = None,
    noise: str | Path | None = None,
    level: ComparedLevel | None = None,
    map: str | Path | None = None,  # noqa: A002 - the name of the option
    stats: bool = False,
    allow_unmatched: Sequence[str] = (),
    rank: int | None = None,
    token_shift: int | None = None,
    format: str | None = None,  # noqa: A002 - the name of the option
    limits: str = "noise",
    metric: Sequence[str] = (),
    compat: bool = False,
    trust_remote_code: bool = False,
    output: str | Path | None = None,
) -> "CheckedVerdict":
    """Compare two dumps on disk and locate the first place that differs.

    expected, actual: folders or files that any supported tool wrote; see docs/foreign-formats.md.
    model: a trusted model (folder, hub name or micro:RECIPE) that replays the inputs of `actual`.
    noise: a third dump of the same model in the precision of `actual`, from a trusted machine.
    level: the deepest level to compare: "logits", "layer" (repeated blocks), "module" or "op"; default: all.
    map: a TOML or JSON file of module names, expected to actual; `*` matches the same text on both sides.
    stats: compare the norms of tensors only; the dumps may hold statistics instead of values.
    allow_unmatched: globs of expected ports or modules that may lack a partner.
    rank: the only rank to compare; default: all.
    token_shift: number of an actual pass minus the number of its expected pass; default: found from shapes.
    format: format of both dumps; default: recognized.
    limits: name or TOML file of the limits: noise ratios, or metrics such as "ascend".
    metric: FILE.py:FUNC of functions `(golden, my) -> (value, message)`, which become columns.
    compat: compute the metrics by the published formulas instead of the corrected ones.
    output: the folder of the run, or a new .csv, .xlsx or .parquet file for a table of all tensors. With
        `metric` or `compat` and no such file, the table is tensors.csv in the folder.

    Under torchrun every rank calls this function, and the ranks share the work.

    Returns: the verdict, with `verdict.passed`, `str(verdict)` and `verdict.folder`.
    Raises: UsageError if a dump cannot be read; WorldError if another rank fails.
    """
    arguments = dict(locals())
    from assay.launch import is_first_rank, on_first_rank
    from assay.models.remote_code import remote_code_of
    from assay.offline.check import CompareOptions
    from assay.offline.check import compare as run_comparison
    from assay.output.tables import is_table_file, prepare_table_file
    from assay.runs import RunFolder, SilentProgress, open_progress

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
        allow_unmatched=tuple(allow_unmatched),
        rank=rank,
        token_shift=token_shift,
        format=format,
        limits=limits,
        stats=stats,
        metrics=tuple(metric),
        compat=compat,
        table=table,
        command=command_line(compare, arguments, ("expected", "actual")),
    )
    with open_progress() if is_first_rank() else nullcontext(SilentProgress()) as progress:
        run_comparison(comparison, folder, progress)
        with progress.step("writes the report"):
            from assay.api.verdict import CheckedVerdict  # jinja2 and rich are not needed before

            return on_first_rank(lambda: CheckedVerdict.publish(folder))
