"""Is a difference one of representation: other values inside, the same model?

Shifting all positions changes queries and keys and no logit. Such a difference shows in exact
arithmetic as well: there the stages differ as much, and the logits not at all. An error of
precision is the opposite: in exact arithmetic it is gone. So the candidate's code is run once more
in float64 on the host.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.comparing.judge import Judged
from assay.comparing.results import ReplayResults
from assay.devices.registry import open_device
from assay.generate.passes.generation_loop import count_tokens
from assay.generate.passes.passes import Side, replay, run_forced, whole_batches
from assay.generate.processes.candidate import check_same_model
from assay.generate.processes.golden_folder import GoldenSection, read_golden
from assay.generate.processes.options import CandidateOptions
from assay.generate.processes.requests import EquivalenceRequest
from assay.locating.modules import Replayer
from assay.models import load_model
from assay.models.candidate_setup import apply_setup
from assay.models.loading.configs import attention_of
from assay.models.size_policy import choose_threads
from assay.plugins import load_object
from assay.runs import Progress

# Logits of one model computed in float64 in two ways differ by its rounding: shifted positions and
# permuted hidden units by 4e-16 on the micro models; this leaves a hundred times that for depth and
# for other orders of sums. A wrong scale that the next norm takes out again is no representation:
# the norm's epsilon shows it, by 5e-11 for 0.1 % and 4e-9 for 2 % before a norm of micro:gemma2.
EXACT_AGREEMENT = 1e-13

# A stage whose error in float64 is at least this share of the one in the candidate's dtype differs
# by what it computes, not by how precisely.
SAME_ERROR = 0.5


def run_equivalence(request: EquivalenceRequest, progress: Progress) -> dict[str, Any]:
    """Run the candidate's code in float64 on the host: logits first, stages if they agree."""
    golden = read_golden(Path(request.golden))
    section = GoldenSection.open(Path(request.golden), request.dtype)
    options = CandidateOptions.parse(request.options)
    choose_threads(golden.model.num_parameters)
    num_tokens = count_tokens(section.batches)
    # Two runs. The second happens only if the first agrees.
    with progress.task("runs the candidate's code in float64", 2 * num_tokens, "tokens"):
        loaded = load_model(
            request.model,
            dtype="float64",
            attention=options.attention,
            experts=options.experts,
            rounded_to=request.dtype,
            remote_code=request.remote_code,
        )
        check_same_model(golden, loaded)
        if request.setup is not None:
            model = apply_setup(load_object(request.setup), loaded.model, request.setup)
            loaded = replace(loaded, model=model)
        side = Side(replace(loaded, dtype="float64"), open_device("cpu"))
        works, tokens = whole_batches(section.batches), section.tensors("tokens")
        difference = scale = 0.0
        for work, forced, expected in zip(works, tokens, section.tensors("logits"), strict=True):
            logits = run_forced(side, work, forced).logits.double()
            difference += float((logits - expected.double()).pow(2).sum())
            scale += float(expected.double().pow(2).sum())
        # Written so that a NaN is no agreement.
        if not difference <= EXACT_AGREEMENT**2 * scale:
            return {"agrees": False, "stages": []}
        replayer = Replayer(section.trace, section.boundary, attention_of(side.loaded))
        results = replay(side, works, tokens, replayer)
    return {"agrees": True, "stages": _errors(results)}


def _errors(results: ReplayResults) -> list[dict[str, Any]]:
    return [
        {
            "module": port.module,
            "port": port.port,
            "error": port.sums.relative_error,
            "different": port.exact.num_different,
        }
        for port in results.ports.values()
        if port.sums.relative_error > 0 or port.exact.num_different
    ]


def is_representation(failed: Iterable[Judged], in_float64: list[dict[str, Any]]) -> bool:
    """Whether everything that failed differs as much in float64: by value, not by precision."""
    exact = {(row["module"], row["port"]): row for row in in_float64}
    return all(
        _differs_as_much(item, exact.get((item.port.module, item.port.port))) for item in failed
    )


def _differs_as_much(failed: Judged, in_float64: dict[str, Any] | None) -> bool:
    if in_float64 is None or failed.ratio.statistic == "non-finite":
        return False
    if failed.ratio.statistic == "exact":
        return bool(in_float64["different"])
    return bool(in_float64["error"] >= SAME_ERROR * failed.port.sums.relative_error)
