"""Checks packed batches: samples in one row that do not see or predict each other.

Shapes: B rows, T positions, V vocabulary.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from assay.models import load_model
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

WHOLE = "no token is lost or doubled"
LABELS = "a token has the label that its sample has"
SEAM = "no label reaches across a seam"
POSITIONS = "position ids restart with each sample"
ISOLATED = "a packed sample computes what it computes alone"

PROPERTIES = (WHOLE, LABELS, SEAM, POSITIONS, ISOLATED)

# Smallest first. The only token of a sample of one token is a seam.
PACKS: tuple[Lengths, ...] = ((3,), (3, 3), (2, 7), (5, 1, 4), (12, 2, 30, 9, 3))

# Both run everywhere. Flash attention does not, and takes the same batch.
ATTENTIONS = ("eager", "sdpa")

# Keys of a batch that the model's forward takes.
_INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)

# Limit of a packed sample's error over the noise. Error: packed in float32 against alone in float64.
# Noise: the largest such error of the pack's samples alone in float32. 400 clean packs of up to 8
# samples of up to 20 tokens reach 4.6. In 343 packs whose last token sees one token of another sample,
# the ratio is at least 329. The limit is near the geometric mean of both.
LIMIT = 40.0

MICRO_MODEL = "micro:llama"


def check_packing(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    kind: FeatureKind = "masked",
    packs: Sequence[Lengths] = PACKS,
) -> SubjectReport:
    """Pack samples of these lengths and run each pack through a micro model."""
    log = PropertyLog(subject.name, PROPERTIES)
    # A pack has no side.
    for collator, tokenizer, _ in make_collators(subject, make_collator, tokenizers, ["right"]):
        for lengths in packs:
            features = make_features(tokenizer, lengths, kind)
            tensors = collate(subject, collator, copy.deepcopy(features))
            _judge(log, Batch(tokenizer, features, tensors, describe_lengths(features)))
    return log.report()


def _judge(log: PropertyLog, pack: Batch) -> None:
    """Judge all properties of one batch."""
    if len(pack.pieces) > len(pack.features):
        log.note("samples are cut at the ends of rows")
    faults, fill = [*_find_lost(pack), *_find_wrong_positions(pack)], []
    # The last token before a seam must not predict the first one after it.
    oracle = [replace(piece, labels=[IGNORED, *piece.labels[1:]]) for piece in pack.pieces]
    rows = range(len(pack.rows["labels"]))
    for row, at, piece, actual, expected in pack.differing_labels(rows, oracle):
        if piece is None:
            reason = f"position {at} belongs to no sample, but has a label"
            fill.append(pack.fault_at(LABELS, row, at, reason))
        elif at > piece.start:
            id_ = piece.ids[at - piece.start]
            reason = describe_label(pack.tokenizer, id_, actual, expected)
            faults.append(pack.fault_at(LABELS, row, at, reason))
        elif at:  # no token predicts the first one of a row
            token = show_token(pack.tokenizer, piece.ids[0])
            reason = (
                f"{token}, the first token of sample {piece.sample}, has a label: the sample before it"
                " would predict it"
            )
            faults.append(pack.fault_at(SEAM, row, at, reason))
    log.judge((WHOLE, LABELS, SEAM, POSITIONS), faults)
    log.judge([LABELS], fill)
    for attention in ATTENTIONS:
        for piece, ratio in zip(pack.pieces, _noise_ratios(pack, attention), strict=True):
            log.judge([ISOLATED], _find_leak(pack, piece, ratio, attention))


def _find_lost(pack: Batch) -> Iterator[Fault]:
    counts = Counter(
        (piece.sample, piece.offset + number)
        for piece in pack.pieces
        for number in range(len(piece.ids))
    )
    for sample, feature in enumerate(pack.features):
        shown = f"sample {sample}: {show_row(pack.tokenizer, feature['input_ids'])}"
        for offset, id_ in enumerate(feature["input_ids"]):
            count = counts[sample, offset]
            how = f"appears {count} times" if count else "is lost"
            reason = f"token {offset} of sample {sample}, {show_token(pack.tokenizer, id_)}, {how}"
            if count != 1:
                yield Fault(WHOLE, reason, (pack.case, shown, *pack.show_rows()))


def _find_wrong_positions(pack: Batch) -> Iterator[Fault]:
    if "position_ids" not in pack.rows:
        if any(piece.start for piece in pack.pieces):
            reason = "the batch lacks position ids: models do not restart at each sample"
            yield Fault(POSITIONS, reason, (pack.case,))
        return
    begin = None
    for piece in pack.pieces:
        row = pack.row_of("position_ids", piece.row)
        first, *rest = row[piece.start : piece.stop]
        if not piece.offset and begin is None:
            begin = first
        wanted = {piece.offset + (begin or 0), begin or 0}
        how = "do not increase by one"
        if first not in wanted:
            how = f"begin with {first} instead of {begin or 0}"
        elif rest == list(range(first + 1, first + len(piece.ids))):
            continue
        reason = f"the position ids of sample {piece.sample} {how}"
        yield Fault(POSITIONS, reason, (pack.case, f"position ids of row {piece.row}: {row[:48]}"))


def _find_leak(pack: Batch, piece: Piece, ratio: float, attention: str) -> Iterator[Fault]:
    if ratio > LIMIT:
        yield Fault(
            ISOLATED,
            f"the logits of sample {piece.sample} in the pack and alone differ by {ratio:.3g}x the"
            f" noise of float32 (limit {LIMIT:g}x): it sees other samples or other positions",
            (
                f"{pack.case}, attention {attention}",
                f"row {piece.row}: {show_row(pack.tokenizer, pack.rows['input_ids'][piece.row])}",
                f"the batch has {', '.join(sorted(pack.tensors))}",
            ),
        )


@cache
def _load(dtype: str, attention: str | None = None) -> Any:  # noqa: ANN401 - transformers
    return load_model(MICRO_MODEL, dtype=dtype, attention=attention).model


def _noise_ratios(pack: Batch, attention: str) -> list[float]:
    """Return each piece's error over the noise. Ids beyond the vocabulary are padding."""
    exact, model = _load("float64"), _load("float32", attention)
    inputs: dict[str, Any] = {key: pack.tensors[key] for key in _INPUTS if key in pack.tensors}
    inputs = {key: int(value) if key.startswith("max_") else value for key, value in inputs.items()}
    ids_BT = inputs["input_ids"]
    inputs["input_ids"] = torch.where(ids_BT < exact.config.vocab_size, ids_BT, 0)
    errors, noise = [], torch.finfo(torch.float32).eps / 2
    with torch.no_grad():
        packed_BTV = model(**inputs, use_cache=False).logits
        for piece in pack.pieces:
            ids_BT = torch.tensor([piece.ids])
            exact_TV = exact(input_ids=ids_BT, use_cache=False).logits[0]
            alone_TV = model(input_ids=ids_BT, use_cache=False).logits[0]
            errors.append(_error(packed_BTV[piece.row, piece.start : piece.stop], exact_TV))
            noise = max(noise, _error(alone_TV, exact_TV))
    return [error / noise for error in errors]


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm, in float64."""
    return float((actual.double() - expected).norm() / expected.norm())
