"""The options of `assay compare`."""

from dataclasses import dataclass, field
from pathlib import Path

from assay.dumps.recognizing import readers
from assay.errors import UsageError
from assay.models.remote_code import RemoteCode
from assay.sites import ComparedLevel

# Options without a meaning for quantized weights, by field of `Comparison`. The table comes last: --metric
# and --compat ask for one, too.
_OPTIONS_OF_TENSORS = {
    "model": "--model", "noise": "--noise", "level": "--level", "name_map": "--map", "rank": "--rank",
    "token_shift": "--token-shift", "limits": "--limits", "stats": "--stats", "metrics": "--metric",
    "compat": "--compat", "table": "a table as --output",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """The options of a comparison. command: what to type for the same comparison."""

    expected: str
    actual: str
    model: str | None = None
    remote_code: RemoteCode = "refuse"
    noise: str | None = None
    level: ComparedLevel | None = None
    name_map: str | None = None
    allow_unmatched: tuple[str, ...] = ()
    rank: int | None = None
    token_shift: int | None = None
    format: str | None = None
    limits: str = "noise"
    stats: bool = False
    metrics: tuple[str, ...] = ()
    """FILE.py:FUNC of each metric of the user."""
    compat: bool = False
    """Measure metrics by the formulas as published, not by the corrected ones."""
    table: Path | None = None
    """File for a table of all tensors."""
    command: tuple[str, ...] = field(default=(), compare=False)


def refuse_dump_as_model(model: str | None) -> None:
    """Raise UsageError for a dump that is given as --model."""
    path = Path(model or "")
    if model is None or not path.exists() or (path / "config.json").exists():
        return
    for reader in readers():
        if reader.recognize(path):
            raise UsageError(
                f"--model {model} is a dump ({reader.name}): name the model that made it, a folder with"
                " config.json, a hub name or micro:RECIPE"
            )


def refuse_options_of_tensors(comparison: Comparison) -> None:
    """Raise UsageError for options that a comparison of quantized weights would ignore."""
    default = Comparison(comparison.expected, comparison.actual)
    given = [
        option
        for name, option in _OPTIONS_OF_TENSORS.items()
        if getattr(comparison, name) != getattr(default, name)
    ]
    if given:
        raise UsageError(
            "one of the two is a quantized model folder, whose weights are compared as they are:"
            f" leave out {', '.join(given)}"
        )
