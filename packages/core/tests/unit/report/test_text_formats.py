"""Reports on the terminal and as Markdown: whole outputs."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from assay.report.page.html import render_index
from assay.report.run_report import Report, read_report
from assay.report.text_formats import (
    print_index,
    print_report,
    render_markdown,
    render_markdown_of,
)
from assay.verdicts import Level, Outcome, Unmatched, Verdict
from packages.core.tests.unit.report.sample_runs import Sample, write_hostile_sample, write_sample

FAILED = Sample(1, 2, 18, 2, "model.layers.0.mlp.down_proj")
CLEAN = Sample(1, 2, 18, 2, None)


@pytest.fixture(autouse=True)
def inside_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(report: Report, width: int = 100) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    print_report(report, console, Path("runs/0412/report.html"))
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def test_a_failure_with_its_golden_is_offered_as_a_folder() -> None:
    report = read_report(write_sample(Path("runs/0412"), FAILED))
    Path("runs/0412/golden").mkdir()
    lines = printed(report).splitlines()
    assert lines[-1] == "Next: assay reproduce runs/0412"
    assert [line for line in lines if "explain" in line] == [
        "  its causes: assay explain module-error"
    ]
    assert (
        "\n  its causes: assay explain module-error\nNext: assay reproduce runs/0412\n```"
        in render_markdown(report)
    )
    passed = read_report(write_sample(Path("runs/0413"), CLEAN))
    Path("runs/0413/golden").mkdir()
    assert "reproduce" not in printed(passed)


def test_the_command_to_repeat_a_run_names_no_output_folder() -> None:
    report = read_report(write_sample(Path("runs/0412"), FAILED))
    words = [
        "assay",
        "smoke",
        "run",
        "a b",
        "--output",
        "runs/0412",
        "--device",
        "cpu",
        "--output=x",
    ]
    again = replace(report, verdict=report.verdict.model_copy(update={"command": words}))
    assert again.command == "assay smoke run 'a b' --device cpu"
    assert "To repeat it:\n\n```text\nassay smoke run 'a b' --device cpu\n" in render_markdown(
        again
    )


def test_failure_is_printed_whole() -> None:
    report = read_report(write_sample(Path("runs/0412"), FAILED))
    assert printed(report) == (
        "✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32\n"
        "model.layers.0.mlp.down_proj (forward, step 0) differs from the reference.\n"
        "  relative error 4.09e-2 = 14.6x the bfloat16 noise of the same module "
        "(limit 3.0x, calibrated on 312 clean runs)\n"
        "  worst row: prompt 1, token 17, error 0.139 = 91.0x its noise\n"
        "  first token affected: prompt 0, position 3 (prefill)\n"
        "  its inputs agree (they are the reference's own): the error is made here\n"
        "  diagnosis module-error: one module computes something else from the same inputs\n"
        "\n"
        "  level    verdict  compared  ratio / limit  resolution  worst\n"
        "  inputs   PASS            9\n"
        "  tokens   PASS            2    0.5x / 6.0x              logit gap where the tokens first differ\n"
        f"{'':57}0.25\n"
        "  logits   PASS           40   1.2x / 10.0x              mean KL divergence 1.2e-4\n"
        "  modules  FAIL           38   14.6x / 3.0x      8.4e-3  relative error 4.09e-2\n"
        "  sampler  not run                                       greedy decoding has no sampler\n"
        "\n"
        "Suspects (3 of 3), furthest over their limits first, equal ones in the order of the model:\n"
        f"  suspect{'':36}what{'':38}ratio / limit\n"
        f"  model.layers.0.mlp.down_proj (forward,     relative error 4.09e-2{'':21}14.6x / 3.0x\n"
        "  step 0) (named above)\n"
        f"  model.layers.0.mlp (forward, step 0)       systematic scale error 2.52e-2{'':14}9.0x / 7.0x\n"
        "  lm_head (forward, step 0)                  systematic error by size of the value"
        "       5.2x / 5.0x\n"
        f"{'':45}1.46e-2\n"
        "resolution 8.4e-3 (modules, at model.layers.0.mlp.down_proj): an error above it is always seen;"
        " below it, only some systematic ones are\n"
        "report: runs/0412/report.html\n"
        "Next: assay explain module-error\n"
    )


def test_each_broken_property_of_code_is_printed_with_its_smallest_case() -> None:
    finding = {
        "name": "one row each", "reason": "a row is lost\nand another", "example": ["sample 0", "> 1"],
        "failed": 2, "cases": 3,
    }  # fmt: skip
    subjects = [
        {"subject": "a.py:good", "findings": []},
        {"subject": "b.py:bad", "findings": [finding]},
    ]
    level = Level.model_validate({"verdict": "FAIL", "reason": "b", "subjects": subjects})
    verdict = Verdict(verdict=Outcome.FAIL, model={"name": "m"}, levels={"collator": level})
    assert (
        "\n\ncollator: b.py:bad\n  must hold: one row each; broken in 2 of 3 cases\n"
        "    a row is lost\n    and another\n    sample 0\n    > 1\nreport: "
    ) in printed(Report(Path("runs/0412"), verdict))


def test_a_file_gets_paths_of_modules_on_one_line() -> None:
    report = read_report(write_sample(Path("runs/0412"), FAILED))
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=40))
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    (line,) = [one for one in lines if one.endswith("14.6x / 3.0x")]
    assert line.startswith("model.layers.0.mlp.down_proj (forward, step 0) (named above)")
    assert "inputs   PASS            9" in lines


def test_pass_is_short_and_states_its_resolution() -> None:
    report = read_report(write_sample(Path("runs/0412"), CLEAN))
    assert printed(report) == (
        "✓ PASS: micro:llama on cpu/bfloat16 against cpu/float32\n"
        "The candidate agrees with the reference.\n"
        "  compared 89 tensor pairs (inputs 9, tokens 2, logits 40, modules 38)\n"
        "  not run: sampler: greedy decoding has no sampler\n"
        "  resolution 8.4e-3 (modules, at (model)): an error above it is always seen; below it, only some systematic ones are\n"
        "report: runs/0412/report.html\n"
    )


def test_not_compared_is_printed_whole() -> None:
    verdict = Verdict(
        verdict=Outcome.NOT_COMPARED,
        model={"name": "micro:llama"},
        levels={
            "inputs": Level(verdict=Outcome.PASS, compared=9),
            "modules": Level(verdict=Outcome.NOT_COMPARED, reason="the candidate calls no module"),
        },
        unmatched=Unmatched(expected=["model.norm:output"]),
        notes=["the reference is not deterministic"],
        compared=9,
    )
    assert printed(Report(Path("runs/0412"), verdict)) == (
        "? NOT_COMPARED: micro:llama on the candidate against the reference\n"
        "Not everything that was asked for could be compared: this is not a pass.\n"
        "  compared 9 tensor pairs (inputs 9)\n"
        "  modules was not compared: the candidate calls no module\n"
        "  expected and not found (1): model.norm:output\n"
        "\n"
        # The reason is above: a column without text is left out.
        "  level    verdict       compared\n"
        "  inputs   PASS                 9\n"
        "  modules  NOT_COMPARED\n"
        "note: the reference is not deterministic\n"
        "report: runs/0412/report.html\n"
    )


def test_a_long_reason_that_no_sentence_gives_follows_the_table() -> None:
    long = "underpowered: " + "the change is between -0.3 and +0.2; " * 5
    verdict = Verdict(
        verdict=Outcome.FAIL,
        model={"name": "micro:llama"},
        levels={
            "cloze": Level(verdict=Outcome.FAIL, reason="it is lower", compared=9),
            "sums": Level(verdict=Outcome.NOT_COMPARED, reason=long, compared=9),
        },
        compared=18,
    )
    lines = printed(Report(Path("runs/0412"), verdict), width=300).splitlines()
    assert "  sums   NOT_COMPARED         9" in lines
    assert f"sums: {long.strip()}" in lines


def test_narrow_terminal_gets_every_number_whole() -> None:
    report = read_report(write_sample(Path("runs/0412"), FAILED))
    text = printed(report, width=60)
    assert "14.6x / 3.0x" in text
    table = [line for line in text.splitlines() if line.startswith("  modules")]
    assert len(table) == 1
    assert max(len(line) for line in table) <= 60


def test_commands_are_not_broken_into_lines() -> None:
    report = read_report(write_sample(Path("runs/0412"), FAILED))
    command = "Next: assay explain module-error"
    assert command in printed(report, width=40).splitlines()


def test_names_are_neither_markup_nor_control_sequences() -> None:
    folder = write_hostile_sample(Path("runs/0412"), "[red]x[/red]\x1b[2J")
    text = printed(read_report(folder))
    assert r"[red]x[/red]\u001b[2J (forward, step 0) differs from the reference." in text
    assert "\x1b" not in text


def test_colours_are_for_terminals_only() -> None:
    report = Report(Path("run"), Verdict(verdict=Outcome.PASS, compared=1))
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=80)
    print_report(report, console)
    assert "\x1b[1;34mPASS\x1b[0m" in stream.getvalue()
    assert "\x1b" not in printed(report)


def test_several_runs_are_listed_in_one_table() -> None:
    failed = read_report(write_sample(Path("runs/1"), FAILED))
    passed = Report(Path("runs/2"), Verdict(verdict=Outcome.PASS, compared=1))
    level = Level(verdict=Outcome.NOT_COMPARED, reason="nothing was compared")
    unknown = Report(
        Path("runs/4"), Verdict(verdict=Outcome.NOT_COMPARED, levels={"logits": level})
    )
    stream = io.StringIO()
    console = Console(file=stream, width=60)  # a file gets each row on one line
    place, error = "model.layers.0.mlp.down_proj", "relative error 4.09e-2"
    nobody = "the model on the candidate against the reference"
    sides = "check generate of micro:llama on cpu/bfloat16 against cpu/float32"
    print_index([failed, unknown, passed], console, Path("runs/3/index.html"))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines == [
        "1 FAIL, 1 NOT_COMPARED, 1 PASS",
        f"verdict       folder  run{'':64}where{'':25}what{'':26}ratio / limit",
        f"FAIL          runs/1  {sides}  {place:<28}  {error:<28}   14.6x / 3.0x",
        f"NOT_COMPARED  runs/4  {nobody:<65}  {'':28}  logits: nothing was compared",
        f"PASS          runs/2  {nobody}",
        "report: runs/3/index.html",
    ]


@pytest.fixture
def refused() -> list[Report]:
    """Fourteen runs that were refused for one long reason, and one that was not."""
    reason = "a package is absent: " + "install it " * 30
    level = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    verdict = Verdict(verdict=Outcome.NOT_COMPARED, levels={"run": level})
    reports = [Report(Path(f"/home/me/job/cases/{number}"), verdict) for number in range(14)]
    return [*reports, Report(Path("/elsewhere/2"), Verdict(verdict=Outcome.PASS, compared=1))]


def test_runs_with_equal_results_share_a_line(refused: list[Report]) -> None:
    nobody = "the model on the candidate against the reference"
    table, _, rest = render_markdown_of(refused, Path("/home/me/job")).partition("\n\n")
    _, _, first, second = table.splitlines()
    words = f"run: a package is absent: {'install it ' * 30}"[:120]
    assert (
        first == f"| NOT_COMPARED | cases/0 and 13 more | {nobody} and 13 more |  | {words}... |  |"
    )
    assert second == f"| PASS | /elsewhere/2 | {nobody} |  |  |  |"
    assert rest.count("## ") == 1
    assert f"<details><summary>✓ PASS: {nobody}</summary>" in rest  # a PASS is folded


def test_runs_whose_causes_differ_have_lines_of_their_own() -> None:
    reports = [
        Report(
            Path(f"runs/{cause}"),
            Verdict(
                verdict=Outcome.FAIL,
                levels={
                    "resume": Level(verdict=Outcome.FAIL, reason="the loss differs " * 9 + cause)
                },
            ),
        )
        for cause in ("the seed", "the rate")
    ]
    text = render_markdown_of(reports, Path("runs"))
    assert text.count("## ") == 2
    assert "<details><summary>✗ FAIL" not in text


def test_the_page_of_runs_names_folders_from_its_own(refused: list[Report]) -> None:
    page = render_index(refused, {}, Path("/home/me/job"))
    assert "/home/me" not in page
    assert "<summary>and 13 more</summary>cases/1<br>" in page


def test_failure_is_summarised_whole() -> None:
    sample = Sample(1, 2, 18, 2, "model.layers.0.mlp.down_proj")
    report = read_report(write_sample(Path("runs/0412"), sample))
    assert render_markdown(report) == (
        "## ✗ FAIL: check generate of micro:llama on cpu/bfloat16 against cpu/float32\n"
        "\n"
        "```text\n"
        "model.layers.0.mlp.down_proj (forward, step 0) differs from the reference.\n"
        "  relative error 4.09e-2 = 14.6x the bfloat16 noise of the same module "
        "(limit 3.0x, calibrated on 312 clean runs)\n"
        "  worst row: prompt 1, token 17, error 0.139 = 91.0x its noise\n"
        "  first token affected: prompt 0, position 3 (prefill)\n"
        "  its inputs agree (they are the reference's own): the error is made here\n"
        "  diagnosis module-error: one module computes something else from the same inputs\n"
        "Next: assay explain module-error\n"
        "```\n"
        "\n"
        "| level | verdict | compared | ratio / limit | resolution | worst |\n"
        "|---|---|--:|--:|--:|---|\n"
        "| inputs | PASS | 9 |  |  |  |\n"
        "| tokens | PASS | 2 | 0.5x / 6.0x |  | logit gap where the tokens first differ 0.25 |\n"
        "| logits | PASS | 40 | 1.2x / 10.0x |  | mean KL divergence 1.2e-4 |\n"
        "| modules | FAIL | 38 | 14.6x / 3.0x | 8.4e-3 | relative error 4.09e-2 |\n"
        "| sampler | not run |  |  |  | greedy decoding has no sampler |\n"
        "\n"
        "Suspects, furthest over their limits first, equal ones in the order of the model:\n"
        "\n"
        "| suspect | what | ratio / limit |\n"
        "|---|---|--:|\n"
        "| model.layers.0.mlp.down_proj (forward, step 0) (named above) | relative error 4.09e-2"
        " | 14.6x / 3.0x |\n"
        "| model.layers.0.mlp (forward, step 0) | systematic scale error 2.52e-2 | 9.0x / 7.0x |\n"
        "| lm_head (forward, step 0) | systematic error by size of the value 1.46e-2"
        " | 5.2x / 5.0x |\n"
        "\n"
        "resolution 8.4e-3 (modules, at model.layers.0.mlp.down_proj): an error above it is always seen;"
        " below it, only some systematic ones are\n"
        "\n"
        "To repeat it:\n"
        "\n"
        "```text\n"
        "assay check generate micro:llama --reference cpu/float32 --candidate cpu/bfloat16\n"
        "```\n"
        "\n"
        "<details><summary>Where it ran, and with what</summary>\n"
        "\n"
        "| | |\n"
        "|---|---|\n"
        "| Model: name | micro:llama |\n"
        "| Model: parameters | 430000 |\n"
        "| Reference: run | cpu/float32 |\n"
        "| Reference: yardstick | float64 |\n"
        "| Candidate: run | cpu/bfloat16 |\n"
        "| Candidate: attention | sdpa |\n"
        "| Environment: assay | 0.1.0 |\n"
        "| Environment: torch | 2.13.0 |\n"
        "| Environment: threads | 2 |\n"
        "| Environment: cpu.name | a laptop |\n"
        "| Environment: cpu.features | avx2, amx_bf16 |\n"
        "\n"
        "</details>\n"
    )


def test_pass_is_summarised_whole() -> None:
    verdict = Verdict(
        verdict=Outcome.PASS,
        levels={"tokens": Level(verdict=Outcome.PASS, compared=4)},
        notes=["prompt 2 ends in a near-tie"],
        resolution=0.0084,
        compared=4,
    )
    assert render_markdown(Report(Path("runs/1"), verdict)) == (
        "## ✓ PASS: the model on the candidate against the reference\n"
        "\n"
        "```text\n"
        "The candidate agrees with the reference.\n"
        "  compared 4 tensor pairs (tokens 4)\n"
        "  resolution 8.4e-3: an error above it is always seen; below it, only some systematic ones are\n"
        "```\n"
        "\n"
        "| level | verdict | compared | ratio / limit | resolution | worst |\n"
        "|---|---|--:|--:|--:|---|\n"
        "| tokens | PASS | 4 |  |  |  |\n"
        "\n"
        "- prompt 2 ends in a near-tie\n"
    )


def test_names_cannot_leave_their_cell_or_block() -> None:
    text = "a|b ```\n# title <img src=x>"
    rendered = render_markdown(read_report(write_hostile_sample(Path("runs/1"), text)))
    assert "a\\|b \\`\\`\\`\\\\n\\# title &lt;img src=x&gt;" in rendered
    outside = rendered.split("````")[0::2]  # the fence is longer than any run inside
    assert len(outside) > 1
    assert all("<img" not in part for part in outside)


def test_reason_in_a_note_is_not_repeated_in_the_table() -> None:
    levels = {
        "good": Level(verdict=Outcome.PASS, reason="better than a guess", compared=9),
        "bad": Level(verdict=Outcome.FAIL, reason="worse than a guess", compared=9),
    }
    verdict = Verdict(
        verdict=Outcome.FAIL, levels=levels, headline="Failed: bad.", notes=["good: better than a guess"],
    )  # fmt: skip
    text = printed(Report(Path(), verdict))
    assert text.count("better than a guess") == text.count("worse than a guess") == 1
