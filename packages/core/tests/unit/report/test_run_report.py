"""Reading the files of a finished run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.files import UnreadableFileError, seal
from assay.report.run_report import LadderRung, Report, read_report
from assay.verdicts import Level, Location, Measurement, Outcome, Suspect, Verdict
from packages.core.tests.unit.report.sample_runs import Sample, write_sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sample = Sample(num_layers=1, num_prompts=1, prompt_length=2, num_new_tokens=1)
    return write_sample(tmp_path / "run", sample_without_fault(sample))


def sample_without_fault(sample: Sample) -> Sample:
    return Sample(
        sample.num_layers, sample.num_prompts, sample.prompt_length, sample.num_new_tokens, None
    )


def measured(**changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": "a", "port": "output", "statistic": "replay-tensor",
        "actual": 0.02, "expected": 0.01, "ratio": 2.0, "limit": 4.0,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def test_run_is_read_with_its_measurements(folder: Path) -> None:
    report = read_report(folder)
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    assert report.verdict.verdict is Outcome.PASS
    assert len(report.measurements) == len(lines) > 0
    assert report.complaints == ()


def test_folder_without_a_verdict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError) as caught:
        read_report(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no verdict.json: it is not the folder of a finished run"
    )


def test_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"holds no verdict\.json"):
        read_report(folder / "verdict.json")


def test_verdict_that_breaks_the_schema_is_refused_by_field(folder: Path) -> None:
    path = folder / "verdict.json"
    data = json.loads(path.read_text())
    path.write_text(seal({**data, "verdict": "MAYBE"}))
    with pytest.raises(UnreadableFileError) as caught:
        read_report(folder)
    assert str(caught.value) == (f"{path}: verdict: it must be 'PASS', 'NOT_COMPARED' or 'FAIL'")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        lambda text: text.replace("0.00", "0.01", 1),
        lambda text: text + text.splitlines(keepends=True)[0],
        lambda _: "",
    ],
    ids=["cut-short", "one-digit", "one-row-more", "emptied"],
)
def test_changed_measurements_are_not_shown(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "measurements.jsonl"
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    report = read_report(folder)
    assert report.measurements == []
    (note,) = report.notes
    assert note == (
        "measurements.jsonl was changed after the run:"
        " tables and pictures that are drawn from it are empty"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"verdict": "PASS"}, "it was changed after assay wrote it: its digest differs"),
        ({"digest": None}, "it was changed after assay wrote it: its digest differs"),
    ],
    ids=["outcome", "digest"],
)
def test_changed_verdict_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = write_sample(tmp_path, Sample(num_layers=3)) / "verdict.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UnreadableFileError) as caught:
        read_report(tmp_path)
    assert str(caught.value) == f"{path}: {problem}"


def test_verdict_without_a_digest_says_so(folder: Path) -> None:
    path = folder / "verdict.json"
    content = json.loads(path.read_text())
    del content["digest"]
    path.write_text(json.dumps(content))
    (note,) = read_report(folder).notes
    assert note == "verdict.json has no digest: a change of it cannot be seen"


def test_verdict_that_contradicts_its_levels_is_refused(tmp_path: Path) -> None:
    path = write_sample(tmp_path, Sample(num_layers=3)) / "verdict.json"
    path.write_text(seal({**json.loads(path.read_text()), "verdict": "PASS"}))
    with pytest.raises(
        UnreadableFileError, match="the verdict is PASS, and its levels amount to FAIL"
    ):
        read_report(tmp_path)


def test_links_in_the_folder_of_a_run_are_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "verdict.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UnreadableFileError, match="it is a symbolic link"):
        read_report(folder)


def test_absent_measurements_are_reported(folder: Path) -> None:
    (folder / "measurements.jsonl").unlink()
    assert read_report(folder).notes == [
        "measurements.jsonl is absent: tables and pictures that are drawn from it are empty"
    ]


def test_worst_of_a_level_is_the_worst_by_its_own_limit() -> None:
    verdict = Verdict(verdict=Outcome.FAIL, levels={"modules": Level(verdict=Outcome.FAIL)})
    over = measured(statistic="replay-slope", ratio=8.0, limit=2.0)
    unjudged = measured(statistic="token", ratio=99.0, limit=None)
    report = Report(Path("run"), verdict, [measured(ratio=12.0, limit=6.0), over, unjudged])
    assert [rung.worst for rung in report.ladder] == [over]


def test_resolution_of_a_level_is_that_of_its_worst_statistic() -> None:
    verdict = Verdict(verdict=Outcome.FAIL, levels={"modules": Level(verdict=Outcome.FAIL)})
    pooled = measured(statistic="logits-error", ratio=1.0, limit=2.0)
    whole = measured(statistic="logits-whole", ratio=8.0, limit=3.0)
    slope = measured(statistic="replay-slope", ratio=9.0, limit=2.0)
    for rows, expected in (([pooled, whole], whole), ([pooled, slope], pooled)):
        (rung,) = Report(Path("run"), verdict, rows).ladder
        assert rung.coarsest is expected


def test_level_that_did_not_decide_has_the_ratio_of_its_suspect() -> None:
    place: dict[str, Any] = {"phase": "backward", "module": "a"}
    stated = measured(level="gradients", statistic="replay-tensor", ratio=8.4, limit=5.5, **place)
    channel = measured(
        level="gradients", statistic="replay-channel", ratio=24.5, limit=10.0, **place
    )
    suspect = Suspect(
        location=Location(**place), statistic="replay-tensor", noise_ratio=8.4, limit=5.5
    )
    levels = {"gradients": Level(verdict=Outcome.FAIL)}
    verdict = Verdict(verdict=Outcome.FAIL, levels=levels, suspects=[suspect])
    report = Report(Path("run"), verdict, [channel, stated])
    assert [rung.worst for rung in report.ladder] == [stated]


def test_level_without_judged_measurements_has_no_worst() -> None:
    verdict = Verdict(verdict=Outcome.FAIL, levels={"tokens": Level(verdict=Outcome.FAIL)})
    report = Report(Path("run"), verdict, [measured()])
    assert [(rung.name, rung.worst) for rung in report.ladder] == [("tokens", None)]


def test_levels_are_in_the_order_of_the_verdict() -> None:
    names = ["run", "loss", "updates", "checkpoint"]
    levels = {name: Level(verdict=Outcome.PASS) for name in names}
    report = Report(Path("run"), Verdict(verdict=Outcome.FAIL, levels=levels), [])
    assert [rung.name for rung in report.ladder] == names


def test_a_failure_that_no_measurement_shows_has_no_ratio() -> None:
    row = Measurement(
        level="inputs", module="", port="input_ids", statistic="exact", actual=0.0, expected=0.0,
        ratio=0.0, limit=0.0,
    )  # fmt: skip
    levels = {"inputs": Level(verdict=Outcome.FAIL, reason="9 labels are shifted", compared=3)}
    report = Report(Path("run"), Verdict(verdict=Outcome.FAIL, levels=levels), [row])
    (rung,) = report.ladder
    assert (rung.cells["ratio / limit"], rung.cells["worst"]) == ("", "9 labels are shifted")


def test_rung_holds_what_else_its_level_found() -> None:
    level = Level.model_validate(
        {
            "verdict": "PASS",
            "limit": 3.0,
            "kl_mean": 8.97e-7,
            "resolution": {"replay-row": 0.02},
            "next": [{"purpose": "restore it", "command": "git checkout x"}],
        }
    )
    report = Report(Path("run"), Verdict(verdict=Outcome.PASS, levels={"logits": level}), [])
    assert report.ladder[0].facts == [("kl_mean", "8.97e-7"), ("resolution.replay-row", "2e-2")]


def test_five_suspects_are_shown_where_there_is_little_room() -> None:
    suspect = {"statistic": "replay-tensor", "noise_ratio": 9.0, "limit": 3.0}
    suspects = [
        Suspect.model_validate({**suspect, "location": {"phase": "forward", "module": str(n)}})
        for n in range(7)
    ]
    report = Report(Path("run"), Verdict(verdict=Outcome.FAIL, suspects=suspects), [])
    assert [item.location.module for item in report.top_suspects] == ["0", "1", "2", "3", "4"]


def test_nested_facts_become_dotted_names() -> None:
    verdict = Verdict(
        verdict=Outcome.PASS,
        environment={"torch": "2.13", "cpu": {"name": "x", "flags": ["a", "b"]}},
    )
    assert Report(Path("run"), verdict).facts == {
        "Environment": [("torch", "2.13"), ("cpu.name", "x"), ("cpu.flags", "a, b")]
    }


def test_tokens_that_fail_within_the_limit_of_a_tie_say_what_decided() -> None:
    row = Measurement(
        level="tokens", module="", port="tokens", statistic="first-difference", actual=1.0,
        expected=0.4, ratio=2.5, limit=4.0,
    )  # fmt: skip
    rung = LadderRung("tokens", Level(verdict=Outcome.FAIL, compared=3), row)
    assert rung.cells["ratio / limit"] == ""
    assert rung.cells["worst"] == "another token was chosen, and the logits differ"
    passed = LadderRung("tokens", Level(verdict=Outcome.PASS, compared=3), row)
    assert passed.cells["ratio / limit"] == "2.5x / 4.0x"


@pytest.mark.parametrize(
    ("order", "mark"),
    [(1, " (named above: first in the order of the model)"), (3, " (named above)")],
)
def test_named_place_behind_a_worse_one_has_its_reason(order: int, mark: str) -> None:
    rows = [
        measured(module="a", ratio=8.0, order=order),
        measured(module="b", ratio=40.0, order=2),
        measured(module="c", ratio=1.0, order=0),
    ]
    suspects = [
        Suspect(
            location=Location(phase="forward", module=row.module), statistic=row.statistic,
            error=row.actual, noise_ratio=row.ratio, limit=4.0,
        )
        for row in (rows[1], rows[0])
    ]  # fmt: skip
    verdict = Verdict(
        verdict=Outcome.FAIL, location=suspects[1].location, suspects=suspects,
        noise_ratio=8.0, limit=4.0, statistic="replay-tensor",
    )  # fmt: skip
    report = Report(Path("run"), verdict, rows)

    cells = [line["suspect"] for line in report.suspect_cells(suspects)]
    assert cells == ["b (forward, step 0)", f"a (forward, step 0){mark}"]


def test_a_failure_whose_level_gives_a_reason_has_it_in_the_table() -> None:
    reason = "the loss of step 2 is 1.5, and 1.25 with another split of the rows"
    verdict = Verdict(
        verdict=Outcome.FAIL,
        levels={"equivalent": Level(verdict=Outcome.FAIL, reason=reason)},
        location=Location(phase="optimizer"),
        compared_unit="losses, tensors and runs",
        statistic="trajectory-error",
        noise_ratio=0.0764,
        limit=0.0073,
    )
    cells = Report(Path("runs/1"), verdict).index_cells
    assert cells["what"] == f"equivalent: {reason}"
    assert cells["ratio / limit"] == "7.64e-2x / 7.3e-3x"
