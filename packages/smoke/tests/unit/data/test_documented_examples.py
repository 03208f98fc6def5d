"""The code of docs/smoke-data.md behaves as the page says."""

import re
from pathlib import Path
from typing import Any

from assay.plugins import load_object
from assay_smoke.data import collating, sampling
from assay_smoke.data.tokens import micro_tokenizer
from assay_smoke.data.verdict import Subject

PAGE = (Path(__file__).parents[5] / "docs/smoke-data.md").read_text(encoding="utf-8")


def documented(name: str, folder: Path) -> Any:
    """Load the function `name` from the page."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if f"def {name}(" in block
    ]
    file = folder / "mine.py"
    file.write_text(code, encoding="utf-8")
    return load_object(f"{file}:{name}")


def test_the_collator_loses_the_end_of_samples_in_10_of_20_cases(tmp_path: Path) -> None:
    tokenizers = [micro_tokenizer("own"), micro_tokenizer("eos")]
    collator = documented("pad_and_mask", tmp_path)
    (finding,) = collating.check_padding(Subject("it"), collator, tokenizers, "plain").findings
    told = (
        f"broken in {finding.failed} of the {finding.cases} cases of this property: {finding.name}"
    )
    assert told in PAGE
    for line in (finding.reason, *finding.example):
        assert line in PAGE


def test_the_sampler_holds(tmp_path: Path) -> None:
    plans = [plan for plan in sampling.SAMPLER_PLANS if plan.num_samples == 12]
    report = sampling.check_sampling(Subject("it"), documented("epochs", tmp_path), plans)
    assert report.findings == []
    assert report.untried == []
