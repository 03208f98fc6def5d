"""Find the right options of documents in the samples of lm-eval, and contradictions in these samples."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from assay.foreign_text import shorten

Sample = Mapping[str, Any]
Options = frozenset[int]

_MAX_CHARACTERS = 60


class Choice(NamedTuple):
    """A sample of a task with choices."""

    sample: Sample
    number: object
    """The document's, for messages."""
    texts: Sequence[str]
    """Of the options, with the delimiter before them."""
    likelihoods: Sequence[float]


def right_options(
    choices: Sequence[Choice], delimiter: str
) -> tuple[list[Options | None], str | None]:
    """Return the right options of each sample, and the first contradiction between samples and labels.

    A reading of the targets counts if it explains the accuracies of all samples, and no other reading does.
    A sample has no options if its target is not among them, and None if the samples do not say which are right.

    delimiter: stands before an option, unless the task has a chat template.
    """
    unknown: list[Options | None] = [None] * len(choices)
    chosen = [_chosen(one, delimiter) for one in choices]
    readings: list[list[Options]] = []
    for reading in _readings(choices):
        if reading not in readings:
            readings.append(reading)
    wrong = [list(_contradictions(choices, chosen, reading)) for reading in readings]
    explained = [one for one, found in zip(readings, wrong, strict=True) if not found]
    if explained := [one for one in explained if any(one)] or explained:
        return (list(explained[0]) if len(explained) == 1 else unknown), None
    if readings and _are_texts(choices):
        fewest = min(wrong, key=len)
        return (
            unknown,
            f"{fewest[0]} ({len(fewest)} of {len(choices)} documents): were they edited?",
        )
    if any(len(set(one.texts)) > 1 or len(one.texts) != 2 for one in choices):
        return unknown, None
    # Two contexts: the chosen one is right, or else the other one is.
    pairs = [(one.sample.get("acc"), int(np.argmax(one.likelihoods))) for one in choices]
    if any(right is None for right, _ in pairs):
        return unknown, None
    return [frozenset({best if right else 1 - best}) for right, best in pairs], None


def _are_texts(choices: Sequence[Choice]) -> bool:
    """Return False if the options are contexts, which have one continuation."""
    return any(len(set(one.texts)) > 1 for one in choices)


def _readings(choices: Sequence[Choice]) -> Iterator[list[Options]]:
    for metric in ("mcc", "f1", "brier_score"):
        stated = [one.sample.get(metric) for one in choices]
        golds = [one[0] if isinstance(one, list) and one else None for one in stated]
        if all(type(gold) is int for gold in golds):
            yield [frozenset({gold} if gold is not None and gold >= 0 else ()) for gold in golds]
            return
    places = [_places(one) for one in choices]
    if not _are_texts(choices):
        if any(places):
            yield [place or frozenset() for place in places]
        return
    texts = [_text_place(one) for one in choices]
    # A template that renders a number or list gives an index, a field gives a text.
    yield [text if place is None else place for place, text in zip(places, texts, strict=True)]
    yield texts


def target_text(sample: Sample) -> str:
    """Return the target as lm-eval's command line writes it."""
    target = sample["target"]
    return str(target[0] if isinstance(target, list) and len(target) == 1 else target)


def _text_place(choice: Choice) -> Options:
    texts, target = [text.strip() for text in choice.texts], target_text(choice.sample).strip()
    return frozenset({texts.index(target)} if target in texts else ())


def _places(choice: Choice) -> Options | None:
    """Read a target as an index, or as a list of several; None for any other."""
    text = target_text(choice.sample)
    listed: Any = [int(text)] if text.isdecimal() else None
    if text.startswith("[") and text.endswith("]"):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            listed = ast.literal_eval(text)
    if not isinstance(listed, list):
        return None
    return frozenset(one for one in listed if isinstance(one, int) and 0 <= one < len(choice.texts))


# The log-probabilities whose largest is the chosen option, by metric.
_PER = {"acc": "", "acc_norm": " per character", "acc_bytes": " per byte"}


def _chosen(choice: Choice, delimiter: str) -> dict[str, Options]:
    """Return the option that each metric says is chosen; several if the delimiter decides.

    Source: lm-eval 0.4.13, api/task.py, process_results.
    """
    nats = np.array(choice.likelihoods)
    if not np.isfinite(nats).all():
        return {}
    chosen = {"acc": frozenset({int(nats.argmax())})}
    if len(set(choice.texts)) == 1:  # contexts, whose lengths are not known
        return chosen
    options = [choice.texts, [text.removeprefix(delimiter) for text in choice.texts]]
    sizes = {
        "acc_norm": [[len(text) for text in texts] for texts in options],
        "acc_bytes": [[len(text.encode()) for text in texts] for texts in options],
    }
    return chosen | {
        metric: frozenset(int((nats / one).argmax()) for one in both)
        for metric, both in sizes.items()
        if all(map(all, both))
    }


def _contradictions(
    choices: Sequence[Choice], chosen: Sequence[Mapping[str, Options]], reading: Sequence[Options]
) -> Iterator[str]:
    """Describe each sample with an accuracy that does not follow from its log-probabilities and label."""
    for choice, best, rights in zip(choices, chosen, reading, strict=True):
        for metric, options in best.items():
            stored = choice.sample.get(metric)
            if stored is not None and all((one in rights) != stored for one in options):
                label = ", ".join(map(str, sorted(rights))) or "none"
                yield (
                    f"document {choice.number}: {metric} is {shorten(str(stored), _MAX_CHARACTERS)}, but the largest"
                    f" log-probability{_PER[metric]} is that of choice {min(options)}, and the right choice is {label}"
                )
                break


def find_wrong_labels(choices: Sequence[Choice], rights: Sequence[Options | None]) -> str:
    """Name the first sample without a right option, and count them. Return "" if each has one."""
    wrong = [
        (one.number, target_text(one.sample), len(one.texts))
        for one, options in zip(choices, rights, strict=True)
        if options is not None and not options
    ]
    return describe_wrong_labels(wrong, len(choices))


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


def describe_repeated_choices(choices: Sequence[Choice]) -> str:
    """Name the first document of which two choices are equal, and count them. Return "" without any."""
    repeated = [one for one in choices if len(set(one.texts)) < len(one.texts)]
    if not repeated or not _are_texts(choices):
        return ""
    texts = list(repeated[0].texts)
    second = next(place for place, text in enumerate(texts) if text in texts[:place])
    return (
        f"document {repeated[0].number}: choices {texts.index(texts[second])} and {second} are equal"
        f" ({len(repeated)} of {len(choices)} documents); lm-eval never counts the second as chosen"
    )
