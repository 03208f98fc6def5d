"""Checks padded batches: each sample is one row, and its padding is masked and has no labels.

Shapes: B rows, T positions.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from assay_smoke.data.batches.features import (
    CollatedBatch,
    FeatureKind,
    Lengths,
    PaddedTokenizer,
    collate,
    describe_label,
    describe_lengths,
    expected_labels,
    make_features,
    padding_variants,
)
from assay_smoke.data.properties import (
    PropertyLog,
    Subject,
    SubjectReport,
    Violation,
    first_violation,
)
from assay_smoke.data.protocols import IGNORED, Feature, MakeCollator, Tokenizer
from assay_smoke.data.tokens import show_row, show_token

ONE_ROW_EACH = "every sample is one row, whole and once"
LABELS = "a token has the label that its sample has"
NO_PADDING_LEARNED = "padding has no label"
MASKED = "the attention mask is 1 for tokens and 0 for padding"
POSITIONS = "position ids begin at 0 in every row"
UNCHANGED = "a sample can be collated again"

PROPERTIES = (ONE_ROW_EACH, LABELS, NO_PADDING_LEARNED, MASKED, POSITIONS, UNCHANGED)

# Smallest first: one sample, equal lengths, padding of one position and of many.
BATCHES: tuple[Lengths, ...] = ((2,), (3, 3), (2, 3), (7, 1, 4), (5, 12, 2, 12))


@dataclass(frozen=True, slots=True)
class _Row:
    """The position of a sample's tokens in the batch."""

    number: int
    feature: Feature
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.feature["input_ids"])


def check_padding(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    kind: FeatureKind = "masked",
    batches: Sequence[Lengths] = BATCHES,
) -> SubjectReport:
    """Collate samples of these lengths with every tokenizer, padding on either side."""
    log = PropertyLog(subject.name, PROPERTIES)
    for variant in padding_variants(tokenizers):

        def read(
            features: Sequence[Feature],
            tensors: Mapping[str, Tensor],
            variant: PaddedTokenizer = variant,
        ) -> CollatedBatch:
            case = f"{describe_lengths(features)}, the tokenizer {variant.described}"
            return CollatedBatch(variant.tokenizer, features, tensors, case)

        with subject.called_for(f"a tokenizer that {variant.described}"):
            collator = make_collator(copy.deepcopy(variant.tokenizer))
        for lengths in batches:
            features = make_features(variant.tokenizer, lengths, kind)
            given = copy.deepcopy(features)
            judged = _judge(log, read(features, collate(subject, collator, given)))
            for name, wrong in judged.items():
                log.judge(name, wrong)
            # Collated again with a longer sample, so that leftovers in a sample show.
            longest = make_features(variant.tokenizer, (*lengths, max(lengths) + 3), kind)[-1:]
            batch = collate(subject, collator, [*given, *copy.deepcopy(longest)])
            again = _judge(log, read([*features, *longest], batch))
            log.judge(UNCHANGED, _find_changed(judged, again))
    return log.report()


def _judge(log: PropertyLog, batch: CollatedBatch) -> dict[str, Violation | None]:
    """Return the violation of each property in one batch. Notes go to `log`."""
    rows = [_find_row(feature, batch) for feature in batch.features]
    found = [row for row in rows if row is not None]
    side, width = batch.tokenizer.padding_side, len(batch.ids[0])
    if any((row.start > 0) != (side == "left") for row in found if width > row.stop - row.start):
        log.note(f"padding_side is {side}, and the other side is padded")
    return {
        ONE_ROW_EACH: _find_missing(batch, rows),
        LABELS: first_violation(_find_label(batch, row) for row in found),
        NO_PADDING_LEARNED: first_violation(_find_learned_padding(batch, row) for row in found),
        MASKED: first_violation(_find_unmasked(log, batch, row) for row in found),
        POSITIONS: first_violation(_find_position(batch, row) for row in found),
    }


def _find_changed(
    first: Mapping[str, Violation | None], again: Mapping[str, Violation | None]
) -> Violation | None:
    """Find a violation in the second collation that the first did not have."""
    for name, wrong in again.items():
        if wrong is not None and first[name] is None:
            return Violation(f"samples that were collated before: {wrong.reason}", wrong.example)
    return None


