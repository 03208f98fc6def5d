"""Metrics of lm-eval as values per item, whose mean is the metric.

A metric of all items together, such as BLEU, is split into the metric plus each item's jackknife influence.
Source: Miller, Biometrika 61 (1974), 1-15.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import softmax

from assay_bench.results import PERPLEXITY, Score, UnjudgedMetric
from assay_bench.right_options import Sample

# lm-eval 0.4.13, api/metrics.py: aggregations other than the mean, and the direction of its own metrics.
_AGGREGATIONS = {
    "perplexity": "perplexity", "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity", "bits_per_byte": "bits_per_byte",
    "brier_score": "brier_score", "f1": "f1", "mcc": "matthews_corrcoef", "bypass": "bypass",
    "bleu": "bleu", "chrf": "chrf", "chrf++": "chrf++", "ter": "ter",
}  # fmt: skip
_LOWER_IS_BETTER = {
    "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter",
}  # fmt: skip
# lm-eval 0.4.13, api/task.py, process_results: the metrics that each output_type has.
METRICS: Mapping[str, tuple[str, ...]] = {
    "loglikelihood": ("acc", "perplexity"),
    "loglikelihood_rolling": ("bits_per_byte", "byte_perplexity", "word_perplexity"),
    "multiple_choice": (
        "acc", "acc_bytes", "acc_mutual_info", "acc_norm", "brier_score", "exact_match", "f1", "likelihood", "mcc",
    ),
    "generate_until": (
        "acc", "acc_all", "acc_bytes", "acc_mutual_info", "acc_norm", "bits_per_byte", "bleu", "brier_score", "bypass",
        "byte_perplexity", "chrf", "chrf++", "exact_match", "f1", "likelihood", "mcc", "perplexity", "ter",
        "word_perplexity",
    ),
}  # fmt: skip
_HIGHER_IS_BETTER = {*METRICS["generate_until"]} - _LOWER_IS_BETTER - {"bypass", "likelihood"}


def inverted_metric(direction: tuple[object, object]) -> str:
    """Describe a metric of lm-eval that a task turns around; return "" for any other.

    direction: the metric and its `higher_is_better`.
    """
    name, better = direction
    if better is not False or name not in _HIGHER_IS_BETTER:
        return ""
    return (
        f"higher_is_better: false of {name} would judge a worse model as better; set it to true under metric_list in"
        " the task's YAML file"
    )


_LIKELIHOODS: Mapping[str, Callable[[float, float], float]] = {
    "perplexity": lambda total, weight: math.exp(-total / weight),
    "weighted_perplexity": lambda total, weight: math.exp(-total / weight),
    "bits_per_byte": lambda total, weight: -total / weight / math.log(2),
}
_CORPUS: Mapping[str, tuple[str, dict[str, int]]] = {
    "bleu": ("BLEU", {}), "chrf": ("CHRF", {}), "chrf++": ("CHRF", {"word_order": 2}),
    "ter": ("TER", {}),
}  # fmt: skip
_KNOWN = ("mean", "nanmean", *_AGGREGATIONS.values())
# Allowed rounding error of a mean.
_EQUAL = 1e-9
# Sums of squares stay finite.
_LARGEST = 1e100


class ContradictionError(ValueError):
    """Samples that do not give the metric that the results state."""


def read_metrics(
    samples: Sequence[Sample],
    likelihoods: Sequence[Sequence[float]],
    stated: Mapping[str, float | None],
    config: Mapping[str, Any],
    directions: Mapping[str, Any] | None,
) -> tuple[dict[str, Score], dict[str, UnjudgedMetric]]:
    """Return the values of the metrics that are understood, and the other metrics with reasons.

    likelihoods: of the options of each sample.
    stated: the metrics of the task that the results hold.
    directions: `higher_is_better` of the task; None if the results have none, as in old versions.
    Raises: ContradictionError if the samples give another metric than the results state.
    """
    declared = config.get("metric_list")
    entries = declared if isinstance(declared, list) else []
    named = {str(one.get("metric")): one for one in entries if isinstance(one, dict)}
    scores: dict[str, Score] = {}
    unjudged: dict[str, UnjudgedMetric] = {}
    for name in dict.fromkeys(str(one) for sample in samples for one in sample["metrics"]):
        default = _AGGREGATIONS.get(name, "mean")
        aggregation = str(named.get(name, {}).get("aggregation", default))
        better = None if directions is None else directions.get(name)
        if better is None and (directions is None or name in METRICS["generate_until"]):
            better = name not in _LOWER_IS_BETTER
        value = stated.get(name)
        reason = "the results do not say if higher is better"
        if turned := inverted_metric((name, better)):
            better, reason = None, turned
        if isinstance(better, bool):
            try:
                key, score, found = _score(name, aggregation, samples, likelihoods, better)
            except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, OverflowError):
                reason = "its values are not understood"
            else:
                equal = value is not None and math.isclose(
                    found, value, rel_tol=_EQUAL, abs_tol=_EQUAL
                )
                is_known = aggregation in _KNOWN
                # Any function of equal values can give their mean.
                if (equal and (is_known or len(set(score.values)) > 1)) or (
                    is_known and (value is None or not math.isfinite(found))
                ):
                    scores.setdefault(key, score)
                    continue
                if is_known:
                    raise ContradictionError(name, found, value)
                reason = (
                    f"its aggregation is not known: {aggregation.split(chr(10), maxsplit=1)[0]}"
                )
        unjudged[name] = UnjudgedMetric(
            value=value,
            higher_is_better=better if isinstance(better, bool) else None,
            reason=reason,
        )
    return scores, unjudged


def _score(
    name: str,
    aggregation: str,
    samples: Sequence[Sample],
    likelihoods: Sequence[Sequence[float]],
    better: bool,  # noqa: FBT001 - a value of lm-eval, not a mode
) -> tuple[str, Score, float]:
    """Return the name of a score, the score, and the metric that its values give."""
    given = [sample.get(name) for sample in samples]
    if aggregation in _LIKELIHOODS:
        pairs: list[Any] = [one if isinstance(one, list) else [one, 1] for one in given]
        totals, weights = ([float(pair[side]) for pair in pairs] for side in (0, 1))
        texts = [str(arguments_of(sample)[0][-1]) for sample in samples]
        num_bytes = sum(len(text.encode()) for text in texts) / len(texts)
        nats = tuple(total / num_bytes for total in totals)
        found = _LIKELIHOODS[aggregation](math.fsum(totals), math.fsum(weights))
        # All of them depend on the total alone: one measure.
        return PERPLEXITY, Score(kind="nats per byte", values=nats), found
    values, scale = _values(aggregation, given, likelihoods)
    kind = "yes-no" if all(value in (0, 1, None) for value in values) else "number"
    score = Score(kind=kind, values=values, higher_is_better=better, scale=scale)  # type: ignore[arg-type]
    return name, score, score.mean


def _values(
    aggregation: str, given: Sequence[Any], likelihoods: Sequence[Sequence[float]]
) -> tuple[tuple[float | None, ...], float]:
    """Return a value for each item, and the scale of the metric."""
    if aggregation == "bypass":
        raise ValueError(aggregation)
    if aggregation == "brier_score":
        chances = [softmax(np.array(one)) for one in likelihoods]
        return tuple(
            float(np.square(chance - np.eye(len(chance))[int(pair[0])]).sum())
            for chance, pair in zip(chances, given, strict=True)
        ), 1.0
    if aggregation in ("f1", "matthews_corrcoef"):
        formula = _f1 if aggregation == "f1" else _correlation
        return _of_counts(formula, [(int(gold), int(chosen)) for gold, chosen in given]), 1.0
    if aggregation in _CORPUS:
        return _of_texts(aggregation, given), 100.0
    if any(isinstance(one, list) for one in given):  # as of IFEval's instructions
        means = sum(len(one) for one in given) / len(given)
        return tuple(math.fsum(map(float, one)) / means for one in given), 1.0
    values = tuple(None if one is None else float(one) for one in given)
    if aggregation == "nanmean":
        values = tuple(None if one is None or math.isnan(one) else one for one in values)
    largest = max((abs(one) for one in values if one is not None), default=0.0)
    if _LARGEST < largest < math.inf:
        raise OverflowError(largest)
    return values, 1.0 if largest <= 1 else 100.0 if largest <= 100 else largest


def _of_counts(
    formula: Callable[[Counter[tuple[int, int]]], float], pairs: Sequence[tuple[int, int]]
) -> tuple[float, ...]:
    counts = Counter(pairs)
    without = {pair: formula(counts - Counter([pair])) for pair in counts}
    return _influences(formula(counts), [without[pair] for pair in pairs])


def _of_texts(aggregation: str, given: Sequence[Any]) -> tuple[float, ...]:
    """Split a metric of sacrebleu, which lm-eval depends on."""
    from sacrebleu import metrics

    name, options = _CORPUS[aggregation]
    metric = getattr(metrics, name)(**options)
    expected = [one[0] if isinstance(one[0], list) else [one[0]] for one in given]
    actual = [one[1][0] if isinstance(one[1], list) else one[1] for one in given]
    streams = list(zip(*expected, strict=True))
    counts = np.array(metric._extract_corpus_statistics(actual, streams))  # noqa: SLF001
    total = counts.sum(axis=0)
    compute = metric._compute_score_from_stats  # noqa: SLF001
    without = [compute((total - one).tolist()).score for one in counts]
    return _influences(compute(total.tolist()).score, without)


def _influences(whole: float, without: Sequence[float]) -> tuple[float, ...]:
    """Return the metric plus the influence of each item. without: the metric without each item."""
    mean = math.fsum(without) / len(without)
    return tuple(whole + (len(without) - 1) * (mean - one) for one in without)


def _f1(counts: Mapping[tuple[int, int], int]) -> float:
    right = counts.get((1, 1), 0)
    either = sum(num * (pair[0] == 1) + num * (pair[1] == 1) for pair, num in counts.items())
    return 2 * right / either if either else 0.0


def _correlation(counts: Mapping[tuple[int, int], int]) -> float:
    """Source: Gorodkin, Computational Biology and Chemistry 28 (2004), 367-374."""
    num = sum(counts.values())
    golds, chosen = Counter[int](), Counter[int]()
    for (gold, choice), count in counts.items():
        golds[gold] += count
        chosen[choice] += count
    right = sum(count for (gold, choice), count in counts.items() if gold == choice)
    spreads = [num**2 - sum(count**2 for count in side.values()) for side in (golds, chosen)]
    both = right * num - sum(golds[name] * chosen[name] for name in golds)
    return both / math.sqrt(spreads[0] * spreads[1]) if spreads[0] and spreads[1] else 0.0


def arguments_of(sample: Sample) -> list[list[Any]]:
    """Return the arguments of each request, which lm-eval's command line writes as objects."""
    given = sample["arguments"]
    requests = given.values() if isinstance(given, dict) else given
    return [list(one.values() if isinstance(one, dict) else one) for one in requests]
