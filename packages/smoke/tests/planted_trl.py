"""TRL's SFTTrainer with a fault each, to be given as `--candidate-trainer FILE.py:CLASS`."""

from torch import Tensor, nn

from assay.training.protocol import TrainingPlan
from assay_smoke.trainers.trl import TRLTrainer


class LastMicroBatchOnly(TRLTrainer):
    """Each backward begins with no gradients: what earlier micro-batches added is lost."""

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        super().backward(loss)


class MeanOfMeans(TRLTrainer):
    """The loss of each micro-batch is divided by its own label tokens, not by the step's."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        # What transformers sets for a model whose forward takes no number of tokens.
        self._loop.model_accepts_loss_kwargs = False
        return model


class StaticallyScaled(TRLTrainer):
    """No fault: the loss is multiplied by a scale, which is taken off before gradients are clipped."""

    scale = 1024.0

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.scale)

    def clip_gradients(self, max_norm: float) -> float:
        self.unscale()
        return super().clip_gradients(max_norm)

    def unscale(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.scale


class ClipsBeforeUnscaling(StaticallyScaled):
    """Gradients are clipped as the scale has left them, and then divided by it."""

    def clip_gradients(self, max_norm: float) -> float:
        norm = TRLTrainer.clip_gradients(self, max_norm)
        self.unscale()
        return norm / self.scale
