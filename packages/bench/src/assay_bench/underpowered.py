"""The outcome of a test with too little data to decide. `assay explain underpowered` explains the word."""

from collections.abc import Mapping

from assay.judge.levels import LevelResult, not_compared, outcome_of_levels
from assay.verdicts import Outcome

UNDERPOWERED = "underpowered"
TOO_FEW_ITEMS = f"{UNDERPOWERED}: too few items to decide"


def underpowered(reason: str, compared: int) -> LevelResult:
    """Return a level that compared `compared` things, which are too few or too noisy to decide."""
    return not_compared(f"{UNDERPOWERED}: {reason}", compared)


def undecided_levels(results: Mapping[str, LevelResult]) -> list[str]:
    """Name the levels that decide a verdict which lacks nothing but data; an empty list for any other verdict."""
    levels = {name: one.level for name, one in results.items()}
    open_ = [name for name, one in levels.items() if one.verdict is Outcome.NOT_COMPARED]
    lacks_data = all(str(levels[name].reason).startswith(UNDERPOWERED) for name in open_)
    return open_ if lacks_data and outcome_of_levels(levels) is Outcome.NOT_COMPARED else []
