"""The code of docs/smoke-data.md behaves as the page says."""

import io
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from assay.plugins import load_object
from assay.report.run_report import Report
from assay.report.text_formats import print_report
from assay_smoke.data import collating, sampling
from assay_smoke.data.tokens import micro_tokenizer
from assay_smoke.data.verdict import (
    DataAnswer,
    DataRequest,
    Subject,
    judge_data,
)

PAGE = (Path(__file__).parents[5] / "docs/smoke-data.md").read_text(encoding="utf-8")


def documented(name: str, folder: Path, *, without: str = "") -> Any:
    """Load the function `name` from the page. without: a line to delete from it."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if f"def {name}(" in block
    ]
    file = folder / "mine.py"
    file.write_text(code.replace(without, ""), encoding="utf-8")
    return load_object(f"{file}:{name}")


def test_the_collator_loses_the_end_of_samples_in_10_of_20_cases(tmp_path: Path) -> None:
    tokenizers = [micro_tokenizer("own"), micro_tokenizer("eos")]
    collator = documented("pad_and_mask", tmp_path)
    (finding,) = collating.check_padding(Subject("it"), collator, tokenizers, "plain").findings
    told = f"must hold: {finding.name}; broken in {finding.failed} of {finding.cases} cases"
    assert told in PAGE
    for line in (finding.reason, *finding.example):
        assert line in PAGE


def test_the_sampler_holds(tmp_path: Path) -> None:
    plans = [plan for plan in sampling.SAMPLER_PLANS if plan.num_samples == 12]
    report = sampling.check_sampling(Subject("it"), documented("epochs", tmp_path), plans)
    assert report.findings == []
    assert report.untried == []


def test_the_sampler_without_its_epoch_fails_as_shown(tmp_path: Path) -> None:
    run = documented("epochs", tmp_path, without="        sampler.set_epoch(epoch)\n")
    report = sampling.check_sampling(Subject("train.py:epochs"), run)
    request = DataRequest(own_code={"sampler": "train.py:epochs"})
    verdict = judge_data(request, DataAnswer(reports=[("sampler", report)]))
    stream = io.StringIO()
    print_report(Report(tmp_path, verdict), Console(file=stream), Path("runs/2/report.html"))
    printed = "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
    assert printed in PAGE
