"""Faults that are planted in the training of models of several kinds: trainers, and setup functions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from assay.training import MicroBatch, ReferenceTrainer, count_label_tokens
from assay.training.losses import IGNORED, add_losses


class MeanOfRows(ReferenceTrainer):
    """Divides by the rows of the micro-batch, not by those of the step."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        del num_step_tokens
        return super().compute_loss(micro_batch, count_label_tokens(micro_batch, self.plan.loss))


class ShiftsLabels(ReferenceTrainer):
    """Predicts the next token's class, as a decoder does."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        labels = micro_batch["labels"]
        shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
        return super().compute_loss({**micro_batch, "labels": shifted}, num_step_tokens)


class HalvesSquares(ReferenceTrainer):
    """Takes half of the squared error for the loss of a reward."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, num_step_tokens) / 2


class WeightsClasses(ReferenceTrainer):
    """Weights the classes unequally, where the model weights them equally."""

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        inputs = {name: one for name, one in micro_batch.items() if name != "labels"}
        logits = self.network(**inputs).logits
        summed: Any = sum(
            (1 + int(label)) * add_losses("class", row[None], label[None], None)
            for row, label in zip(logits, micro_batch["labels"], strict=True)
        )
        loss: Tensor = summed / num_step_tokens
        return loss


def _with(micro_batch: MicroBatch, **changed: Tensor) -> Mapping[str, Tensor]:
    return {**micro_batch, **changed}


class ShowsTargets(ReferenceTrainer):
    """Gives the decoder its labels without the shift: it sees what it is to predict."""

    def on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        labels = micro_batch["labels"]
        seen = labels.where(labels != IGNORED, 0)
        return super().on_device(_with(micro_batch, decoder_input_ids=seen))


class TrainsPadding(ReferenceTrainer):
    """Leaves the padding of the decoder's labels in the loss."""

    def on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        labels = micro_batch["labels"]
        return super().on_device(_with(micro_batch, labels=labels.where(labels != IGNORED, 0)))


class TrainsImageTokens(ReferenceTrainer):
    """Leaves the tokens of an image in the labels."""

    def on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        ids, labels = micro_batch["input_ids"], micro_batch["labels"]
        model: Any = self.model
        is_text = ids != model.config.image_token_id
        return super().on_device(_with(micro_batch, labels=labels.where(is_text, ids)))


class TrainsTower(ReferenceTrainer):
    """Freezes nothing."""

    def freeze(self, model: nn.Module) -> None:
        del model


def wrong_blank(model: Any) -> None:
    """Take another token for the blank of CTC."""
    model.config.pad_token_id = 5


def _cut(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, output: output.detach())


def projector_without_gradient(model: Any) -> None:
    """Drop the gradient of the projector between images and text."""
    _cut(model.model.multi_modal_projector)


def router_without_gradient(model: Any) -> None:
    """Drop the gradient of the router of the last layer."""

    def cut(_module: nn.Module, _args: object, output: Any) -> Any:
        return tuple(one.detach() for one in output)

    model.model.layers[1].mlp.gate.register_forward_hook(cut)


def wrong_cross_attention(model: Any) -> None:
    """Scale the keys of a decoder's cross-attention."""
    keys = model.model.decoder.layers[1].encoder_attn.k_proj
    keys.register_forward_hook(lambda _module, _args, output: 1.05 * output)


def wrong_input_of_layer(model: Any) -> None:
    """Scale what a decoder passes to its first layer, which follows dropout."""
    layer = model.model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda _module, args: (1.05 * args[0], *args[1:]))


def wrong_gradient_of_convolution(model: Any) -> None:
    """Scale the gradient that the convolution of a state-space layer gets."""
    layer = model.backbone.layers[1].mixer.in_proj
    layer.register_full_backward_hook(lambda _module, grads, _outputs: (1.05 * grads[0],))
