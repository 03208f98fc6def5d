"""Checks packed batches: samples in one row that do not see or predict each other.

Shapes: B rows, T positions, V vocabulary.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from assay.models import load_model
from assay_smoke.data.batches.features import (
    CollatedBatch,
    FeatureKind,
    Lengths,
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
from assay_smoke.data.protocols import IGNORED, MakeCollator, Tokenizer
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


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of a sample."""

    sample: int
    offset: int
    """Position in the sample."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Adjacent tokens of one sample in one row. An uncut sample is one piece."""

    row: int
    start: int
    first: _Token
    ids: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


def check_packing(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    kind: FeatureKind = "masked",
    packs: Sequence[Lengths] = PACKS,
) -> SubjectReport:
    """Pack samples of these lengths and run each pack through a micro model."""
    model = MicroModel()
    log = PropertyLog(subject.name, PROPERTIES)
    for variant in padding_variants(tokenizers):
        if variant.tokenizer.padding_side == "left":
            continue  # a pack has no side
        with subject.called_for(f"a tokenizer that {variant.described}"):
            collator = make_collator(copy.deepcopy(variant.tokenizer))
        for lengths in packs:
            features = make_features(variant.tokenizer, lengths, kind)
            batch = collate(subject, collator, copy.deepcopy(features))
            case = describe_lengths(features)
            _judge_packed(log, CollatedBatch(variant.tokenizer, features, batch, case), model)
    return log.report()


def _judge_packed(log: PropertyLog, pack: CollatedBatch, model: "MicroModel") -> None:
    """Judge all properties of one batch."""
    pieces = list(_find_pieces(pack))
    if len(pieces) > len(pack.features):
        log.note("samples are cut at the ends of rows")
    log.judge(WHOLE, _find_lost(pack, pieces))
    log.judge(LABELS, first_violation(_find_label(pack, piece) for piece in pieces))
    log.judge(LABELS, _find_learned_fill(pack, pieces))
    log.judge(SEAM, first_violation(_find_seam(pack, piece) for piece in pieces))
    log.judge(POSITIONS, _find_position(pack, pieces))
    for attention in ATTENTIONS:
        logits_BTV = model.packed_logits(pack.tensors, attention)
        packed = [(logits_BTV[one.row, one.start : one.stop], one.ids) for one in pieces]
        ratios = model.noise_ratios(packed, attention)
        for piece, ratio in zip(pieces, ratios, strict=True):
            log.judge(ISOLATED, _find_leak(pack, piece, ratio, attention))


def _find_pieces(pack: CollatedBatch) -> Iterator[_Piece]:
    """Find the samples in the rows by their ids."""
    known = {
        id_: _Token(sample, offset)
        for sample, feature in enumerate(pack.features)
        for offset, id_ in enumerate(feature["input_ids"])
        if id_ != pack.tokenizer.eos_token_id
    }
    for number, row in enumerate(pack.ids):
        begin, first, ids = 0, None, list[int]()
        for at, id_ in enumerate(row):
            token = known.get(id_)
            follows = first is not None and _follows(pack, first, ids, id_, token)
            if first is not None and not follows:
                yield _Piece(number, begin, first, tuple(ids))
                first = None
            if first is None and token is not None:
                begin, first, ids = at, token, [id_]
            elif follows:
                ids.append(id_)
        if first is not None:
            yield _Piece(number, begin, first, tuple(ids))


def _follows(
    pack: CollatedBatch, first: _Token, ids: Sequence[int], id_: int, token: _Token | None
) -> bool:
    """Return whether `id_` continues the sample to which `ids` belong."""
    offset = first.offset + len(ids)
    if token is not None:
        return token == _Token(first.sample, offset)
    own = pack.features[first.sample]["input_ids"]
    return offset == len(own) - 1 and own[offset] == id_


def _find_lost(pack: CollatedBatch, pieces: Sequence[_Piece]) -> Violation | None:
    for sample, feature in enumerate(pack.features):
        offsets = [
            piece.first.offset + number
            for piece in pieces
            if piece.first.sample == sample
            for number in range(len(piece.ids))
        ]
        for offset, id_ in enumerate(feature["input_ids"]):
            count = offsets.count(offset)
            if count != 1:
                token = show_token(pack.tokenizer, id_)
                how = f"appears {count} times" if count else "is lost"
                reason = f"token {offset} of sample {sample}, {token}, {how}"
                shown = f"sample {sample}: {show_row(pack.tokenizer, feature['input_ids'])}"
                return Violation(reason, (pack.case, shown, *pack.show_rows()))
    return None


def _find_label(pack: CollatedBatch, piece: _Piece) -> Violation | None:
    """Find the first token of a piece, other than its own first, with a label unlike its sample's."""
    expected = expected_labels(pack.features[piece.first.sample])
    for number in range(1, len(piece.ids)):
        at = piece.start + number
        one, other = pack.labels[piece.row][at], expected[piece.first.offset + number]
        if one == other:
            continue
        reason = describe_label(pack.tokenizer, piece.ids[number], one, other)
        return pack.violation_at(piece.row, at, reason)
    return None


