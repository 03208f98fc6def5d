"""Makes the batches that a model trains on, with the labels and the loss of its own forward call.

Which labels a model takes is tried: of the losses that assay computes, the first one that equals the loss
that the model returns for such labels is its own. No list of architectures is needed, and a loss that assay
cannot reproduce is refused.

Shape legend: B rows, T positions, V tokens or classes.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.hooks.suspension import exact_for
from assay.inputs import Batch, ModelLimits, insert_media
from assay.media import find_input_limits, find_processing, on_model
from assay.models import LoadedModel
from assay.models.config_files import first_line
from assay.training.batches import (
    PROMPT_SHARE,
    Batches,
    TextCoder,
    check_batch,
    training_batches,
)
from assay.training.losses import IGNORED, LOSSES, add_losses
from assay.training.protocol import NEXT_TOKEN, MicroBatch
from assay.training.reports import TrainOptions
from assay.training.state.files import read_state, write_state

# The file of a golden with the batches.
_FILE = "batches"

# Largest difference of two computations of one loss: models compute theirs in float32.
_SAME_LOSS = 1e-5

# Part of the frames of a sound that has labels: a loss of CTC needs more frames than labels.
_FRAMES_PER_LABEL = 3

# The arguments of a model of text.
_TEXT = {"input_ids", "attention_mask", "labels"}

# An image in one text of each micro-batch, a text without one next to it, and a text with two.
_PLACES: tuple[tuple[float, ...], ...] = ((0.5,), (), (0.0, 0.7))


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The batches of all steps, and the loss of their labels."""

    batches: Batches
    loss: str
    notes: tuple[str, ...] = ()
    other_loss: str = ""
    """Difference of the model's own loss from `loss`; "" if they agree, or if the model computes none."""

    @property
    def is_text(self) -> bool:
        """Return True for the next tokens of texts without images."""
        return self.loss == NEXT_TOKEN and self.batches[0][0].keys() <= _TEXT

    def write(self, golden: Path) -> None:
        """Write the batches and the name of the loss into a golden."""
        batches = [[*one] for one in self.batches]
        write_state(golden / _FILE, {"batches": batches, "loss": self.loss})

    @classmethod
    def read(cls, golden: Path) -> Self:
        """Read what `write` wrote."""
        return cls(**read_state(golden / _FILE))


