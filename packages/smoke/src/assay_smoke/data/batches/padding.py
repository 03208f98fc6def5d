"""Padded batches: each sample is one row, and its padding is neither seen nor learned.

Shapes: B rows, T positions.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from assay_smoke.data.batches.features import (
    FeatureKind,
    Lengths,
    PaddedTokenizer,
    collate,
    expected_labels,
    make_features,
    padding_variants,
)
from assay_smoke.data.properties import PropertyLog, SubjectReport, Wrong, first_wrong
from assay_smoke.data.protocols import IGNORED, Feature, MakeCollator
from assay_smoke.data.running_code import Subject
from assay_smoke.data.tokens.shown_tokens import show_row, show_token, show_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ONE_ROW_EACH = "every sample is one row, whole and once"
LABELS = "a token has the label that its sample has"
NO_PADDING_LEARNED = "padding is no label"
MASKED = "the attention mask is 1 for tokens and 0 for padding"
POSITIONS = "position ids begin at 0 in every row"
UNCHANGED = "a sample can be collated again"

PROPERTIES = (ONE_ROW_EACH, LABELS, NO_PADDING_LEARNED, MASKED, POSITIONS, UNCHANGED)

# Smallest first: one sample, equal lengths, padding of one position and of many.
BATCHES: tuple[Lengths, ...] = ((2,), (3, 3), (2, 3), (7, 1, 4), (5, 12, 2, 12))


@dataclass(frozen=True, slots=True)
class _Row:
    """Where the tokens of a sample lie in a row of the batch."""

    number: int
    feature: Feature
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.feature["input_ids"])


def check_padding(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence["PreTrainedTokenizerBase"],
    kind: FeatureKind = "masked",
    batches: Sequence[Lengths] = BATCHES,
) -> SubjectReport:
    """Collate samples of these lengths with every tokenizer, padding on either side."""
    log = PropertyLog(subject.name, PROPERTIES)
    for variant in padding_variants(tokenizers):
        with subject.called_for(f"a tokenizer that {variant.described}"):
            collator = make_collator(copy.deepcopy(variant.tokenizer))
        for lengths in batches:
            features = make_features(variant.tokenizer, lengths, kind)
            given = copy.deepcopy(features)
            judged = judge_padded(log, variant, features, collate(subject, collator, given))
            for name, wrong in judged.items():
                log.judge(name, wrong)
            # In other company: what a collator left in a sample would show now.
            longest = make_features(variant.tokenizer, (*lengths, max(lengths) + 3), kind)[-1:]
            everything = [*features, *longest]
            batch = collate(subject, collator, [*given, *copy.deepcopy(longest)])
            again = judge_padded(log, variant, everything, batch)
            log.judge(UNCHANGED, _find_changed(judged, again))
    return log.report()


def judge_padded(
    log: PropertyLog,
    variant: PaddedTokenizer,
    features: Sequence[Feature],
    batch: Mapping[str, Tensor],
) -> dict[str, Wrong | None]:
    """What is wrong in one batch, by property; what is only worth a note goes to `log`."""
    tokenizer = variant.tokenizer
    ids = batch["input_ids"].tolist()
    labels = batch["labels"].tolist()
    mask = batch["attention_mask"].tolist() if "attention_mask" in batch else None
    positions = batch["position_ids"].tolist() if "position_ids" in batch else None
    rows = [_find_row(feature, features, ids) for feature in features]
    case = _describe(variant, features)
    found = [row for row in rows if row is not None]
    asked_left = tokenizer.padding_side == "left"
    if any((row.start > 0) != asked_left for row in found if len(ids[0]) > row.stop - row.start):
        log.note(f"padding_side is {tokenizer.padding_side}, and the other side is padded")
    return {
        ONE_ROW_EACH: _find_missing(variant, features, ids, rows, case),
        LABELS: first_wrong(_find_label(tokenizer, row, ids, labels, case) for row in found),
        NO_PADDING_LEARNED: first_wrong(
            _find_learned_padding(tokenizer, row, ids, labels, case) for row in found
        ),
        MASKED: first_wrong(_find_unmasked(log, tokenizer, row, ids, mask, case) for row in found),
        POSITIONS: first_wrong(_find_position(row, positions, case) for row in found),
    }


def _find_changed(
    first: Mapping[str, Wrong | None], again: Mapping[str, Wrong | None]
) -> Wrong | None:
    """What is wrong when the samples are collated a second time, and was right the first time."""
    for name, wrong in again.items():
        if wrong is not None and first[name] is None:
            reason = f"samples that were collated before: {wrong.reason}"
            return Wrong(reason, wrong.example)
    return None


def _describe(variant: PaddedTokenizer, features: Sequence[Feature]) -> str:
    lengths = ", ".join(str(len(feature["input_ids"])) for feature in features)
    return f"samples of {lengths} tokens, the tokenizer {variant.described}"


def _find_row(
    feature: Feature, features: Sequence[Feature], rows: Sequence[Sequence[int]]
) -> _Row | None:
    """The row that holds this sample and padding beside it; the mask is not asked, it may be wrong."""
    wanted = feature["input_ids"]
    others = {other["input_ids"][0] for other in features}
    for number, row in enumerate(rows):
        if wanted[0] not in row:
            continue
        start = row.index(wanted[0])
        stop = start + len(wanted)
        beside = [*row[:start], *row[stop:]]
        is_padding = len(set(beside)) <= 1 and others.isdisjoint(beside)
        if list(row[start:stop]) == wanted and is_padding:
            return _Row(number, feature, start)
    return None


def _find_missing(
    variant: PaddedTokenizer,
    features: Sequence[Feature],
    ids: Sequence[Sequence[int]],
    rows: Sequence[_Row | None],
    case: str,
) -> Wrong | None:
    tokenizer = variant.tokenizer
    shown = (case, *(f"row {n}: {show_row(tokenizer, row)}" for n, row in enumerate(ids[:4])))
    if None in rows:
        sample = rows.index(None)
        wanted = f"sample {sample}: {show_row(tokenizer, features[sample]['input_ids'])}"
        reason = f"sample {sample} is in no row of the batch as it is, with padding beside it"
        if len(ids) < len(features):
            reason = f"{len(features)} samples make {len(ids)} rows: {reason}"
        return Wrong(reason, (shown[0], wanted, *shown[1:]))
    if len(ids) != len(features):
        return Wrong(f"{len(features)} samples make {len(ids)} rows", shown)
    return None


def _find_label(
    tokenizer: "PreTrainedTokenizerBase",
    row: _Row,
    ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    case: str,
) -> Wrong | None:
    """The first token of the row whose label is another than its sample's."""
    expected = expected_labels(row.feature)
    actual = list(labels[row.number][row.start : row.stop])
    whole = list(labels[row.number])
    if row.start and whole[: len(expected)] == expected and actual != expected:
        reason = "labels are padded on the right, and ids on the left"
        return _wrong_at(tokenizer, row, ids, labels, 0, reason, case)
    if actual == [*expected[1:], IGNORED] and actual != expected:
        reason = (
            "labels are shifted: each stands one position before its token, and models shift again"
        )
        return _wrong_at(tokenizer, row, ids, labels, 0, reason, case)
    for at, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if one == other or (at == 0 and IGNORED in (one, other)):
            continue  # the first token of a row is predicted by none
        token = show_token(tokenizer, row.feature["input_ids"][at])
        if one == IGNORED:
            reason = f"{token} is no label, and has to be one"
            if row.feature["input_ids"][at] == tokenizer.eos_token_id:
                reason = (
                    f"the end of the sample, {token}, is no label: a model never learns to stop"
                )
        elif other == IGNORED:
            reason = f"{token} is a label, and its sample has none there"
        else:
            reason = f"the label of {token} is {show_token(tokenizer, one)}"
        return _wrong_at(tokenizer, row, ids, labels, at, reason, case)
    return None


