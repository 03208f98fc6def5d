"""Reports as JUnit XML, which CI systems show as tests.

A suite is a run, and a test is one of its levels; a test for the whole verdict is added if no level shows its outcome.
The message of a test is the reason of its level, or its worst measurement; the level that decided has the whole
message of the verdict as its text. NOT_COMPARED is an error, never a skipped test: many readers count a skipped
test as a pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.etree import ElementTree as ET

from assay.foreign_text import escape_controls, one_line
from assay.report.run_report import LadderRung, Report
from assay.verdicts import Outcome

Problem = Literal["failure", "error", "skipped"]


@dataclass(frozen=True, slots=True)
class Case:
    """A test."""

    name: str
    problem: Problem | None = None
    message: str = ""
    """The problem in one line."""
    details: str = ""
    seconds: float | None = None
    """None if it was not measured."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one run."""

    name: str
    cases: Sequence[Case]


def render_junit(suites: Iterable[Suite]) -> str:
    """Render the suites as one XML document."""
    root = ET.Element("testsuites", name="assay")
    for suite in suites:
        problems = [case.problem for case in suite.cases]
        counts = {
            "tests": len(problems),
            "failures": problems.count("failure"),
            "errors": problems.count("error"),
            "skipped": problems.count("skipped"),
        }
        element = ET.SubElement(root, "testsuite", name=_as_xml(one_line(suite.name)))
        element.attrib.update({name: str(count) for name, count in counts.items()})
        for case in suite.cases:
            element.append(_render_case(suite, case))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def make_suite(report: Report, name: str) -> Suite:
    """Make the suite of a run: a case for each level, and one for a verdict that no level shows."""
    verdict, words = report.verdict, report.explanation
    problem = _PROBLEMS[verdict.verdict]
    cases = [_make_case(rung, words.headline) for rung in report.ladder]
    names = [case.name for case in cases if case.problem == problem]
    if not names:
        cases, names = [Case("verdict", problem, words.headline), *cases], ["verdict"]
    row = report.decided.deciding
    decided = row.level if row and row.level in names else names[0]
    return Suite(name, [_with_text(one, report) if one.name == decided else one for one in cases])


_PROBLEMS: dict[Outcome, Problem | None] = {
    Outcome.PASS: None, Outcome.FAIL: "failure", Outcome.NOT_COMPARED: "error",
}  # fmt: skip


def _make_case(rung: LadderRung, headline: str) -> Case:
    """Make the case of a level. headline: of the verdict, for a level with neither reason nor measurement."""
    outcome = rung.level.verdict
    problem: Problem | None = _PROBLEMS[outcome] if outcome else "skipped"
    if problem not in ("failure", "error"):
        return Case(one_line(rung.name), problem, rung.reason if problem else "")
    message = rung.reason or rung.measured or headline
    return Case(one_line(rung.name), problem, message, rung.measured if rung.reason else "")


def _with_text(case: Case, report: Report) -> Case:
    """Return the case with the message of the verdict, without lines that only repeat the reason of a level."""
    reasons = tuple(rung.reason for rung in report.ladder if rung.reason)
    lines = report.explanation.message.splitlines()
    kept = (line for line in lines if not line.endswith((case.message, *reasons)))
    return replace(case, details="\n".join(kept))


def _render_case(suite: Suite, case: Case) -> ET.Element:
    names = {"classname": _as_xml(one_line(suite.name)), "name": _as_xml(one_line(case.name))}
    time = {} if case.seconds is None else {"time": f"{case.seconds:.3f}"}
    element = ET.Element("testcase", names | time)
    if case.problem:
        message = _as_xml(one_line(case.message))
        problem = ET.SubElement(element, case.problem, message=message)
        problem.text = _as_xml(escape_controls(case.details)) or None
    return element


def _as_xml(text: str) -> str:
    """Replace the two characters that XML forbids besides controls. Source: XML 1.0, 2.2."""
    return text.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")
