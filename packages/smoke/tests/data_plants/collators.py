"""Collators of users: two correct ones, and known mistakes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
Batch = Mapping[str, Tensor]
Collator = Callable[[list[dict[str, list[int]]]], Batch]


def right_padded(tokenizer: Any) -> Collator:
    return _padding(tokenizer)


def _padding(
    tokenizer: Any,
    *,
    labels: Callable[[list[int], list[int]], list[int]] = lambda _, labels: labels,
    pad_label: int = IGNORED,
) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        width = max(len(feature["input_ids"]) for feature in features)

        def fill(values: Sequence[int], value: int) -> list[int]:
            padding = [value] * (width - len(values))
            left = tokenizer.padding_side == "left"
            return [*padding, *values] if left else [*values, *padding]

        def own(feature: dict[str, list[int]]) -> list[int]:
            given = feature.get("labels", feature["input_ids"])
            return labels(feature["input_ids"], given)

        return {
            "input_ids": torch.tensor(
                [fill(one["input_ids"], tokenizer.pad_token_id) for one in features]
            ),
            "attention_mask": torch.tensor(
                [fill([1] * len(one["input_ids"]), 0) for one in features]
            ),
            "labels": torch.tensor([fill(own(one), pad_label) for one in features]),
        }

    return collate


def pad_id_masked(tokenizer: Any) -> Collator:
    """Mask every label with the pad id, including the real EOS if it pads."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        batch["labels"] = batch["labels"].masked_fill(
            batch["input_ids"] == tokenizer.pad_token_id, IGNORED
        )
        return batch

    return collate


def mask_from_ids(tokenizer: Any) -> Collator:
    """Derive the attention mask from the pad id."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        batch["attention_mask"] = (batch["input_ids"] != tokenizer.pad_token_id).long()
        return batch

    return collate


def without_mask(tokenizer: Any) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        del batch["attention_mask"]
        return batch

    return collate


def first_row_only(tokenizer: Any) -> Collator:
    """Flatten a nested list, which leaves one sample of the batch."""
    return lambda features: _padding(tokenizer)(features[:1])


def one_row_of_all(tokenizer: Any) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        names = ("input_ids", "attention_mask", "labels")
        whole = {name: [value for one in features for value in one[name]] for name in names}
        return _padding(tokenizer)([whole])

    return collate


def padding_learned(tokenizer: Any) -> Collator:
    return _padding(tokenizer, pad_label=tokenizer.pad_token_id)


def first_label_masked(tokenizer: Any) -> Collator:
    """Mask the label of a sample's first token, which no token predicts."""
    return _padding(tokenizer, labels=lambda _, labels: [IGNORED, *labels[1:]])


def filled_from_another_sample(tokenizer: Any) -> Collator:
    """Fill rows with the longest sample's last token before its end, and with its label."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        longest = max((one["input_ids"] for one in features), key=len)
        for name in ("input_ids", "labels"):
            batch[name] = batch[name].masked_fill(batch["attention_mask"] == 0, longest[-2])
        return batch

    return collate


def prompt_learned(tokenizer: Any) -> Collator:
    """Ignore the labels of the samples."""
    return _padding(tokenizer, labels=lambda ids, _: ids)


def shifted(tokenizer: Any) -> Collator:
    return _padding(tokenizer, labels=lambda _, labels: [*labels[1:], IGNORED])


def shifted_to_the_right(tokenizer: Any) -> Collator:
    return _padding(tokenizer, labels=lambda _, labels: [IGNORED, *labels[:-1]])


def first_row_again(tokenizer: Any) -> Collator:
    return lambda features: _padding(tokenizer)([features[0], *features[:-1]])


def labels_on_the_right(tokenizer: Any) -> Collator:
    """Pad ids on padding_side, but labels on the right."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        width = batch["input_ids"].shape[1]
        rows = [[*one["labels"], *[IGNORED] * (width - len(one["labels"]))] for one in features]
        batch["labels"] = torch.tensor(rows)
        return batch

    return collate


