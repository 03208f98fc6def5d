"""Checks collators: padded batches, and packed ones, whose samples do not see or predict each other.

Samples have no repeated ids, so that every token is found again in the rows of a batch.

Shapes: B rows, T positions, V vocabulary.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from assay.models import load_model
from assay_smoke.data.properties import Fault, PropertyLog, Subject, SubjectReport
from assay_smoke.data.protocols import (
    IGNORED,
    Collate,
    Feature,
    FeatureKind,
    MakeCollator,
    Tokenizer,
)
from assay_smoke.data.tokens import show_row, show_token, show_tokens

Lengths = tuple[int, ...]

_WANTED = "a mapping with input_ids and labels, each a tensor (B, T)"

# Ids that every model has. They are bytes in byte-level vocabularies. Letters come first, for display.
_LETTERS = (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))
_IDS = tuple(dict.fromkeys((*_LETTERS, *range(256))))


def make_features(tokenizer: Tokenizer, lengths: Lengths, kind: FeatureKind) -> list[Feature]:
    """Make samples of these lengths from distinct ids. Samples of two tokens or more end with EOS.

    kind: the first half of masked samples has no labels.
    """
    special = set(tokenizer.all_special_ids)
    free = iter([id_ for id_ in _IDS if id_ not in special])
    eos = tokenizer.eos_token_id
    features: list[Feature] = []
    for length in lengths:
        ends = length > 1 and eos is not None
        ids = [next(free) for _ in range(length - ends)] + ([eos] if ends else [])
        feature = Feature(input_ids=ids, attention_mask=[1] * length)
        if kind == "masked":
            prompt = length // 2
            feature["labels"] = [IGNORED] * prompt + ids[prompt:]
        features.append(feature)
    return features


def describe_lengths(features: Sequence[Feature]) -> str:
    """Describe samples by their lengths."""
    lengths = ", ".join(str(len(feature["input_ids"])) for feature in features)
    return f"samples of {lengths} tokens"


def describe_label(tokenizer: Tokenizer, id_: int, actual: int, expected: int) -> str:
    """Describe a label of the token `id_` that differs from its sample's."""
    token = show_token(tokenizer, id_)
    if actual == IGNORED:
        return f"{token} has no label, but its sample has one"
    if expected == IGNORED:
        return f"{token} has a label, but its sample has none"
    return f"the label of {token} is {show_token(tokenizer, actual)}"


def make_collators(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    sides: Sequence[str],
) -> Iterator[tuple[Collate, Tokenizer, str]]:
    """Yield a collator for each tokenizer and side of padding, with the tokenizer and its description.

    A missing pad token becomes EOS.
    """
    for given in tokenizers:
        for side in sides:
            tokenizer = copy.deepcopy(given)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            tokenizer.padding_side = side
            with_eos = "with EOS " if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
            described = f"tokenizer pads {with_eos}on the {side}"
            with subject.called_for(f"a {described.replace(' ', ' that ', 1)}"):
                collator = make_collator(copy.deepcopy(tokenizer))
            yield collator, tokenizer, described


