"""The right option of a sample of a multiple-choice task, of which lm-eval writes only a text.

lm-eval 0.4.13 writes `target` as text, if the task gives an index, a text, a list of indices, or, where the
contexts are the options (winogrande), the common continuation.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Sample = Mapping[str, Any]


def right_options(
    samples: Sequence[Sample],
    continuations: Sequence[Sequence[str]],
    likelihoods: Sequence[Sequence[float]],
) -> list[int | None] | None:
    """Return the index of the right option of each sample; None if the samples do not say which it is.

    A reading of the targets counts if it explains `acc` of every sample, and no other reading does.
    A sample has None if its target is not among the options.
    """
    best = [int(np.argmax(one)) for one in likelihoods]
    explained: list[list[int | None]] = []
    for reading in _readings(samples, continuations):
        agrees = all(
            sample.get("acc", option == choice) == (option == choice)
            or not np.isfinite(values).all()
            for sample, option, choice, values in zip(
                samples, reading, best, likelihoods, strict=True
            )
        )
        if agrees and reading not in explained and any(one is not None for one in reading):
            explained.append(reading)
    if explained:
        return explained[0] if len(explained) == 1 else None
    if any(len(set(options)) > 1 or len(options) != 2 for options in continuations):
        return None
    # Two contexts: the chosen one is right, or else the other one is.
    rights = [sample.get("acc") for sample in samples]
    pairs = zip(rights, best, strict=True)
    return None if None in rights else [choice if right else 1 - choice for right, choice in pairs]


def _readings(
    samples: Sequence[Sample], continuations: Sequence[Sequence[str]]
) -> Iterator[list[int | None]]:
    for metric in ("mcc", "f1", "brier_score"):
        stated = [sample.get(metric) for sample in samples]
        golds = [one[0] if isinstance(one, list) and one else None for one in stated]
        if all(type(gold) is int for gold in golds):
            yield [gold if gold is not None and gold >= 0 else None for gold in golds]
            return
    pairs = list(zip(map(target_text, samples), continuations, strict=True))
    yield [int(t) if t.isdecimal() and int(t) < len(options) else None for t, options in pairs]
    if all(len(set(options)) > 1 for options in continuations):
        stripped = [(t.strip(), [text.strip() for text in options]) for t, options in pairs]
        yield [options.index(t) if t in options else None for t, options in stripped]


def target_text(sample: Sample) -> str:
    """Return the target as lm-eval's command line writes it."""
    target = sample["target"]
    return str(target[0] if isinstance(target, list) and len(target) == 1 else target)


def num_right(sample: Sample) -> int:
    """Return how many options are right: several if the target is a list of indices."""
    text = target_text(sample)
    if not (text.startswith("[") and text.endswith("]")):
        return 1
    try:
        return max(1, len(ast.literal_eval(text)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return 1
