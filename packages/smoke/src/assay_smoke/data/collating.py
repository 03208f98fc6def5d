"""Checks collators: padded batches, and packed ones, whose samples do not see or predict each other.

A collator may choose rows, padding and packs. So an oracle takes the places of the samples from the
batch, and writes there what is right: labels, mask and position ids. The first other value is the fault.
Samples have no repeated ids, so that every token is found again in the rows of a batch.

Shapes: B rows, T positions, V vocabulary.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from assay.judge.wording import format_number
from assay.models import load_model
from assay.models.config_files import first_line
from assay_smoke.data.protocols import (
    IGNORED,
    Collate,
    Feature,
    FeatureKind,
    MakeCollator,
    Tokenizer,
)
from assay_smoke.data.tokens import show_row, show_token, show_tokens
from assay_smoke.data.verdict import Fault, RaisedError, Subject, SubjectReport
from assay_smoke.judging import relative_error

Lengths = tuple[int, ...]

_WANTED = "a mapping with input_ids and labels, each a tensor (B, T)"

# Ids that every model has. They are bytes in byte-level vocabularies. Letters come first, for display.
# Collators often fill rows with 0.
_LETTERS = (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))
_IDS = tuple(dict.fromkeys((*_LETTERS, *range(1, 256))))


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


Field = Literal["labels", "attention_mask", "position_ids"]

# The word for a value in examples.
_SHOWN = {"labels": "label", "attention_mask": "mask", "position_ids": "position"}


@dataclass(frozen=True)
class Batch:
    """A batch with its samples."""

    tokenizer: Tokenizer
    features: Sequence[Feature]
    tensors: Mapping[str, Tensor]
    case: str
    """Description of samples and tokenizer."""
    is_pack: bool = False

    @cached_property
    def rows(self) -> Mapping[str, list[list[int]]]:
        """Return the rows of each entry. A single row is that of all samples."""
        num_rows = len(self.tensors["input_ids"])
        rows = {key: tensor.tolist() for key, tensor in self.tensors.items() if tensor.dim() == 2}
        return {key: one * num_rows if len(one) == 1 else one for key, one in rows.items()}

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

    def fault_at(self, name: str, field: Field, row: int, at: int, reason: str) -> Fault:
        """Return the fault `reason` of the property `name`, shown around the position `at` of a row."""
        shown = show_tokens(
            self.tokenizer, self.rows["input_ids"][row], self.rows[field][row], at, _SHOWN[field]
        )
        return Fault(name, reason, (f"{self.case}; row {row}", *shown))

    def fault_of(self, name: str, sample: int, reason: str) -> Fault:
        """Return the fault `reason` of the property `name`, shown by a sample and the first rows."""
        ids = [self.features[sample]["input_ids"], *self.rows["input_ids"][:4]]
        names = [f"sample {sample}", *(f"row {number}" for number in range(4))]
        rows = zip(names, ids, strict=False)
        shown = [f"{title}: {show_row(self.tokenizer, row)}" for title, row in rows]
        return Fault(name, reason, (self.case, *shown))

    def find_lost(self) -> Iterator[tuple[int, str]]:
        """Find tokens that the batch lacks or has twice, each with its sample."""
        counts = Counter(
            (piece.sample, piece.offset + number)
            for piece in self.pieces
            for number in range(len(piece.ids))
        )
        for sample, feature in enumerate(self.features):
            for offset, id_ in enumerate(feature["input_ids"]):
                if (count := counts[sample, offset]) != 1:
                    how = f"appears {count} times" if count else "is lost"
                    token = show_token(self.tokenizer, id_)
                    yield sample, f"token {offset} of sample {sample}, {token}, {how}"


def right_values(batch: Batch, field: Field, at: int, piece: Piece | None) -> tuple[int, ...]:
    """Return all values that a correct collator may write, the usual one first; none if any is right.

    piece: that of the position `at` of its row; None outside all samples.
    """
    if field == "attention_mask":
        return (int(piece is not None),)
    if piece is None:
        return (IGNORED,) if field == "labels" else ()
    if field == "position_ids":
        # The rest of a cut sample may count on or begin again.
        counts_on = batch.rows[field][piece.row][piece.start] == piece.offset
        return (at - piece.start + (piece.offset if counts_on else 0),)
    label = piece.labels[at - piece.start]
    if at > piece.start:
        return (label,)
    # No token predicts the first one of a row, and no sample may predict that of the next.
    return (IGNORED,) if batch.is_pack and at else (label, piece.ids[0], IGNORED)


def _find_faults(
    batch: Batch, field: Field, name: str, samples: Sequence[Piece]
) -> Iterator[Fault]:
    """Compare a field with the oracle's, of a padded batch in the rows of `samples`.

    name: the property that a field of another length breaks.
    """
    width = len(batch.rows["input_ids"][0])
    pieces = {(one.row, at): one for one in samples for at in range(one.start, one.stop)}
    rows = range(len(batch.rows[field])) if batch.is_pack else [one.row for one in samples]
    for row in rows:
        values = batch.rows[field][row]
        if len(values) != width:
            ids = show_row(batch.tokenizer, batch.rows["input_ids"][row])
            reason = f"{field} has {len(values)} positions, and input_ids {width}"
            yield Fault(name, reason, (f"{batch.case}; row {row}", f"ids: {ids}"))
            continue
        for at, actual in enumerate(values):
            piece = pieces.get((row, at))
            right = right_values(batch, field, at, piece)
            if right and actual not in right:
                broken, reason = _describe(batch, field, row, at, piece, right[0])
                yield batch.fault_at(broken, field, row, at, reason)


def _describe(
    batch: Batch, field: Field, row: int, at: int, piece: Piece | None, expected: int
) -> tuple[str, str]:
    """Return the property that a wrong value breaks, and the mistake that makes such a value."""
    actual = batch.rows[field][row][at]
    token = show_token(batch.tokenizer, batch.rows["input_ids"][row][at])
    if field == "attention_mask":
        what = "padding, but is not" if piece is None else "a token of the sample, but is"
        return MASKED, f"{token} at position {at} is {what} masked"
    if piece is None:
        if batch.is_pack:
            return LABELS, f"position {at} belongs to no sample, but has a label"
        return NO_PADDING_LEARNED, f"padding has a label at position {at}"
    if field == "position_ids":
        begins = f"begin with {actual} instead of {expected}"
        how = begins if at == piece.start else "do not increase by one"
        reason = f"the position ids of sample {piece.sample} {how}"
        return PACKED_POSITIONS if batch.is_pack else ROW_POSITIONS, reason
    return _describe_label(batch, piece, at, expected)


def _describe_label(batch: Batch, piece: Piece, at: int, expected: int) -> tuple[str, str]:
    ids, labels = batch.rows["input_ids"][piece.row], batch.rows["labels"][piece.row]
    actual, token = labels[at], show_token(batch.tokenizer, ids[at])
    if batch.is_pack and at == piece.start:
        first = f"{token}, the first token of sample {piece.sample}"
        return SEAM, f"{first}, has a label: the sample before it would predict it"
    is_shifted = labels[piece.start : piece.stop] == [*piece.labels[1:], IGNORED]
    is_right = labels[piece.start + 1 : piece.stop] == piece.labels[:-1]
    learned = any(label != IGNORED for label in piece.labels[:-1])
    unless = ", unless labels are shifted to the right" if is_right else ""
    is_aside = piece.start > 0 and labels[: len(piece.labels)] == piece.labels
    is_end = ids[at] == batch.tokenizer.eos_token_id
    kinds = (
        (is_aside and not batch.is_pack, "labels are padded on the right, and ids on the left"),
        (is_shifted, "labels are shifted by one position, and models shift them again"),
        (is_right and learned, "labels are shifted by one position to the right"),
        (expected == IGNORED, f"{token} has a label, but its sample has none"),
        (actual != IGNORED, f"the label of {token} is {show_token(batch.tokenizer, actual)}"),
        (
            is_end,
            f"the end of the sample, {token}, has no label: a model never learns to stop{unless}",
        ),
        (True, f"{token} has no label, but its sample has one"),
    )
    return LABELS, next(words for holds, words in kinds if holds)


@dataclass(frozen=True, slots=True)
class _Collator:
    """The collator under check, made for a tokenizer."""

    subject: Subject
    tokenizer: Tokenizer
    collate: Collate
    padding: str
    """Description of the tokenizer; empty for a collator that packs."""

    def batch(self, expected: Sequence[Feature], given: list[Feature]) -> Batch:
        """Collate `given`, which should be equal to `expected`. Raises: RaisedError for a malformed batch."""
        hint = f"a sample is a dictionary of lists: {', '.join(expected[0])}"
        if "labels" not in expected[0]:
            hint += "; plain samples have no labels"
        lengths = ", ".join(str(len(feature["input_ids"])) for feature in expected)
        case = f"samples of {lengths} tokens"
        with self.subject.called_for(case, hint):
            batch: Any = self.collate(given)
        if not hasattr(batch, "keys"):
            raise self.subject.returned(f"a {type(batch).__name__}", _WANTED)
        try:
            tensors = {key: torch.as_tensor(value) for key, value in dict(batch).items()}
        except (TypeError, ValueError, RuntimeError) as error:
            lists = f"a batch that cannot become tensors ({first_line(error)})"
            raise self.subject.returned(lists, _WANTED) from error
        if absent := [key for key in ("input_ids", "labels") if key not in tensors]:
            raise self.subject.returned(f"a batch without {absent[0]}", _WANTED)
        # A model may take a pack's mask in another shape.
        by_position = tensors.keys() & (_SHOWN if self.padding else {"position_ids"})
        for key in ("input_ids", "labels", *sorted(by_position)):
            shape, is_own = tensors[key].shape, key in ("input_ids", "labels")
            if len(shape) != 2 or (is_own and shape != tensors["input_ids"].shape):
                wanted = _WANTED if is_own else "(B, T)"
                raise self.subject.returned(f"{key} of the shape {list(shape)}", wanted)
        case += f", the {self.padding}" if self.padding else ""
        return Batch(self.tokenizer, expected, tensors, case, is_pack=not self.padding)


def _make_collators(
    subject: Subject, make_collator: MakeCollator, tokenizers: Sequence[Tokenizer], *sides: str
) -> Iterator[_Collator]:
    """Yield a collator for each tokenizer and side of padding, or one that packs without `sides`.

    A missing pad token becomes EOS.
    """
    for given, side in product(tokenizers, sides or ("right",)):
        tokenizer = copy.deepcopy(given)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = side
        with_eos = "with EOS " if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
        described = f"tokenizer pads {with_eos}on the {side}"
        wanted = "is called with the tokenizer and returns the collator"
        case = f"a {described.replace(' ', ' that ', 1)}"
        with subject.called_for(case, hint=f"{subject.name} {wanted}"):
            collator = make_collator(copy.deepcopy(tokenizer))
        if not callable(collator):
            raise subject.returned(f"a {type(collator).__name__}", f"a collator: it {wanted}")
        yield _Collator(subject, tokenizer, collator, described if sides else "")


WHOLE = "no token is lost or doubled"
ONE_ROW_EACH = "every sample is one row, whole and once"
LABELS = "a token has the label that its sample has"
NO_PADDING_LEARNED = "padding has no label"
MASKED = "the attention mask is 1 for tokens and 0 for padding"
ROW_POSITIONS = "position ids begin at 0 in every row"
UNCHANGED = "a sample can be collated again"

PADDING_PROPERTIES = (ONE_ROW_EACH, LABELS, NO_PADDING_LEARNED, MASKED, ROW_POSITIONS, UNCHANGED)

# Smallest first: one sample, equal lengths, padding of one position and of many, samples that are cut.
BATCHES: tuple[Lengths, ...] = ((2,), (3, 3), (2, 3), (7, 1, 4), (5, 12, 2, 12), (30, 100))


def check_padding(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    kind: FeatureKind = "masked",
    batches: Sequence[Lengths] = BATCHES,
) -> SubjectReport:
    """Collate samples of these lengths with every tokenizer, padding on either side."""
    report = SubjectReport.promising(subject.name, PADDING_PROPERTIES)
    if all(one.pad_token_id not in (None, one.eos_token_id) for one in tokenizers):
        report.note("padding with EOS was not tried: this tokenizer has its own pad token")
    find_faults = partial(_find_padding_faults, report)
    for collator in _make_collators(subject, make_collator, tokenizers, "right", "left"):
        for lengths in batches:
            # A later batch without the longest samples, so that padding left in the others shows.
            *features, short = make_features(collator.tokenizer, (*lengths, 1), kind)
            given = copy.deepcopy(features)
            report.judge(PADDING_PROPERTIES[:-1], find_faults(collator.batch(features, given)))
            later = [at for at, length in enumerate(lengths) if length < max(lengths)]
            later = later or [*range(len(lengths))]
            expected, again = (
                [*(of[at] for at in later), copy.deepcopy(short)] for of in (features, given)
            )
            _judge_later_batch(report, collator, expected, again, find_faults)
    return report


def _judge_later_batch(
    report: SubjectReport,
    collator: _Collator,
    expected: list[Feature],
    given: list[Feature],
    find_faults: Callable[[Batch], Iterable[Fault]],
) -> None:
    """Compare a batch of samples that were collated before with one of fresh samples.

    given: the samples as the collator left them; expected: as they were.
    """
    change, fault = _describe_change(given, expected), None
    why = f"the collator changes its samples: {change}" if change else "the collator keeps a state"
    fresh = collator.batch(expected, copy.deepcopy(expected))
    known = {fault.name for fault in find_faults(fresh)}
    try:
        again = collator.batch(expected, given)
        fault = next((one for one in find_faults(again) if one.name not in known), None)
        widths = [batch.tensors["input_ids"].shape[1] for batch in (again, fresh)]
        if fault is None and widths[0] != widths[1]:
            reason = f"rows have {widths[0]} positions instead of {widths[1]}"
            fault = again.fault_of(UNCHANGED, 0, reason)
    except RaisedError as error:
        if not change:
            raise
        fault = Fault(UNCHANGED, str(error).splitlines()[0], (fresh.case,))
    effect = (
        [fault._replace(name=UNCHANGED, reason=f"{why}. In a later batch, {fault.reason}")]
        if fault
        else []
    )
    report.judge([UNCHANGED], effect)
    if change and not effect:
        report.note(why)


def _describe_change(
    actual: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> str:
    """Describe the first value of a sample that a collator changed, or return an empty string."""
    for number, (one, own) in enumerate(zip(actual, expected, strict=True)):
        for key in {**own, **one}:
            if key not in one or key not in own:
                return f"sample {number} {'gets' if key in one else 'loses'} {key}"
            if repr(one[key]) != repr(own[key]):
                sizes = [len(value) for value in (one[key], own[key])]
                how = "has other values"
                if sizes[0] != sizes[1]:
                    how = f"has {sizes[0]} values instead of {sizes[1]}"
                return f"{key} of sample {number} {how}"
    return ""


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


def _find_padding_faults(report: SubjectReport, batch: Batch) -> Iterator[Fault]:
    rows, side = batch.rows["input_ids"], batch.tokenizer.padding_side
    by_sample = [_find_row(batch, sample) for sample in range(len(batch.features))]
    if None in by_sample or len(by_sample) != len(rows):
        yield _describe_layout(batch, by_sample)
    whole = [piece for piece in by_sample if piece is not None]
    names: dict[Field, str] = {
        "labels": LABELS, "attention_mask": MASKED, "position_ids": ROW_POSITIONS,
    }  # fmt: skip
    for field, name in names.items():
        if field in batch.rows:  # without position ids, models count themselves
            yield from _find_faults(batch, field, name, whole)
    for piece in whole:
        if len(piece.ids) == len(rows[0]):
            continue
        if (piece.start > 0) != (side == "left"):
            report.note(f"padding_side is {side}, and the other side is padded")
        if "attention_mask" in batch.rows:
            continue
        if piece.start:
            reason = "there is padding before tokens, and no attention mask"
            yield batch.fault_of(MASKED, piece.sample, reason)
        else:
            right = "right for causal models padded on the right"
            report.note(f"the batch lacks an attention mask: {right}")


def _describe_layout(batch: Batch, by_sample: Sequence[Piece | None]) -> Fault:
    """Describe the first sample that is not one whole row, or a row of no sample."""
    num_rows, sample = len(batch.rows["input_ids"]), 0
    reason = f"{len(by_sample)} samples make {num_rows} rows"
    if None in by_sample:
        sample = by_sample.index(None)
        lost = f"no row of the batch holds sample {sample} unchanged with only padding around it"
        reason = f"{reason}: {lost}" if num_rows < len(by_sample) else lost
        words = [
            f"row {one.row} holds sample {one.sample} again"
            for one in batch.pieces
            if by_sample[one.sample] not in (None, one)
        ]
        words += [token for of, token in batch.find_lost() if of == sample]
        reason += f": {words[0]}" if words else ""
    return batch.fault_of(ONE_ROW_EACH, sample, reason)


SEAM = "no label reaches across a seam"
PACKED_POSITIONS = "position ids restart with each sample"
ISOLATED = "a packed sample computes what it computes alone"

PACKING_PROPERTIES = (WHOLE, LABELS, SEAM, PACKED_POSITIONS, ISOLATED, UNCHANGED)

# Smallest first. The only token of a sample of one token is a seam. The last pack nearly uses up the
# distinct ids.
PACKS: tuple[Lengths, ...] = ((3,), (3, 3), (2, 7), (5, 1, 4), (12, 2, 30, 9, 3), (30, 100, 90))

# Both run everywhere. Flash attention does not, and takes the same batch.
ATTENTIONS = ("eager", "sdpa")

# Keys of a batch that the model's forward takes.
_INPUTS = (
    "input_ids", "attention_mask", "position_ids",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip

# Limit of a packed sample's error over the noise. Error: packed in float32 against alone in float64.
# Noise: the largest such error of the pack's samples alone in float32. 400 clean packs of up to 8
# samples of up to 20 tokens reach 4.6. In 343 packs whose last token sees one token of another sample,
# the ratio is at least 329. The limit is near the geometric mean of both.
LIMIT = 40.0

# B, heads, queries, keys.
_MASK_BY_PAIRS = 4

MICRO_MODEL = "micro:llama"


def check_packing(
    subject: Subject,
    make_collator: MakeCollator,
    tokenizers: Sequence[Tokenizer],
    kind: FeatureKind = "masked",
    packs: Sequence[Lengths] = PACKS,
) -> SubjectReport:
    """Pack samples of these lengths and run each pack through a micro model."""
    report = SubjectReport.promising(subject.name, PACKING_PROPERTIES)
    find_faults = partial(_find_pack_faults, report)
    for collator in _make_collators(subject, make_collator, tokenizers):
        for lengths in packs:
            features = make_features(collator.tokenizer, lengths, kind)
            given = copy.deepcopy(features)
            pack = collator.batch(features, given)
            report.judge(PACKING_PROPERTIES[:-2], find_faults(pack))
            _judge_isolation(report, pack)
            _judge_later_batch(report, collator, features, given, find_faults)
    return report


def _find_pack_faults(report: SubjectReport, pack: Batch) -> Iterator[Fault]:
    if len(pack.pieces) > len(pack.features):
        report.note("samples are cut at the ends of rows")
    yield from (pack.fault_of(WHOLE, sample, words) for sample, words in pack.find_lost())
    yield from _find_faults(pack, "labels", LABELS, pack.pieces)
    if "position_ids" in pack.rows:
        yield from _find_faults(pack, "position_ids", PACKED_POSITIONS, pack.pieces)
    elif any(piece.start for piece in pack.pieces):
        reason = "the batch lacks position ids: models do not restart at each sample"
        yield Fault(PACKED_POSITIONS, reason, (pack.case,))


def _judge_isolation(report: SubjectReport, pack: Batch) -> None:
    if {len(row) for row in pack.rows.get("position_ids", ())} - {len(pack.rows["input_ids"][0])}:
        return  # no model takes it
    mask = pack.tensors.get("attention_mask")
    attentions: Sequence[str] = ATTENTIONS
    if mask is not None and mask.dtype == torch.bool and mask.dim() == _MASK_BY_PAIRS:
        attentions = ["sdpa"]
        report.note(
            "a boolean mask of pairs is judged with sdpa alone: eager attention adds it to its scores as"
            " numbers, so that samples see each other"
        )
    given = ", ".join(sorted(pack.tensors))
    is_placed = "position_ids" in pack.rows and not any(
        _find_faults(pack, "position_ids", PACKED_POSITIONS, pack.pieces)
    )
    sees = "other samples by attention" if is_placed else "other samples or other positions"
    ratios = {attention: _noise_ratios(pack, attention) for attention in attentions}
    for attention, number in product(attentions, range(len(pack.pieces))):
        ratio, sample = ratios[attention][number], pack.pieces[number].sample
        right = [name for name in attentions if ratios[name][number] <= LIMIT]
        agrees = f"; with {right[0]} it agrees" if right else ""
        reason = (
            f"the logits of sample {sample} in the pack and alone differ by {format_number(ratio)}x the"
            f" noise of float32 (limit {LIMIT:g}x, attention {attention}{agrees}): it sees {sees}."
            f" The batch has {given}"
        )
        leak = pack.fault_of(ISOLATED, sample, reason)
        if not is_placed:  # rows show no positions
            leak = leak._replace(example=leak.example[:1])
        report.judge([ISOLATED], [] if attention in right else [leak])


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
            errors.append(relative_error(packed_BTV[piece.row, piece.start : piece.stop], exact_TV))
            noise = max(noise, relative_error(alone_TV, exact_TV))
    return [error / noise for error in errors]
