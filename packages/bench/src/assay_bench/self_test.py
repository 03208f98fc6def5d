"""The self-test of `assay bench`: models tuned here, held to the shipped baselines of the same tunings."""

from pathlib import Path

from assay.api.verdict import CheckedVerdict
from assay.runs import Progress, RunFolder
from assay.runs.results import write_results
from assay.verdicts import Outcome, overall_outcome
from assay_bench.comparison_files import read_sides, write_comparison
from assay_bench.lm_eval_files import read_evaluation
from assay_bench.results import judge_scores
from assay_bench.run_tasks import EvaluationRequest, evaluate, read_suite
from assay_bench.tuning.records import MODEL_FOLDER, read_recipe, tuning_folder
from assay_bench.tuning.running import open_folder, run_tunings

_BASELINES = Path(__file__).parent / "shipped"


def run_self_test(run: str, folder: Path, progress: Progress) -> Outcome:
    """Tune a micro model as the recipe `micro` says, and compare its answers with the baselines.

    Questions are made from Python's standard library, so other versions of Python ask other questions.

    run: a RUN, in the dtype of the baselines (float32).
    folder: gets the tuned models, their answers and the comparisons.
    Returns: the worst outcome; FAIL for a model that learned too little or is worse, NOT_COMPARED for too few
        items, or other questions than the baselines'.
    """
    recipe, sources = read_recipe("micro", run)
    tuned = open_folder(recipe, folder / "tuned")
    learned = run_tunings(recipe, sources, tuned, progress).verdict
    CheckedVerdict.publish(tuned)
    if learned is not Outcome.PASS:
        return learned
    (model,), (seed,) = recipe.models, recipe.seeds
    judged = [
        _compare_with_baseline(
            way, tuning_folder(tuned, model, way, seed) / MODEL_FOLDER, run, folder, progress
        )
        for way in recipe.permutations
    ]
    return overall_outcome(judged)


def _compare_with_baseline(
    way: str, model: Path, run: str, folder: Path, progress: Progress
) -> Outcome:
    """Ask the model that was tuned in one way the questions of its baseline.

    Returns: the worse outcome of the answers by themselves, and of their comparison with the baseline.
    """
    asked = RunFolder.create("bench run", folder / way / "asked").path.resolve()
    questions = read_suite("offline")
    evaluate(EvaluationRequest(model=str(model), run=run, suite=questions, folder=asked), progress)
    alone = write_results(judge_scores(read_evaluation(asked)), [], asked)
    CheckedVerdict.publish(asked)
    compared = RunFolder.create("bench compare", folder / way / "compared").path
    baseline = _BASELINES / f"micro-llama-{way}.json"
    terms = read_suite("retrained").recorded.judging
    comparison = write_comparison(*read_sides(baseline, asked, {}), terms, compared)
    verdict = CheckedVerdict.publish(compared)
    progress.note(f"{way}: {verdict.headline or verdict.verdict} {compared / 'comparison.md'}")
    return overall_outcome([alone.verdict, comparison.judged])
