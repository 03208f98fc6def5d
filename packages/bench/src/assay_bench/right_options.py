"""Find the right one of the options of a document, in the samples of lm-eval."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from assay.foreign_text import shorten

Sample = Mapping[str, Any]

_MAX_CHARACTERS = 60


def right_options(
    samples: Sequence[Sample],
    continuations: Sequence[Sequence[str]],
    likelihoods: Sequence[Sequence[float]],
) -> list[int | None] | None:
    """Return the index of the right option of each sample; None if the samples do not say which it is.

    A reading of the targets counts if it explains `acc` of every sample, and no other reading does.
    A sample has None if its target is not among the options. All have None only if no other reading counts.
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
        if agrees and reading not in explained:
            explained.append(reading)
    if explained := [one for one in explained if set(one) != {None}] or explained:
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
    are_texts = all(len(set(options)) > 1 for options in continuations)
    places = [int(t) if t.isdecimal() and int(t) < len(options) else None for t, options in pairs]
    if are_texts or set(places) != {None}:
        yield places
    if are_texts:
        stripped = [(t.strip(), [text.strip() for text in options]) for t, options in pairs]
        yield [options.index(t) if t in options else None for t, options in stripped]


def target_text(sample: Sample) -> str:
    """Return the target as lm-eval's command line writes it."""
    target = sample["target"]
    return str(target[0] if isinstance(target, list) and len(target) == 1 else target)


def num_right(sample: Sample) -> int:
    """Return how many options are right: several if the target is a list of indices."""
    return max(1, len(_listed(sample)))


def _listed(sample: Sample) -> list[Any]:
    """Return a target that is a list; an empty list for any other."""
    text = target_text(sample)
    if not (text.startswith("[") and text.endswith("]")):
        return []
    try:
        return list(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def find_wrong_labels(
    samples: Sequence[Sample],
    options: Sequence[int | None],
    likelihoods: Sequence[Sequence[float]],
) -> str:
    """Name the first sample without a right option, and count them. Return "" if each has one."""
    wrong = [
        (sample.get("doc_id", place), target_text(sample), len(values))
        for place, (sample, option, values) in enumerate(
            zip(samples, options, likelihoods, strict=True)
        )
        if option is None and not any(one in range(len(values)) for one in _listed(sample))
    ]
    return describe_wrong_labels(wrong, len(samples))


def describe_wrong_labels(wrong: Sequence[tuple[object, object, int]], num_documents: int) -> str:
    """Name the first document whose label is not one of its choices, and count them. Return "" if all are sound.

    wrong: document, label and number of choices of each.
    """
    if not wrong:
        return ""
    document, label, num_choices = wrong[0]
    return (
        f"document {document}: label {shorten(repr(label), _MAX_CHARACTERS)} is not one of {num_choices} choices"
        f" ({len(wrong)} of {num_documents} documents); a label is the number of the right choice, from 0, or its text"
    )