def plan_data(loaded: LoadedModel, options: TrainOptions) -> TrainingData:
    """Plan the batches of a model, which is tried on the first micro-batch.

    Raises: UsageError if the model takes no labels, or computes another loss from them than assay.
    """
    with _evaluated(loaded.model), exact_for(loaded.dtype):
        limits = find_input_limits(loaded, find_processing(loaded))
        planner = _Planner(loaded, limits, options.seed)
        texts = planner.draw_texts(options)
        planner.try_inputs(texts[0][0])
        notes = [f"no text holds an image: {limits.no_media}"] if limits.no_media else []
        loss, other_loss = planner.find_loss(texts[0][0])
    numbers = count()
    batches = [[planner.micro_batch(loss, one, next(numbers)) for one in step] for step in texts]
    for batch in batches:
        check_batch(batch, loss)
    return TrainingData(batches, loss, tuple(notes), other_loss)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Call `model` without dropout and gradients inside this context.

    Some classes write the kind of their labels into their configuration.
    """
    config: Any = model.config
    kinds = {name: one for name, one in vars(config).items() if name == "problem_type"}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            yield
    finally:
        vars(config).update(kinds)
        model.train(was_training)


@dataclass
class _Planner:
    """Makes micro-batches of a model from those of texts."""

    loaded: LoadedModel
    limits: ModelLimits
    seed: int
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the trial: their shape says which labels fit."""

    def draw_texts(self, options: TrainOptions) -> Batches:
        """Draw texts, which only give the numbers of rows to a model without tokens."""
        reads_text = self.limits.has_tokens or self.loaded.decoder_start
        return training_batches(
            TextCoder(self._encode if reads_text else _bytes_of, self.loaded.pad_token_id),
            steps=options.steps,
            micro_batches=options.micro_batches,
            longest=self.limits.max_positions,
            shapes=options.shapes,
            seed=options.seed,
        )

    def _encode(self, text: str) -> list[int]:
        return [one for one in self.loaded.encode(text) if one not in self.limits.placeholders]

    def inputs_of(self, text: MicroBatch, number: int) -> dict[str, Tensor]:
        """Return the inputs of micro-batch `number` of the run, which has the rows of `text`."""
        limits = self.limits
        inputs = {name: text[name] for name in ("input_ids", "attention_mask")}
        if limits.end_token_id is not None:
            places = inputs["attention_mask"].cumsum(1).argmax(1, keepdim=True)
            inputs["input_ids"] = inputs["input_ids"].scatter(1, places, limits.end_token_id)
        if limits.media or limits.images:
            rows = [ids[mask != 0].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
            ids = tuple(tuple(row) if limits.has_tokens else () for row in rows)
            numbers = tuple(number * len(_PLACES) + row for row in range(len(rows)))
            batch = Batch(0, ids, numbers, limits.pad_token_id, 0)
            inputs = insert_media(batch, limits, self.seed, _PLACES[: len(rows)]).inputs
        if self.loaded.decoder_start:
            shifted = nn.functional.pad(
                self._targets(text), (1, -1), value=self.loaded.decoder_start[0]
            )
            inputs["decoder_input_ids"] = shifted.where(shifted != IGNORED, limits.pad_token_id)
        return inputs

    def list_losses(self, inputs: MicroBatch) -> list[str]:
        """Return the losses whose labels fit the shape of the logits, in the order of likelihood."""
        if self.logits.ndim == 3:
            of_tokens = [NEXT_TOKEN, "token"] if "input_ids" in inputs else ["ctc", "ctc-mean"]
            return ["token"] if self.loaded.decoder_start else of_tokens
        of_rows = ["class", "multi-label", "regression"][2 * (self.logits.shape[-1] == 1) :]
        return of_rows if self.logits.ndim == 2 else []

    def labels_of(self, loss: str, text: MicroBatch, inputs: MicroBatch, number: int) -> Tensor:
        """Return labels for micro-batch `number`, which has the rows of `text`."""
        draw = random.Random(f"{self.seed} {number}")  # noqa: S311 - reproducible, no secret
        num_rows, num_classes = len(text["labels"]), self.logits.shape[-1]
        if loss in (NEXT_TOKEN, "token"):
            is_decoder = bool(self.loaded.decoder_start)
            labels = self._targets(text) if is_decoder else self._labels_of_tokens(inputs)
            return labels.where(labels == IGNORED, labels % num_classes)
        if loss == "class":
            return torch.tensor([draw.randrange(num_classes) for _ in range(num_rows)])
        if loss in ("multi-label", "regression"):
            # Exact in every dtype.
            levels = [0.0, 1.0] if loss == "multi-label" else [one / 64 for one in range(-128, 129)]
            values = torch.tensor(draw.choices(levels, k=num_rows * num_classes))
            return values.reshape(num_rows, num_classes).squeeze(1)
        model: Any = self.loaded.model
        blank = model.config.pad_token_id
        others = [one for one in range(num_classes) if one != blank]
        most = max(1, self.logits.shape[1] // _FRAMES_PER_LABEL)
        rows = [draw.choices(others, k=draw.randint(1, most)) for _ in range(num_rows)]
        return _pad(map(torch.tensor, rows))

    def _targets(self, text: MicroBatch) -> Tensor:
        """Return what a decoder predicts, (B, T): the text behind the prompt."""
        return _pad(row[row != IGNORED] for row in text["labels"])

    def _labels_of_tokens(self, inputs: MicroBatch) -> Tensor:
        """Return the token ids (B, T) behind each prompt, except those that stand for an image."""
        ids_BT, mask_BT = inputs["input_ids"], inputs["attention_mask"]
        is_prompt_BT = mask_BT.cumsum(1) <= mask_BT.sum(1, keepdim=True) // PROMPT_SHARE
        is_image_BT = torch.isin(ids_BT, torch.tensor(self.limits.placeholders))
        return ids_BT.masked_fill((mask_BT == 0) | is_prompt_BT | is_image_BT, IGNORED)

    def micro_batch(self, loss: str, text: MicroBatch, number: int) -> MicroBatch:
        """Return micro-batch `number` of the run with the labels of its loss."""
        inputs = self.inputs_of(text, number)
        return {**inputs, "labels": self.labels_of(loss, text, inputs, number)}

    def try_inputs(self, text: MicroBatch) -> None:
        """Call the model, and keep its logits. Raises: UsageError if it fails or returns none."""
        model: Any = self.loaded.model
        inputs = on_model(self.inputs_of(text, 0), next(model.parameters()))
        why, output = "it returns no logits", None
        try:
            output = model(**inputs)
        except Exception as error:  # noqa: BLE001 - model code raises anything
            why = first_line(error)
        if not isinstance(logits := getattr(output, "logits", None), Tensor):
            raise UsageError(f"{type(model).__name__} cannot be trained: {why}")
        self.logits = logits

    def find_loss(self, text: MicroBatch) -> tuple[str, str]:
        """Find the loss that the model computes from labels.

        Returns: its name, and how the own loss of a decoder of text differs from that of the next token.
        Raises: UsageError.
        """
        model: Any = self.loaded.model
        inputs, problem, difference = self.inputs_of(text, 0), "", ""
        for name in self.list_losses(inputs):
            labels = self.labels_of(name, text, inputs, 0)
            labels = on_model({"labels": labels}, next(model.parameters()))["labels"]
            try:
                own = self._compute_own_loss(inputs, labels)
                total = float(add_losses(name, self.logits, labels, model.config))
            except Exception as error:  # noqa: BLE001 - model code raises anything
                problem = problem or first_line(error)
                continue
            mean = total / LOSSES[name].count(labels)
            if any(abs(own - one) <= _SAME_LOSS * max(1.0, abs(own)) for one in (mean, total)):
                return name, ""
            found = f"it is {own:.6g}, and the {name} loss of its logits {mean:.6g}"
            difference = difference or found
        if self.loaded.can_generate and NEXT_TOKEN in self.list_losses(inputs):
            return NEXT_TOKEN, difference and f"the model's own loss is another one: {difference}"
        why = difference or problem or "no labels fit its logits"
        raise UsageError(f"{type(model).__name__} has no loss that assay can train by: {why}")

    def _compute_own_loss(self, inputs: MicroBatch, labels: Tensor) -> float:
        """Return the loss that the model computes from labels, from which it makes the inputs of a decoder."""
        model: Any = self.loaded.model
        given = on_model(inputs, next(model.parameters()))
        shifted = given.pop("decoder_input_ids", None)
        try:
            return float(model(**given, labels=labels).loss)
        except Exception:
            if shifted is None:
                raise
            # Its configuration may lack the first token of the decoder.
            return float(model(**given, decoder_input_ids=shifted, labels=labels).loss)


def _pad(rows: Iterable[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=IGNORED)


def _bytes_of(text: str) -> list[int]:
    return [*text.encode()]