def last_token_cut(tokenizer: Any) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        cut = [{name: values[:-1] or values for name, values in one.items()} for one in features]
        return _padding(tokenizer)(cut)

    return collate


def positions_of_the_row(tokenizer: Any) -> Collator:
    """Count position ids from the start of the row, including padding."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        rows, width = batch["input_ids"].shape
        batch["position_ids"] = torch.arange(width).expand(rows, width)
        return batch

    return collate


def positions_not_padded(tokenizer: Any) -> Collator:
    """Pad everything to a multiple of eight except the position ids."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        width = batch["input_ids"].shape[1]
        places = torch.arange(width).expand(len(features), width)
        fills = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        more = {name: torch.full((len(features), -width % 8), fill) for name, fill in fills.items()}
        right = tokenizer.padding_side == "right"
        padded = {
            name: torch.cat([one, more[name]] if right else [more[name], one], 1)
            for name, one in batch.items()
        }
        return padded | {"position_ids": places}

    return collate


def masked_by_another_pad(tokenizer: Any) -> Collator:
    """Derive the mask from a pad id that is not the tokenizer's."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_padding(tokenizer)(features))
        batch["attention_mask"] = (batch["input_ids"] != tokenizer.mask_token_id).long()
        return batch

    return collate


def inputs_and_targets(tokenizer: Any) -> Collator:
    """Give inputs without the last token and labels without the first, as for another kind of model."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        pairs = [
            {"input_ids": one["input_ids"][:-1], "labels": one["labels"][1:]}
            if len(one["input_ids"]) > 1
            else one
            for one in features
        ]
        return _padding(tokenizer)(pairs)

    return collate


def samples_extended(tokenizer: Any) -> Collator:
    """Append padding to the lists of the dataset itself."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = _padding(tokenizer)(features)
        width = batch["input_ids"].shape[1]
        for one in features:
            missing = width - len(one["input_ids"])
            one["input_ids"] += [tokenizer.pad_token_id] * missing
            one["attention_mask"] += [0] * missing
            one["labels"] += [IGNORED] * missing
        return batch

    return collate


def padded_in_place(tokenizer: Any) -> Collator:
    """Replace the lists of the dataset by padded ones, which no later batch makes shorter."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        width = max(len(feature["input_ids"]) for feature in features)
        blank = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "labels": IGNORED}
        for feature in features:
            for key, value in blank.items():
                own, pad = feature[key], [value] * (width - len(feature[key]))
                feature[key] = own + pad if tokenizer.padding_side == "right" else pad + own
        return {key: torch.tensor([feature[key] for feature in features]) for key in blank}

    return collate


def labels_taken_out(tokenizer: Any) -> Collator:
    """Take the labels out of the dataset's own samples."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        labels = [feature.pop("labels") for feature in features]
        given = [{**feature, "labels": own} for feature, own in zip(features, labels, strict=True)]
        return _padding(tokenizer)(given)

    return collate


def packed_in_place(_: Any) -> Collator:
    """Append all samples to the lists of the first."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = _packing()(features)
        for one in features[1:]:
            for name, values in one.items():
                features[0][name] += values
        return batch

    return collate


def right_packed(_: Any) -> Collator:
    return _packing()


def _packing(
    *,
    restart: bool = True,
    seam: bool = False,
    with_mask: bool = False,
    positions: bool = True,
    change: Callable[[list[int]], list[int]] = lambda values: values,
) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        ids = [id_ for one in features for id_ in change(one["input_ids"])]
        labels = []
        for one in features:
            own = change(one.get("labels", one["input_ids"]))
            labels += own if seam else [IGNORED, *own[1:]]
        places = [place for one in features for place in range(len(change(one["input_ids"])))]
        batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        if positions:
            batch["position_ids"] = torch.tensor([places if restart else list(range(len(ids)))])
        if with_mask:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch

    return collate


def packed_with_mask_of_ones(_: Any) -> Collator:
    """Return a mask of ones, for which the model sees one sample. Only varlen kernels would isolate."""
    return _packing(with_mask=True)


