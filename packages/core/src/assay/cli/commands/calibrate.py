"""`assay calibrate`: set limits of noise ratios or published metrics from clean runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text

_METRICS = ".jsonl"


@with_options
def calibrate(
    clean: Annotated[
        list[str],
        Option(
            "Runs known to be right, as cpu/bfloat16; or their metrics, as"
            " `assay expect capture --shapes` writes them.",
            "RUN...|FILE.jsonl...",
        ),
    ],
    *,
    output: Annotated[Path, Option("File to write.", "LIMITS.toml")],
    reference: Annotated[
        str | None, Option("Of runs: the trusted device. Default: cpu/float32.", "RUN")
    ] = None,
    model: Annotated[
        list[str] | None, Option("Of runs: by default the micro decoders.", "MODEL")
    ] = None,
) -> None:
    """Set limits from what is known to be right.

    Of runs the noise ratios: each limit follows from the largest ratio. Of files the published
    metrics of tokens: each threshold follows from what every file needs to pass, and the last line
    that is printed is the variable by which aiu-fms-testing-utils takes the pair.

    Example: assay calibrate cpu/bfloat16 sim/bfloat16 sim:truncate/bfloat16 --output mine.toml

    Example: assay calibrate expectations/metrics/*.jsonl --output thresholds.toml
    """
    from assay.errors import UsageError

    if output.exists():
        raise UsageError(f"{output} exists already")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} to write {output.name} into")
    files = [text for text in clean if text.endswith(_METRICS)]
    if files and len(files) < len(clean):
        raise UsageError("runs and files of metrics: give one kind of them")
    names = [*clean, *(model or [])]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is given twice")
    for option, value in (("--model", model), ("--reference", reference)):
        if files and value:
            raise UsageError(f"{option} is of runs: files of metrics have theirs")
    if files:
        _calibrate_thresholds([Path(file) for file in files], output)
    else:
        _calibrate_ratios(clean, model or [], reference or "cpu/float32", output)


def _calibrate_ratios(
    runs: Sequence[str], models: Sequence[str], reference: str, output: Path
) -> None:
    from assay.comparing.limits import limits_file
    from assay.devices.run_string import parse_run
    from assay.files import write_whole
    from assay.generate.check import MODELS, run_clean
    from assay.runs import RunFolder, open_progress

    trusted, *judged = (parse_run(text) for text in (reference, *runs))
    folder = RunFolder.create("calibrate")
    with open_progress() as progress:
        clean = run_clean(judged, models or MODELS, trusted, folder.path, progress)
    write_whole(output, limits_file(clean, _command()))
    print_text(output)


def _calibrate_thresholds(files: Sequence[Path], output: Path) -> None:
    from assay.comparing.limits import (
        calibrate_thresholds,
        published_pair,
        read_clean_tokens,
        thresholds_file,
    )
    from assay.files import write_whole

    runs = [read_clean_tokens(file) for file in files]
    write_whole(output, thresholds_file(runs, _command()))
    print_text(output)
    print_text(published_pair(calibrate_thresholds(runs)))


def _command() -> str:
    import sys

    return " ".join(["assay", *sys.argv[1:]])
