"""One golden against several Python environments, in one verdict: a level for each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.generate.check import capture_for, check_generate
from assay.generate.spec import GenerateCheck
from assay.judge.explain import describe_cause
from assay.judge.levels import LevelResult, conclude, not_compared
from assay.judge.wording import describe_location, format_count
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Level, Outcome, Verdict

# The packages whose versions are shown.
_SHOWN = ("torch", "transformers")


def check_matrix(
    check: GenerateCheck, pythons: Sequence[Path], folder: Path, progress: Progress
) -> Verdict:
    """Check the candidate in each environment, in a folder of its own below `folder`, and write the verdict."""
    check = replace(check, folder=folder)
    if check.golden is None:
        capture_for(check, progress)
        check = replace(check, golden=check.golden_folder, reference=None)
    results: dict[str, LevelResult] = {}
    facts: dict[str, Any] = {}
    for name, python in name_environments(pythons).items():
        own = folder / name
        own.mkdir()
        try:
            with progress.step(name):
                found = check_generate(replace(check, python=python), own, progress)
        except AssayError as error:
            results[name] = not_compared(f"{python}: {error}")
            continue
        reason = describe_cause(found) or None
        if found.verdict is Outcome.FAIL and found.location is not None:
            reason = f"{describe_location(found.location)} differs"
        level = Level(verdict=found.verdict, reason=reason, compared=found.compared)
        results[f"{name}: {describe_versions(found.candidate)}"] = LevelResult(level)
        facts = {"model": found.model, "reference": found.reference}
    passed = sum(one.level.verdict is Outcome.PASS for one in results.values())
    headline = f"{passed} of {format_count(len(results), 'environment')} agree with the golden."
    verdict = conclude(results, candidate={"run": str(check.candidate)}, headline=headline, **facts)
    return write_results(verdict, [], folder, check.command)


def name_environments(pythons: Sequence[Path]) -> dict[str, Path]:
    """Name each environment by its folder; a number follows a name that occurs again."""
    found: dict[str, Path] = {}
    for python in pythons:
        name = python.parent.parent.name or "python"
        number = sum(one == name or one.startswith(f"{name}-") for one in found)
        found[f"{name}-{number + 1}" if number else name] = python
    return found


def describe_versions(candidate: Mapping[str, Any]) -> str:
    """List the versions of an environment: "torch 2.13.0, transformers 5.23.0"."""
    packages = candidate.get("packages", {})
    return ", ".join(f"{name} {packages[name]}" for name in _SHOWN if packages.get(name))
