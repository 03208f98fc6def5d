"""Reports as JUnit XML, which CI systems show as tests.

A suite is a run, and a test is one of its levels; a test for the whole verdict is added if no level shows its outcome.
A level that failed has the message of the verdict. NOT_COMPARED is an error, never a skipped test: many
readers count a skipped test as a pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    # The reason of a level is the message of its own test.
    reasons = tuple(rung.reason for rung in report.ladder if rung.reason)
    lines = words.message.splitlines()
    headline, *details = ["" if one.endswith(reasons) else one for one in lines]
    whole = Case("verdict", problem, one_line(words.headline), "\n".join(filter(None, details)))
    cases = [_make_case(rung, whole, headline) for rung in report.ladder]
    shown = problem in [case.problem for case in cases]
    return Suite(name, cases if shown else [whole, *cases])


_PROBLEMS: dict[Outcome, Problem | None] = {
    Outcome.PASS: None, Outcome.FAIL: "failure", Outcome.NOT_COMPARED: "error",
}  # fmt: skip


def _make_case(rung: LadderRung, whole: Case, headline: str) -> Case:
    """Make the case of a level. headline: of the verdict; "" if it is the reason of a level."""
    cells, outcome = rung.cells, rung.level.verdict
    problem: Problem | None = _PROBLEMS[outcome] if outcome else "skipped"
    if problem in ("failure", "error"):
        details = f"{headline}\n{whole.details}" if rung.reason else whole.details
        return Case(cells["level"], problem, rung.reason or whole.message, details.strip("\n"))
    return Case(cells["level"], problem, cells["worst"] if problem else "")


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
