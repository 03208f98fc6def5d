"""Captures of models in other frameworks, each with the same weights as a model in transformers.

`captures.tar.xz` holds the traces that the scripts in `making` wrote, each in an environment with the
library that it names. All clean captures agree with transformers: the logits differ by 6e-7 or less.
"""

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packages.core.tests.foreign.judged import CLEAN, Judged, compare

_CAPTURES = Path(__file__).with_name("captures.tar.xz")

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
    def modules(self) -> tuple[str, ...]:
        """The module that makes the error; none without a fault."""
        if self.fault == CLEAN:
            return ()
        if self.model == "mixtral" and self.fault in ("up_proj", "down_proj"):
            return (_EXPERTS,)
        return (FAULTS[self.fault],)


def captures_with(faults: Iterable[str], wanted: str = "") -> list[Capture]:
    """Return the captures with these faults whose name contains `wanted`."""
    found = [
        Capture(framework, model, fault)
        for framework, models in _MODELS.items()
        for model in models
        for fault in faults
    ]
    return [one for one in found if wanted in one.name]


def judge_captures(captures: Iterable[Capture], folder: Path) -> Iterator[Judged]:
    """Compare captures with those of transformers. They are unpacked into `folder`."""
    with tarfile.open(_CAPTURES) as packed:
        packed.extractall(folder, filter="data")
    for one in captures:
        verdict = compare(folder / one.expected, folder / one.name)
        yield Judged(one.framework, one.model, one.fault, one.modules, verdict)