def _wrong_at(
    tokenizer: "PreTrainedTokenizerBase",
    row: _Row,
    ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    at: int,
    reason: str,
    case: str,
) -> Wrong:
    shown = show_tokens(tokenizer, ids[row.number], labels[row.number], row.start + at)
    return Wrong(reason, (f"{case}; row {row.number}", *shown))


def _find_learned_padding(
    tokenizer: "PreTrainedTokenizerBase",
    row: _Row,
    ids: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    case: str,
) -> Wrong | None:
    for at, label in enumerate(labels[row.number]):
        if label != IGNORED and not row.start <= at < row.stop:
            reason = f"padding is a label at position {at}"
            return _wrong_at(tokenizer, row, ids, labels, at - row.start, reason, case)
    return None


def _find_unmasked(
    log: PropertyLog,
    tokenizer: "PreTrainedTokenizerBase",
    row: _Row,
    ids: Sequence[Sequence[int]],
    mask: Sequence[Sequence[int]] | None,
    case: str,
) -> Wrong | None:
    width = len(ids[row.number])
    shown = (f"{case}; row {row.number}", f"ids:  {show_row(tokenizer, ids[row.number])}")
    if mask is None:
        if row.start:
            return Wrong("there is padding before tokens, and no attention mask", shown)
        if row.stop < width:
            log.note("there is no attention mask: right for causal models padded on the right")
        return None
    expected = [int(row.start <= at < row.stop) for at in range(width)]
    actual = [int(value) for value in mask[row.number]]
    if actual == expected:
        return None
    at = next(at for at in range(width) if actual[at] != expected[at])
    token = show_token(tokenizer, ids[row.number][at])
    reason = f"{token} at position {at} is a token of the sample, and masked"
    if not expected[at]:
        reason = f"{token} at position {at} is padding, and seen"
    return Wrong(reason, (*shown, f"mask: {' '.join(map(str, actual[:32]))}"))


def _find_position(row: _Row, positions: Sequence[Sequence[int]] | None, case: str) -> Wrong | None:
    """Without position ids a model counts by itself: nothing is wrong then."""
    if positions is None:
        return None
    own = positions[row.number] if row.number < len(positions) else positions[0]
    actual = list(own[row.start : row.stop])
    if actual == list(range(len(actual))):
        return None
    reason = "position ids of a row do not begin at 0 where its tokens do, or do not go up by one"
    return Wrong(reason, (f"{case}; row {row.number}", f"position ids: {actual}"))
