"""The options of `assay compare`."""

from dataclasses import dataclass, field
from pathlib import Path

from assay.dumps.recognizing import readers
from assay.errors import UsageError
from assay.models.sources import RemoteCode
from assay.sites import ComparedLevel

# Options that do not apply to quantized weights, by field. The table is last: --metric and --compat imply it.
_OPTIONS_OF_TENSORS = {
    "model": "--model", "noise": "--noise", "level": "--level", "name_map": "--map",
    "order": "--order", "rank": "--rank",
    "token_shift": "--token-shift", "limits": "--limits", "stats": "--stats", "metrics": "--metric",
    "compat": "--compat", "table": "a table as --output",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The options of a comparison."""

    expected: str
    actual: str
    model: str | None = None
    remote_code: RemoteCode = "refuse"
    noise: str | None = None
    level: ComparedLevel | None = None
    """The deepest level to compare; None for all."""
    name_map: str | None = None
    """A TOML or JSON file of expected to actual module names."""
    order: str | None = None
    """A text file of EXPECTED's modules in the order of their calls, one a line."""
    allow_unmatched: tuple[str, ...] = ()
    rank: int | None = None
    """The only rank to compare; None for all."""
    token_shift: int | None = None
    """Number of an actual pass minus the number of its expected pass; None to find it."""
    format: str | None = None
    model_name: str | None = None
    """The model to compare in captures of several."""
    limits: str = "noise"
    stats: bool = False
    metrics: tuple[str, ...] = ()
    """FILE.py:FUNC of each custom metric."""
    compat: bool = False
    """Compute metrics by the published formulas, not the corrected ones."""
    table: Path | None = None
    """File for a table of all tensors."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The command line that repeats the comparison."""


def refuse_dump_as_model(model: str | None) -> None:
    """Raise UsageError if --model names a dump."""
    path = Path(model or "")
    if model is None or not path.exists() or (path / "config.json").exists():
        return
    for reader in readers():
        if reader.recognize(path):
            raise UsageError(
                f"--model {model} is a dump ({reader.name}): name the model that made it, a folder with"
                " config.json, a hub name or micro:RECIPE"
            )


def refuse_options_of_tensors(comparison: CompareOptions) -> None:
    """Raise UsageError for options that do not apply to quantized weights."""
    default = CompareOptions(comparison.expected, comparison.actual)
    given = [
        option
        for name, option in _OPTIONS_OF_TENSORS.items()
        if getattr(comparison, name) != getattr(default, name)
    ]
    if given:
        raise UsageError(
            "one side is a quantized model folder, so only weights are compared:"
            f" leave out {', '.join(given)}"
        )
