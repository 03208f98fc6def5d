"""Checks padded batches: each sample is one row, and its padding is masked and has no labels.

Shapes: B rows, T positions.
"""

import copy
from collections.abc import Iterator, Sequence

from assay_smoke.data.batches import (
    Batch,
    Lengths,
    Piece,
    collate,
    describe_label,
    describe_lengths,
    make_collators,
    make_features,
)
from assay_smoke.data.properties import Fault, PropertyLog, Subject, SubjectReport
from assay_smoke.data.protocols import IGNORED, FeatureKind, MakeCollator, Tokenizer
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


def check_padding(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    kind: FeatureKind = "masked",
    batches: Sequence[Lengths] = BATCHES,
) -> SubjectReport:
    """Collate samples of these lengths with every tokenizer, padding on either side."""
    log = PropertyLog(subject.name, PROPERTIES)
    sides = ("right", "left")
    for collator, tokenizer, padding in make_collators(subject, make_collator, tokenizers, sides):
        for lengths in batches:
            # Collated again with a longer sample, so that leftovers in a sample show.
            *features, longer = make_features(tokenizer, (*lengths, max(lengths) + 3), kind)
            given = copy.deepcopy(features)
            faults = []
            for expected, more in ((features, []), ([*features, longer], [copy.deepcopy(longer)])):
                tensors = collate(subject, collator, [*given, *more])
                case = f"{describe_lengths(expected)}, the {padding}"
                faults.append(list(_find_faults(log, Batch(tokenizer, expected, tensors, case))))
            first, again = faults
            log.judge(PROPERTIES[:-1], first)
            broken = {fault.name for fault in first}
            changed = (
                Fault(
                    UNCHANGED, f"samples that were collated before: {fault.reason}", fault.example
                )
                for name in PROPERTIES
                for fault in again
                if fault.name == name not in broken
            )
            log.judge([UNCHANGED], changed)
    return log.report()


def _find_row(batch: Batch, sample: int) -> Piece | None:
    """Find the row with this sample and padding only."""
    begins = {feature["input_ids"][0] for feature in batch.features}
    for piece in batch.pieces:
        row = batch.rows["input_ids"][piece.row]
        rest = {*row[: piece.start], *row[piece.stop :]}
        is_whole = piece.sample == sample and piece.ids == batch.features[sample]["input_ids"]
        if is_whole and len(rest) <= 1 and begins.isdisjoint(rest):
            return piece
    return None


def _find_faults(log: PropertyLog, batch: Batch) -> Iterator[Fault]:
    tokenizer, width = batch.tokenizer, len(batch.rows["input_ids"][0])
    by_sample = [_find_row(batch, sample) for sample in range(len(batch.features))]
    if None in by_sample or len(by_sample) != len(batch.rows["input_ids"]):
        yield _describe_missing(batch, by_sample)
    for row in filter(None, by_sample):
        if len(row.ids) < width and (row.start > 0) != (tokenizer.padding_side == "left"):
            log.note(f"padding_side is {tokenizer.padding_side}, and the other side is padded")
        for _, at, piece, actual, expected in batch.differing_labels([row.row], [row]):
            name, reason = NO_PADDING_LEARNED, f"padding has a label at position {at}"
            if piece is not None:
                name, reason = LABELS, _describe_label(batch, row, at, actual, expected)
                if at == row.start and IGNORED in (actual, expected):
                    continue  # no token predicts the first one of a row
            yield batch.fault_at(name, row.row, at, reason)
        yield from _find_mask_faults(log, batch, row)
        if "position_ids" in batch.rows:  # else models count positions themselves
            positions = batch.row_of("position_ids", row.row)[row.start : row.stop]
            if positions != list(range(len(positions))):
                reason = (
                    "position ids do not begin at 0 at the first token, or do not increase by one"
                )
                case = f"{batch.case}; row {row.row}"
                yield Fault(POSITIONS, reason, (case, f"position ids: {positions}"))


def _describe_missing(batch: Batch, by_sample: Sequence[Piece | None]) -> Fault:
    num_rows, shown = len(batch.rows["input_ids"]), batch.show_rows()
    reason = f"{len(by_sample)} samples make {num_rows} rows"
    if None in by_sample:
        sample = by_sample.index(None)
        lost = f"no row of the batch holds sample {sample} unchanged with only padding around it"
        reason = f"{reason}: {lost}" if num_rows < len(by_sample) else lost
        ids = show_row(batch.tokenizer, batch.features[sample]["input_ids"])
        shown = [f"sample {sample}: {ids}", *shown]
    return Fault(ONE_ROW_EACH, reason, (batch.case, *shown))


def _describe_label(batch: Batch, row: Piece, at: int, actual: int, expected: int) -> str:
    labels = batch.rows["labels"][row.row]
    if row.start and labels[: len(row.labels)] == row.labels:
        return "labels are padded on the right, and ids on the left"
    if labels[row.start : row.stop] == [*row.labels[1:], IGNORED]:
        return "labels are shifted by one position, and models shift them again"
    id_ = row.ids[at - row.start]
    if actual == IGNORED and id_ == batch.tokenizer.eos_token_id:
        token = show_token(batch.tokenizer, id_)
        return f"the end of the sample, {token}, has no label: a model never learns to stop"
    return describe_label(batch.tokenizer, id_, actual, expected)


def _find_mask_faults(log: PropertyLog, batch: Batch, row: Piece) -> Iterator[Fault]:
    ids = batch.rows["input_ids"][row.row]
    shown = [f"{batch.case}; row {row.row}", f"ids:  {show_row(batch.tokenizer, ids)}"]
    if "attention_mask" in batch.rows:
        mask = [int(value) for value in batch.row_of("attention_mask", row.row)]
        shown.append(f"mask: {' '.join(map(str, mask[:32]))}")
        for at, (id_, value) in enumerate(zip(ids, mask, strict=True)):
            is_token = row.start <= at < row.stop
            if value != is_token:
                what = "a token of the sample, but is" if is_token else "padding, but is not"
                reason = f"{show_token(batch.tokenizer, id_)} at position {at} is {what} masked"
                yield Fault(MASKED, reason, shown)
    elif row.start:
        yield Fault(MASKED, "there is padding before tokens, and no attention mask", shown)
    elif row.stop < len(ids):
        log.note("the batch lacks an attention mask: right for causal models padded on the right")
