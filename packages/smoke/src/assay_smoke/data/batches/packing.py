"""Packed batches: several samples in a row that do not see, follow or predict each other.

Shapes: B rows, T positions.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from assay_smoke.data.batches.features import (
    FeatureKind,
    Lengths,
    collate,
    expected_labels,
    make_features,
    padding_variants,
)
from assay_smoke.data.batches.isolation import ATTENTIONS, LIMIT, MicroModel
from assay_smoke.data.properties import PropertyLog, SubjectReport, Wrong, first_wrong
from assay_smoke.data.protocols import IGNORED, Feature, MakeCollator
from assay_smoke.data.running_code import Subject
from assay_smoke.data.tokens.shown_tokens import show_row, show_token, show_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE = "no token is lost or doubled"
LABELS = "a token has the label that its sample has"
SEAM = "no label reaches across a seam"
POSITIONS = "position ids restart with each sample"
ISOLATED = "a packed sample computes what it computes alone"

PROPERTIES = (WHOLE, LABELS, SEAM, POSITIONS, ISOLATED)

# Smallest first: one sample, two, and samples of one token, whose only token is a seam.
PACKS: tuple[Lengths, ...] = ((3,), (3, 3), (2, 7), (5, 1, 4), (12, 2, 30, 9, 3))


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of a sample: offset counts from the sample's begin."""

    sample: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring tokens of one sample in one row; a sample that was not cut is one piece."""

    row: int
    start: int
    first: _Token
    ids: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class _Pack:
    """A packed batch, and where its samples are."""

    tokenizer: "PreTrainedTokenizerBase"
    features: Sequence[Feature]
    batch: Mapping[str, Tensor]
    ids: Sequence[Sequence[int]]
    labels: Sequence[Sequence[int]]
    case: str

    def wrong_at(self, row: int, at: int, reason: str) -> Wrong:
        shown = show_tokens(self.tokenizer, self.ids[row], self.labels[row], at)
        return Wrong(reason, (self.case, *shown))


def check_packing(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence["PreTrainedTokenizerBase"],
    kind: FeatureKind = "masked",
    packs: Sequence[Lengths] = PACKS,
) -> SubjectReport:
    """Pack samples of these lengths, and run each pack through a micro model."""
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
            case = f"samples of {', '.join(map(str, lengths))} tokens"
            judge_packed(log, _read(variant.tokenizer, features, batch, case), model)
    return log.report()


def _read(
    tokenizer: "PreTrainedTokenizerBase",
    features: Sequence[Feature],
    batch: Mapping[str, Tensor],
    case: str,
) -> _Pack:
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    return _Pack(tokenizer, features, batch, ids, labels, case)


def judge_packed(log: PropertyLog, pack: _Pack, model: MicroModel) -> None:
    """Judge all properties of one batch."""
    pieces = list(_find_pieces(pack))
    if len(pieces) > len(pack.features):
        log.note("samples are cut at the ends of rows")
    log.judge(WHOLE, _find_lost(pack, pieces))
    log.judge(LABELS, first_wrong(_find_label(pack, piece) for piece in pieces))
    log.judge(LABELS, _find_learned_fill(pack, pieces))
    log.judge(SEAM, first_wrong(_find_seam(pack, piece) for piece in pieces))
    log.judge(POSITIONS, _find_position(pack, pieces))
    for attention in ATTENTIONS:
        logits_BTV = model.packed_logits(pack.batch, attention)
        packed = [(logits_BTV[one.row, one.start : one.stop], one.ids) for one in pieces]
        ratios = model.noise_ratios(packed, attention)
        for piece, ratio in zip(pieces, ratios, strict=True):
            log.judge(ISOLATED, _find_leak(pack, piece, ratio, attention))


def _find_pieces(pack: _Pack) -> Iterator[_Piece]:
    """The samples in the rows, found by their ids; what belongs to none is left out."""
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
    pack: _Pack, first: _Token, ids: Sequence[int], id_: int, token: _Token | None
) -> bool:
    """Whether `id_` is the next token of the sample that `ids` are of."""
    offset = first.offset + len(ids)
    if token is not None:
        return token == _Token(first.sample, offset)
    own = pack.features[first.sample]["input_ids"]
    return offset == len(own) - 1 and own[offset] == id_


def _find_lost(pack: _Pack, pieces: Sequence[_Piece]) -> Wrong | None:
    rows = [f"row {n}: {show_row(pack.tokenizer, row)}" for n, row in enumerate(pack.ids[:4])]
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
                how = "lost" if not count else f"there {count} times"
                reason = f"token {offset} of sample {sample}, {show_token(pack.tokenizer, id_)}, is {how}"
                shown = f"sample {sample}: {show_row(pack.tokenizer, feature['input_ids'])}"
                return Wrong(reason, (pack.case, shown, *rows))
    return None


def _find_label(pack: _Pack, piece: _Piece) -> Wrong | None:
    """The first token but the piece's own first whose label is another than its sample's."""
    expected = expected_labels(pack.features[piece.first.sample])
    for number in range(1, len(piece.ids)):
        at = piece.start + number
        one, other = pack.labels[piece.row][at], expected[piece.first.offset + number]
        if one == other:
            continue
        token = show_token(pack.tokenizer, piece.ids[number])
        reason = f"the label of {token} is {show_token(pack.tokenizer, one)}"
        if one == IGNORED:
            reason = f"{token} is no label, and has to be one"
        elif other == IGNORED:
            reason = f"{token} is a label, and its sample has none there"
        return pack.wrong_at(piece.row, at, reason)
    return None


def _find_learned_fill(pack: _Pack, pieces: Sequence[_Piece]) -> Wrong | None:
    """A label where no sample is."""
    covered = {(piece.row, at) for piece in pieces for at in range(piece.start, piece.stop)}
    for row, labels in enumerate(pack.labels):
        for at, label in enumerate(labels):
            if label != IGNORED and (row, at) not in covered:
                return pack.wrong_at(row, at, f"position {at} is of no sample, and a label")
    return None


def _find_seam(pack: _Pack, piece: _Piece) -> Wrong | None:
    """A first token that the last token of the sample before it has to predict."""
    if not piece.start or pack.labels[piece.row][piece.start] == IGNORED:
        return None
    token = show_token(pack.tokenizer, piece.ids[0])
    reason = f"{token}, the first token of sample {piece.first.sample}, is a label: the sample before it would have to predict it"
    return pack.wrong_at(piece.row, piece.start, reason)


def _find_position(pack: _Pack, pieces: Sequence[_Piece]) -> Wrong | None:
    several = any(piece.start for piece in pieces)
    if "position_ids" not in pack.batch:
        if not several:
            return None
        return Wrong(
            "there are no position ids: models count on from sample to sample", (pack.case,)
        )
    rows = pack.batch["position_ids"].tolist()
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
                reason = f"the position ids of sample {piece.first.sample} do not go up by one"
            return Wrong(reason, (pack.case, f"position ids of row {piece.row}: {row[:48]}"))
    return None


def _find_leak(pack: _Pack, piece: _Piece, ratio: float, attention: str) -> Wrong | None:
    if ratio <= LIMIT:
        return None
    return Wrong(
        f"the logits of sample {piece.first.sample} differ from those of the sample alone by"
        f" {ratio:.3g}x the noise of float32 (limit {LIMIT:g}x): it sees other samples or other positions",
        (
            f"{pack.case}, attention {attention}",
            f"row {piece.row}: {show_row(pack.tokenizer, pack.ids[piece.row])}",
            f"the batch has {', '.join(sorted(pack.batch))}",
        ),
    )