def _find_row(feature: Feature, batch: CollatedBatch) -> _Row | None:
    """Find the row with this sample and padding only. The mask may be wrong, so it is not used."""
    wanted = feature["input_ids"]
    others = {other["input_ids"][0] for other in batch.features}
    for number, row in enumerate(batch.ids):
        if wanted[0] not in row:
            continue
        start = row.index(wanted[0])
        stop = start + len(wanted)
        rest = [*row[:start], *row[stop:]]
        is_padding = len(set(rest)) <= 1 and others.isdisjoint(rest)
        if list(row[start:stop]) == wanted and is_padding:
            return _Row(number, feature, start)
    return None


def _find_missing(batch: CollatedBatch, rows: Sequence[_Row | None]) -> Violation | None:
    num_rows, num_samples, shown = len(batch.ids), len(batch.features), batch.show_rows()
    counts = f"{num_samples} samples make {num_rows} rows"
    if None in rows:
        sample = rows.index(None)
        ids = batch.features[sample]["input_ids"]
        reason = f"no row of the batch holds sample {sample} unchanged with only padding around it"
        if num_rows < num_samples:
            reason = f"{counts}: {reason}"
        wanted = f"sample {sample}: {show_row(batch.tokenizer, ids)}"
        return Violation(reason, (batch.case, wanted, *shown))
    return None if num_rows == num_samples else Violation(counts, (batch.case, *shown))


def _find_label(batch: CollatedBatch, row: _Row) -> Violation | None:
    """Find the first token whose label differs from its sample's."""
    ids, expected = row.feature["input_ids"], expected_labels(row.feature)
    whole = list(batch.labels[row.number])
    actual = whole[row.start : row.stop]
    if row.start and whole[: len(expected)] == expected and actual != expected:
        return batch.violation_at(
            row.number, row.start, "labels are padded on the right, and ids on the left"
        )
    if actual == [*expected[1:], IGNORED] and actual != expected:
        reason = "labels are shifted by one position, and models shift them again"
        return batch.violation_at(row.number, row.start, reason)
    for at, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if one == other or (at == 0 and IGNORED in (one, other)):
            continue  # no token predicts the first one of a row
        reason = describe_label(batch.tokenizer, ids[at], one, other)
        if one == IGNORED and ids[at] == batch.tokenizer.eos_token_id:
            token = show_token(batch.tokenizer, ids[at])
            reason = f"the end of the sample, {token}, has no label: a model never learns to stop"
        return batch.violation_at(row.number, row.start + at, reason)
    return None


def _find_learned_padding(batch: CollatedBatch, row: _Row) -> Violation | None:
    for at, label in enumerate(batch.labels[row.number]):
        if label != IGNORED and not row.start <= at < row.stop:
            return batch.violation_at(row.number, at, f"padding has a label at position {at}")
    return None


def _find_unmasked(log: PropertyLog, batch: CollatedBatch, row: _Row) -> Violation | None:
    ids = batch.ids[row.number]
    shown = (f"{batch.case}; row {row.number}", f"ids:  {show_row(batch.tokenizer, ids)}")
    mask = batch.rows_of("attention_mask")
    if mask is None:
        if row.start:
            return Violation("there is padding before tokens, and no attention mask", shown)
        if row.stop < len(ids):
            log.note("there is no attention mask: right for causal models padded on the right")
        return None
    expected = [int(row.start <= at < row.stop) for at in range(len(ids))]
    actual = [int(value) for value in mask[row.number]]
    if actual == expected:
        return None
    at = next(at for at in range(len(ids)) if actual[at] != expected[at])
    token = show_token(batch.tokenizer, ids[at])
    reason = f"{token} at position {at} is a token of the sample, but is masked"
    if not expected[at]:
        reason = f"{token} at position {at} is padding, but is not masked"
    return Violation(reason, (*shown, f"mask: {' '.join(map(str, actual[:32]))}"))


def _find_position(batch: CollatedBatch, row: _Row) -> Violation | None:
    positions = batch.rows_of("position_ids")
    if positions is None:
        return None  # models count positions themselves
    own = positions[row.number if row.number < len(positions) else 0]
    actual = list(own[row.start : row.stop])
    if actual == list(range(len(actual))):
        return None
    reason = "position ids do not begin at 0 at the first token, or do not increase by one"
    return Violation(reason, (f"{batch.case}; row {row.number}", f"position ids: {actual}"))
