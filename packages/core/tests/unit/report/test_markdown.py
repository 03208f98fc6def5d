"""The Markdown format: whole outputs."""

from pathlib import Path

import pytest

from assay.report.markdown import render_markdown
from assay.report.run_report import Report, read_report
from assay.verdicts import Level, Outcome, Verdict
from packages.core.tests.unit.report.sample_runs import Sample, write_hostile_sample, write_sample


@pytest.fixture(autouse=True)
def inside_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_failure_is_summarised_whole() -> None:
    sample = Sample(1, 2, 18, 2, "model.layers.0.mlp.down_proj")
    report = read_report(write_sample(Path("runs/0412"), sample))
    assert render_markdown(report) == (
        "## ✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32\n"
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
        "| suspect | what | ratio / limit |\n"
        "|---|---|--:|\n"
        "| model.layers.0.mlp.down_proj (forward, step 0) (named above) | relative error 4.09e-2"
        " | 14.6x / 3.0x |\n"
        "| model.layers.0.mlp (forward, step 0) | systematic scale error 2.52e-2 | 9.0x / 7.0x |\n"
        "| lm_head (forward, step 0) | systematic error by size of the value 1.46e-2"
        " | 5.2x / 5.0x |\n"
        "\n"
        "resolution 8.4e-3 (modules, at model.layers.0.mlp.down_proj): a smaller relative error may"
        " not have been seen\n"
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
        "  resolution 8.4e-3: a smaller relative error may not have been seen\n"
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
