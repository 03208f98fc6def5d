"""Why a candidate differs from a golden of another environment: the model's code, a library's rounding, or neither.

The trusted side replays the golden's calls here, in the yardstick's precision. Where its values differ by more than
rounding, the code of the model changed. A candidate that fails is checked once more, against a reference of
this environment. That reference shares any fault of a library here, so an agreement explains small errors only.
"""

from collections.abc import Sequence
from dataclasses import replace

from assay.dtypes import ENVIRONMENT_ROUNDING
from assay.generate.find_operation import load_trusted
from assay.generate.generation_loop import count_tokens
from assay.generate.golden import GoldenSection
from assay.generate.passes import replay, whole_batches
from assay.generate.spec import GenerateCheck
from assay.judge.code_changes import CodeChange, find_changes
from assay.models.config_files import attention_of
from assay.replay.modules import Replayer
from assay.runs import Progress
from assay.statistics import MOST_ROUNDING
from assay.verdicts import Measurement


def measure_drift(check: GenerateCheck, progress: Progress) -> list[CodeChange]:
    """Replay the golden's calls with the yardstick of this environment, and list changes in their order."""
    section = GoldenSection.open(check.golden_folder, check.dtype)
    side = load_trusted(check, section, "yardstick")
    # As they were recorded: single steps would round what earlier ones leave in the cache.
    steps = section.steps.whole
    works = [
        replace(work, text_step=steps.get(work.batch.number))
        for work in whole_batches(section.batches)
    ]
    replayer = Replayer(section.trace, section.boundary, attention_of(side.loaded))
    num_tokens = count_tokens(work.batch for work in works)
    with progress.task("replaying the golden in this environment", num_tokens, "tokens"):
        results = replay(side, works, section.tensors("tokens"), replayer)
    stored = str(section.boundary.stored or "float64").removeprefix("torch.")
    return find_changes(results, ENVIRONMENT_ROUNDING[stored])


def is_rounding(measurements: Sequence[Measurement]) -> bool:
    """Return True if no error is further over its limit than another order of the same sums explains."""
    # The KL divergence is the square of an error, and values that must be equal have a limit of 0.
    shares = [
        one.ratio / one.limit for one in measurements if one.limit and one.statistic not in _SQUARES
    ]
    return bool(shares) and all(share <= MOST_ROUNDING for share in shares)


_SQUARES = ("logits-kl", "logits-kl-worst")