def collate(subject: Subject, collator: Collate, features: list[Feature]) -> dict[str, Tensor]:
    """Collate `features`. Raises: RaisedError for a malformed batch."""
    with subject.called_for(describe_lengths(features)):
        batch: Any = collator(features)
        if not hasattr(batch, "keys"):
            raise subject.returned(f"a {type(batch).__name__}", _WANTED)
        tensors = {
            key: value if isinstance(value, Tensor) else torch.as_tensor(value)
            for key, value in dict(batch).items()
        }
    for key in ("input_ids", "labels"):
        if key not in tensors:
            raise subject.returned(f"a batch without {key}", _WANTED)
        if tensors[key].dim() != 2 or tensors[key].shape != tensors["input_ids"].shape:
            raise subject.returned(f"{key} of the shape {list(tensors[key].shape)}", _WANTED)
    return tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent tokens of one sample in one row. An uncut sample is one piece."""

    row: int
    start: int
    sample: int
    offset: int
    """Position of its first token in the sample."""
    ids: list[int]
    labels: list[int]
    """Labels that the sample gives its tokens."""

    @property
    def stop(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Batch:
    """A batch with its samples."""

    tokenizer: Tokenizer
    features: Sequence[Feature]
    tensors: Mapping[str, Tensor]
    case: str
    """Description of samples and tokenizer."""

    @cached_property
    def rows(self) -> Mapping[str, list[list[int]]]:
        """Return the rows of each entry."""
        return {key: tensor.tolist() for key, tensor in self.tensors.items()}

    def row_of(self, key: str, number: int) -> list[int]:
        """Return a row of an entry. A single row is that of all samples."""
        rows = self.rows[key]
        return rows[number if number < len(rows) else 0]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Find the samples in the rows by their ids. The mask may be wrong, so it is not used."""
        samples = [feature["input_ids"] for feature in self.features]
        labels = [feature.get("labels", feature["input_ids"]) for feature in self.features]
        begins = {  # EOS is in all samples, and begins none
            id_: (sample, offset)
            for sample, ids in enumerate(samples)
            for offset, id_ in enumerate(ids)
            if id_ != self.tokenizer.eos_token_id
        }
        found: list[Piece] = []
        for row, ids in enumerate(self.rows["input_ids"]):
            piece, following = None, 0
            for at, id_ in enumerate(ids):
                if piece is None or samples[piece.sample][following : following + 1] != [id_]:
                    piece = None
                    if id_ not in begins:
                        continue
                    sample, following = begins[id_]
                    piece = Piece(row, at, sample, following, [], [])
                    found.append(piece)
                piece.ids.append(id_)
                piece.labels.append(labels[piece.sample][following])
                following += 1
        return found

    def show_rows(self) -> list[str]:
        """Show the ids of the first rows, one row per line."""
        rows = enumerate(self.rows["input_ids"][:4])
        return [f"row {number}: {show_row(self.tokenizer, row)}" for number, row in rows]

    def fault_at(self, name: str, row: int, at: int, reason: str) -> Fault:
        """Return the fault `reason` of the property `name`, shown at the position `at` of a row."""
        ids, labels = (self.rows[key][row] for key in ("input_ids", "labels"))
        shown = show_tokens(self.tokenizer, ids, labels, at)
        return Fault(name, reason, (f"{self.case}; row {row}", *shown))

    def differing_labels(
        self, rows: Iterable[int], pieces: Sequence[Piece]
    ) -> Iterator[tuple[int, int, Piece | None, int, int]]:
        """Compare the labels of these rows with those of the pieces. Other tokens must have none.

        Yields: row, position, piece (None for a token of none), actual and expected label.
        """
        expected = {
            (piece.row, at): (piece, label)
            for piece in pieces
            for at, label in enumerate(piece.labels, piece.start)
        }
        for row in rows:
            for at, actual in enumerate(self.rows["labels"][row]):
                piece, label = expected.get((row, at), (None, IGNORED))
                if actual != label:
                    yield row, at, piece, actual, label


ONE_ROW_EACH = "every sample is one row, whole and once"
LABELS = "a token has the label that its sample has"
NO_PADDING_LEARNED = "padding has no label"
MASKED = "the attention mask is 1 for tokens and 0 for padding"
ROW_POSITIONS = "position ids begin at 0 in every row"
UNCHANGED = "a sample can be collated again"

PADDING_PROPERTIES = (
    ONE_ROW_EACH,
    LABELS,
    NO_PADDING_LEARNED,
    MASKED,
    ROW_POSITIONS,
    UNCHANGED,
)

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
    log = PropertyLog(subject.name, PADDING_PROPERTIES)
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
            log.judge(PADDING_PROPERTIES[:-1], first)
            broken = {fault.name for fault in first}
            changed = (
                Fault(
                    UNCHANGED, f"samples that were collated before: {fault.reason}", fault.example
                )
                for name in PADDING_PROPERTIES
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
                yield Fault(ROW_POSITIONS, reason, (case, f"position ids: {positions}"))


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


WHOLE = "no token is lost or doubled"
SEAM = "no label reaches across a seam"
PACKED_POSITIONS = "position ids restart with each sample"
ISOLATED = "a packed sample computes what it computes alone"

PACKING_PROPERTIES = (WHOLE, LABELS, SEAM, PACKED_POSITIONS, ISOLATED)

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
    log = PropertyLog(subject.name, PACKING_PROPERTIES)
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
    log.judge((WHOLE, LABELS, SEAM, PACKED_POSITIONS), faults)
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
            yield Fault(PACKED_POSITIONS, reason, (pack.case,))
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
        yield Fault(
            PACKED_POSITIONS, reason, (pack.case, f"position ids of row {piece.row}: {row[:48]}")
        )


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
