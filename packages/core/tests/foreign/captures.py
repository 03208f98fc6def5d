"""Captures of models in other frameworks, each with the same weights as a model in transformers.

`captures.tar.xz` holds the traces that the scripts in `making` wrote, each in an environment with the
library that it names. All clean captures agree with transformers: the logits differ by 6e-7 or less.
"""

import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.dumps.recognizing import open_dump
from assay.offline.check import CompareOptions, compare_dumps
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.trials.tables import markdown_table, number

_CAPTURES = Path(__file__).with_name("captures.tar.xz")

CLEAN = "clean"
# The module whose weight is wrong, by the name of the fault in making/models.py.
FAULTS = {
    "k_proj": "model.layers.0.self_attn.k_proj",
    "v_proj": "model.layers.1.self_attn.v_proj",
    "o_proj": "model.layers.1.self_attn.o_proj",
    "up_proj": "model.layers.1.mlp.up_proj",
    "down_proj": "model.layers.1.mlp.down_proj",
}
_EXPERTS = "model.layers.1.mlp.experts"
# Models of a framework; those of vLLM generate four tokens.
_MODELS = {
    "litgpt": ("llama",),
    "fms": ("llama",),
    "megatron": ("llama",),
    "transformer_lens": ("llama", "qwen3"),
    "vllm": ("llama-32", "qwen3", "mixtral"),
}


@dataclass(frozen=True)
class Capture:
    """A trace of a framework's model.

    fault: a name in `FAULTS`, or `CLEAN`.
    """

    framework: str
    model: str
    fault: str

    @property
    def name(self) -> str:
        """The folder of the trace."""
        return f"{self.framework}-{self.model}-{self.fault}"

    @property
    def expected(self) -> str:
        """The folder of the trace that transformers computed without a fault."""
        return f"transformers-{self.model}{'-generate' * (self.framework == 'vllm')}"

    @property
    def module(self) -> str | None:
        """The module that makes the error."""
        if self.model == "mixtral" and self.fault in ("up_proj", "down_proj"):
            return _EXPERTS
        return FAULTS.get(self.fault)


@dataclass(frozen=True)
class Judged:
    """A capture and the verdict on it."""

    capture: Capture
    verdict: Verdict

    @property
    def located(self) -> bool:
        """True if the verdict fails at the wrong weight."""
        found = self.verdict.location
        return (
            self.verdict.verdict is Outcome.FAIL
            and found is not None
            and found.module == self.capture.module
        )


def captures_with(faults: Iterable[str], wanted: str = "") -> list[Capture]:
    """Return the captures with these faults whose name contains `wanted`."""
    found = [
        Capture(framework, model, fault)
        for framework, models in _MODELS.items()
        for model in models
        for fault in faults
    ]
    return [one for one in found if wanted in one.name]


def judge_all(captures: Sequence[Capture], folder: Path) -> list[Judged]:
    """Compare captures with those of transformers. They are unpacked into `folder`."""
    with tarfile.open(_CAPTURES) as packed:
        packed.extractall(folder, filter="data")
    return [Judged(one, _compare(folder / one.expected, folder / one.name)) for one in captures]


def _compare(expected: Path, actual: Path) -> Verdict:
    comparison = CompareOptions(str(expected), str(actual))
    return compare_dumps(
        comparison, open_dump(expected), open_dump(actual), SilentProgress()
    ).verdict


def captures_table(judged: Sequence[Judged]) -> str:
    """One row for each capture, as Markdown."""
    head = ("framework", "model", "fault", "verdict", "location", "ratio", "limit", "compared")
    rows = []
    for one in judged:
        capture, verdict = one.capture, one.verdict
        location = (verdict.location.module or "(model)") if verdict.location else ""
        rows.append((
            capture.framework, capture.model, capture.fault, verdict.verdict.value, location,
            number(verdict.noise_ratio), number(verdict.limit), str(verdict.compared),
        ))  # fmt: skip
    return markdown_table(head, rows)
