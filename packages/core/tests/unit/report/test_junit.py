"""Verdicts as JUnit XML, read back by a parser."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from assay.report.junit import Case, Suite, make_suite, render_junit
from assay.report.run_report import Report, read_report
from assay.verdicts import Level, Outcome
from packages.core.tests.unit.report.sample_runs import (
    Sample,
    sample_verdict,
    write_hostile_sample,
    write_sample,
    write_sample_verdict,
)


def parse(*suites: Suite) -> ET.Element:
    return ET.fromstring(render_junit(suites))  # noqa: S314 - written above


def problems_of(suite: Suite) -> dict[str, str]:
    cases = parse(suite).iter("testcase")
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in cases}


def test_a_failed_level_is_one_failed_test_with_the_message_of_the_verdict(tmp_path: Path) -> None:
    suite = make_suite(read_report(write_sample(tmp_path, Sample())), "box.generate")
    assert problems_of(suite) == {
        "inputs": "passed", "tokens": "passed", "logits": "passed",
        "modules": "failure", "sampler": "skipped",
    }  # fmt: skip
    (element,) = parse(suite)
    counted = {name: element.attrib[name] for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": "5", "failures": "1", "errors": "0", "skipped": "1"}
    failure = element.find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == (
        "model.layers.2.mlp.down_proj, forward, step 0: relative error 4.09e-2, 14.6x / 3.0x"
    )
    lines = str(failure.text).splitlines()
    assert lines[0].startswith("model.layers.2.mlp.down_proj (forward, step 0) differs")
    assert lines[-1] == "Next: assay explain module-error"
    assert failure.attrib["message"] not in str(failure.text)


def test_each_failed_level_states_its_own_numbers_and_the_deciding_one_the_whole_message(
    tmp_path: Path,
) -> None:
    report = read_report(write_sample(tmp_path, Sample()))
    levels = report.verdict.levels
    logits = levels["logits"].model_copy(update={"verdict": Outcome.FAIL})
    rows = [
        row.model_copy(update={"ratio": 353.0, "limit": 20.0}) if row.level == "logits" else row
        for row in report.measurements
    ]
    verdict = report.verdict.model_copy(update={"levels": levels | {"logits": logits}})
    suite = make_suite(Report(tmp_path, verdict, rows), "a")
    cases = {case.name: (case.problem, case.message, case.details) for case in suite.cases}
    message = "forward, step 0: mean KL divergence 1.2e-4, 353x / 20.0x"
    assert cases["logits"] == ("failure", message, "")
    assert "down_proj (forward, step 0) differs from the reference" in cases["modules"][2]


def test_a_clean_run_has_no_failures(tmp_path: Path) -> None:
    report = read_report(write_sample(tmp_path, Sample(faulty_module=None)))
    assert "failure" not in problems_of(make_suite(report, "a")).values()


def test_what_was_not_compared_is_an_error(tmp_path: Path) -> None:
    write_sample(tmp_path, Sample(faulty_module=None))
    verdict = sample_verdict(Sample(faulty_module=None))
    levels = verdict.levels | {
        "logits": verdict.levels["logits"].model_copy(
            update={"verdict": Outcome.NOT_COMPARED, "reason": "no logits"}
        )
    }
    changed = verdict.model_copy(update={"verdict": Outcome.NOT_COMPARED, "levels": levels})
    write_sample_verdict(changed, tmp_path)
    suite = make_suite(read_report(tmp_path), "a")
    found = problems_of(suite)
    assert (found["logits"], found["tokens"]) == ("error", "passed")
    assert "verdict" not in found
    (error,) = parse(suite).iter("error")
    assert error.attrib["message"] == "no logits"
    # The body adds what the message does not say.
    assert "no logits" not in str(error.text)
    assert str(error.text).startswith("Not everything that was asked for could be compared")


def test_each_failed_level_has_its_own_reason_alone(tmp_path: Path) -> None:
    """Without a headline, the reason of the first failed level is that of the message."""
    levels = {
        name: Level(verdict=Outcome.FAIL, reason=f"{name} is lower", compared=9)
        for name in ("cloze", "addition")
    }
    changed = sample_verdict(Sample(faulty_module=None)).model_copy(
        update={
            "verdict": Outcome.FAIL,
            "levels": levels,
            "compared_unit": "items",
            "noise_ratio": None,
            "limit": None,
        }
    )
    write_sample_verdict(changed, write_sample(tmp_path, Sample(faulty_module=None)))
    report = read_report(tmp_path)
    assert report.explanation.headline == "cloze: cloze is lower"
    found = {case.name: (case.message, case.details) for case in make_suite(report, "a").cases}
    assert found == {name: (f"{name} is lower", "") for name in levels}


def test_an_outcome_that_no_level_has_is_a_test_of_its_own(tmp_path: Path) -> None:
    write_sample(tmp_path, Sample(faulty_module=None))
    verdict = sample_verdict(Sample(faulty_module=None))
    # Modules that never ran forbid PASS, whatever the levels say.
    changed = verdict.model_copy(update={"verdict": Outcome.NOT_COMPARED})
    write_sample_verdict(changed, tmp_path)
    found = problems_of(make_suite(read_report(tmp_path), "a"))
    assert (found["verdict"], found["modules"]) == ("error", "passed")


@pytest.mark.parametrize("text", ["<b>&\"'", "a\x00b\x1b[2J", "]]>", "a\ufffeb"])
def test_foreign_text_stays_text(tmp_path: Path, text: str) -> None:
    whole = make_suite(read_report(write_hostile_sample(tmp_path, text)), text)
    cases = list(parse(whole, Suite("b", [Case(text, "error", text, text, 1.5)])).iter("testcase"))
    assert len(cases) == len(whole.cases) + 1
    assert cases[-1].attrib["time"] == "1.500"
    assert "time" not in cases[0].attrib  # nothing measured it