def packed_counting_on(_: Any) -> Collator:
    return _packing(restart=False)


def packed_counting_from_one(_: Any) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        batch["position_ids"] = batch["position_ids"] + 1
        return batch

    return collate


def packed_cut_at_120(_: Any) -> Collator:
    """Cut a pack at the largest length of a sample."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        return {name: values[:, :120] for name, values in _packing()(features).items()}

    return collate


def packed_without_positions(_: Any) -> Collator:
    return _packing(positions=False)


def packed_over_the_seam(_: Any) -> Collator:
    return _packing(seam=True)


def packed_without_last_tokens(_: Any) -> Collator:
    return _packing(change=lambda values: values[:-1] or values)


def packed_with_a_token_twice(_: Any) -> Collator:
    return _packing(change=lambda values: [*values[:1], *values])


def packed_with_prompts(_: Any) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        return _packing()([{"input_ids": one["input_ids"]} for one in features])

    return collate


def packed_with_eos_masked(tokenizer: Any) -> Collator:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        at_eos = batch["input_ids"] == tokenizer.eos_token_id
        batch["labels"] = batch["labels"].masked_fill(at_eos, IGNORED)
        return batch

    return collate


def packed_with_learned_fill(tokenizer: Any) -> Collator:
    """Fill the row to a multiple of eight, with labels."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        missing = -batch["input_ids"].shape[1] % 8 + 8
        fill = torch.full((1, missing), tokenizer.mask_token_id)
        batch["input_ids"] = torch.cat([batch["input_ids"], fill], 1)
        batch["labels"] = torch.cat([batch["labels"], fill], 1)
        batch["position_ids"] = torch.cat([batch["position_ids"], torch.arange(missing)[None]], 1)
        return batch

    return collate


def packed_positions_not_filled(tokenizer: Any) -> Collator:
    """Fill the row to a multiple of eight without more position ids."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        missing = -batch["input_ids"].shape[1] % 8
        for name, fill in (("input_ids", tokenizer.pad_token_id), ("labels", IGNORED)):
            batch[name] = torch.cat([batch[name], torch.full((1, missing), fill)], 1)
        return batch

    return collate


def packed_ranges_summed(_: Any) -> Collator:
    """Begin the labels of each sample where those of the one before ended, not where its ids did."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        ids, labels, begin = batch["input_ids"][0], torch.full_like(batch["labels"], IGNORED), 0
        for one in features:
            first = next(at for at, label in enumerate(one["labels"]) if label != IGNORED)
            own = slice(begin + first, begin + len(one["labels"]))
            labels[0, own] = ids[own]
            begin += len(one["labels"]) - first
        return batch | {"labels": labels}

    return collate


def packed_in_two_rows(_: Any) -> Collator:
    """Pack samples in turn into two rows of one length, a correct pack of another shape."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        rows = [dict(_packing()(one)) for one in (features[::2], features[1::2]) if one]
        width = max(row["input_ids"].shape[1] for row in rows)
        fills = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}
        return {
            name: torch.cat(
                [
                    functional.pad(row[name], (0, width - row[name].shape[1]), value=fill)
                    for row in rows
                ]
            )
            for name, fill in fills.items()
        }

    return collate


def packed_with_mask_for_sdpa(_: Any) -> Collator:
    """Return a correct boolean mask of pairs of positions, (B, 1, T, T)."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        of = torch.tensor([at for at, one in enumerate(features) for _ in one["input_ids"]])
        mask_TT = (of[:, None] == of).tril()
        return batch | {"attention_mask": mask_TT[None, None]}

    return collate


def packed_with_causal_mask_alone(_: Any) -> Collator:
    """Return a boolean mask of pairs that does not isolate samples."""

    def collate(features: list[dict[str, list[int]]]) -> Batch:
        batch = dict(_packing()(features))
        size = batch["input_ids"].shape[1]
        return batch | {"attention_mask": torch.ones(1, 1, size, size, dtype=torch.bool).tril()}

    return collate
