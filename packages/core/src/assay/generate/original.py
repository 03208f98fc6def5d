"""A quantized candidate against the model that it was made from: stored weights, settings, and the cost of the format.

The modules of the candidate are judged by the weights that its files hold. So a fault of the files, such as a wrong
scale, is found here and nowhere else.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError, assay_command
from assay.generate.capture import load_reference
from assay.generate.generation_loop import count_tokens
from assay.generate.golden import LOGITS, GoldenSection
from assay.generate.passes import Side, run_forced, whole_batches
from assay.generate.spec import GenerateCheck
from assay.generate.text_levels import pool_metrics, valid_tokens
from assay.judge.levels import LevelResult
from assay.judge.model_folders import find_other_settings, judge_settings, judge_weight_levels
from assay.judge.wording import format_number
from assay.models.load import choose_threads
from assay.models.quantization.comparing import compare_weights
from assay.models.quantization.judging import WeightComparison
from assay.models.quantization.stored_weights import open_folder
from assay.models.quantization.weight_formats import has_known_format, list_weights
from assay.models.sources import local_folder, resolve_model
from assay.models.stored_tensors import describe_stale_copies
from assay.runs import Progress


def require_quantized(check: GenerateCheck, progress: Progress) -> None:
    """Refuse a candidate that is not quantized, or in an unknown way. Raises: UsageError."""
    with ExitStack() as folders, progress.step("reading the formats of the candidate's weights"):
        expected, actual = _open_both(check, folders)
        stored = open_folder(actual)
    if has_known_format(stored):
        return
    how = "is quantized in an unknown way" if stored.quantization else "is not quantized"
    raise UsageError(
        f"--candidate-model {check.model} {how}, and the option judges weights of known formats. To compare"
        f" the files of another copy: {assay_command('compare', expected, actual)}"
    )


def compare_with_original(check: GenerateCheck, progress: Progress) -> dict[str, LevelResult]:
    """Return the levels `completeness`, `weights` and `config`; what the format costs is a note."""
    with ExitStack() as folders:
        expected, actual = _open_both(check, folders)
        with progress.step("comparing the quantized weights with the original's"):
            levels, comparison = _compare_folders(expected, actual)
    notes = [*_describe_errors(comparison), *_describe_outputs(check, progress)]
    return levels | {"weights": levels["weights"].with_rows((), notes)}


def _open_both(check: GenerateCheck, folders: ExitStack) -> tuple[Path, Path]:
    """Return the folders of the original and of the candidate."""
    expected, actual = (
        folders.enter_context(local_folder(resolve_model(one), check.remote_code))
        for one in (check.original or check.model, check.model)
    )
    return expected, actual


def _compare_folders(
    expected: Path, actual: Path
) -> tuple[dict[str, LevelResult], WeightComparison]:
    stored = open_folder(expected), open_folder(actual)
    comparison = compare_weights(*stored)
    problems = [
        f"{one.name}: {text}" for one in (expected, actual) for text in describe_stale_copies(one)
    ]
    levels = judge_weight_levels(comparison, problems)
    held = set(list_weights(stored[0])), set(list_weights(stored[1]))
    config = judge_settings(find_other_settings(expected, actual, held))
    return levels | ({} if config is None else {"config": config}), comparison


def _describe_errors(comparison: WeightComparison) -> Iterator[str]:
    """State the error that the format leaves in the weights."""
    quantized = [one for one in comparison.results if one.num_groups > 1 or one.best > 0]
    if quantized:
        worst = max(quantized, key=lambda one: one.error)
        usual = sorted(one.error for one in quantized)[len(quantized) // 2]
        yield (
            f"cost of the format: relative error {format_number(usual)} in the median of"
            f" {len(quantized)} weights, at most {format_number(worst.error)} ({worst.name})"
        )


def _describe_outputs(check: GenerateCheck, progress: Progress) -> Iterator[str]:
    """State how the logits change from the original model to the dequantized one, for the same tokens."""
    section = GoldenSection.open(check.golden_folder, check.dtype)
    if LOGITS not in section.outputs:
        return
    choose_threads(section.golden.model.num_parameters)
    device = open_run(parse_run(section.golden.reference["run"]))
    works, tokens = whole_batches(section.batches), section.tensors("tokens")
    with progress.task("running the original model", count_tokens(section.batches), "tokens"):
        loaded = load_reference(
            check.original or check.model, device, section.entry.yardstick_dtype, check.remote_code
        )
        side = Side(loaded, device)
        outputs = [
            run_forced(side, work, forced).outputs
            for work, forced in zip(works, tokens, strict=True)
        ]
    expected, actual = [one.get(LOGITS) for one in outputs], section.tensors(LOGITS)
    pairs = list(zip(expected, actual, strict=True))
    if any(one is None or one.shape != other.shape for one, other in pairs):
        yield "cost of the format: the original model has other logits"
        return
    valid = [
        valid_tokens(section, batch, logits)
        for batch, logits in zip(section.batches, actual, strict=True)
    ]
    metrics = pool_metrics(actual, [one for one in expected if one is not None], valid)
    yield (
        f"cost of the format: the logits change by a mean KL divergence of"
        f" {format_number(float(metrics.kl.mean()))}, and the most likely token in"
        f" {100 * (1 - float(metrics.top1.double().mean())):.1f} % of {metrics.kl.numel():,} tokens"
    )