def _find_learned_fill(pack: CollatedBatch, pieces: Sequence[_Piece]) -> Violation | None:
    """Find a label outside of all samples."""
    covered = {(piece.row, at) for piece in pieces for at in range(piece.start, piece.stop)}
    for row, labels in enumerate(pack.labels):
        for at, label in enumerate(labels):
            if label != IGNORED and (row, at) not in covered:
                reason = f"position {at} belongs to no sample, but has a label"
                return pack.violation_at(row, at, reason)
    return None


def _find_seam(pack: CollatedBatch, piece: _Piece) -> Violation | None:
    """Find a labeled first token, which the last token of the sample before it would predict."""
    if not piece.start or pack.labels[piece.row][piece.start] == IGNORED:
        return None
    token = show_token(pack.tokenizer, piece.ids[0])
    reason = (
        f"{token}, the first token of sample {piece.first.sample}, has a label: the sample before it"
        " would predict it"
    )
    return pack.violation_at(piece.row, piece.start, reason)


def _find_position(pack: CollatedBatch, pieces: Sequence[_Piece]) -> Violation | None:
    several = any(piece.start for piece in pieces)
    rows = pack.rows_of("position_ids")
    if rows is None:
        if not several:
            return None
        return Violation(
            "there are no position ids: models do not restart at each sample", (pack.case,)
        )
    begin = None
    for piece in pieces:
        row = rows[piece.row] if piece.row < len(rows) else rows[0]
        actual = row[piece.start : piece.stop]
        if not piece.first.offset and begin is None:
            begin = actual[0]
        wanted = {piece.first.offset + (begin or 0), begin or 0}
        if actual[0] not in wanted or actual != list(range(actual[0], actual[0] + len(actual))):
            reason = f"the position ids of sample {piece.first.sample} begin with {actual[0]} instead of {begin or 0}"
            if actual[0] in wanted:
                reason = f"the position ids of sample {piece.first.sample} do not increase by one"
            return Violation(reason, (pack.case, f"position ids of row {piece.row}: {row[:48]}"))
    return None


def _find_leak(
    pack: CollatedBatch, piece: _Piece, ratio: float, attention: str
) -> Violation | None:
    if ratio <= LIMIT:
        return None
    return Violation(
        f"the logits of sample {piece.first.sample} in the pack and alone differ by {ratio:.3g}x the"
        f" noise of float32 (limit {LIMIT:g}x): it sees other samples or other positions",
        (
            f"{pack.case}, attention {attention}",
            f"row {piece.row}: {show_row(pack.tokenizer, pack.ids[piece.row])}",
            f"the batch has {', '.join(sorted(pack.tensors))}",
        ),
    )


class MicroModel:
    """A micro model in float64 and float32."""

    @cached_property
    def _exact(self) -> Any:  # noqa: ANN401 - transformers
        return load_model(MICRO_MODEL, dtype="float64").model

    @cached_property
    def _by_attention(self) -> dict[str, Any]:
        return {
            attention: load_model(MICRO_MODEL, dtype="float32", attention=attention).model
            for attention in ATTENTIONS
        }

    def packed_logits(self, batch: Mapping[str, Tensor], attention: str) -> Tensor:
        """Compute logits (B, T, V) of a whole batch in float32. Ids beyond the vocabulary are padding."""
        inputs: dict[str, Any] = {key: batch[key] for key in _INPUTS if key in batch}
        inputs = {
            key: int(value) if key.startswith("max_") else value for key, value in inputs.items()
        }
        known = batch["input_ids"] < self._exact.config.vocab_size
        inputs["input_ids"] = torch.where(known, batch["input_ids"], 0)
        with torch.no_grad():
            logits_BTV: Tensor = self._by_attention[attention](**inputs, use_cache=False).logits
        return logits_BTV

    def noise_ratios(
        self, packed: Sequence[tuple[Tensor, Sequence[int]]], attention: str
    ) -> list[float]:
        """Return each sample's error over the noise.

        packed: the logits (T, V) in the pack and the ids of each sample.
        """
        errors, noise = [], torch.finfo(torch.float32).eps / 2
        for logits_TV, ids in packed:
            ids_BT = torch.tensor([list(ids)])
            with torch.no_grad():
                exact_TV = self._exact(input_ids=ids_BT, use_cache=False).logits[0].double()
                alone = self._by_attention[attention](input_ids=ids_BT, use_cache=False)
            errors.append(_error(logits_TV, exact_TV))
            noise = max(noise, _error(alone.logits[0], exact_TV))
        return [error / noise for error in errors]


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm, in float64."""
    return float((actual.double() - expected).norm() / expected.norm())
