"""SFTTrainers with one fault each, for `--candidate-trainer FILE.py:CLASS`."""

from torch import Tensor, nn

from assay.training.protocol import TrainingPlan
from assay_smoke.trainers.trl import TRLTrainer


class LastMicroBatchOnly(TRLTrainer):
    """Loses the gradients of earlier micro-batches."""

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        super().backward(loss)


class MeanOfMeans(TRLTrainer):
    """Divides each micro-batch's loss by its own label tokens instead of the step's."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        # transformers sets this for a model whose forward takes no number of tokens.
        self._loop.model_accepts_loss_kwargs = False
        return model


class StaticallyScaled(TRLTrainer):
    """Correct: scales the loss and unscales the gradients before clipping."""

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
    """Clips scaled gradients and unscales them afterwards."""

    def clip_gradients(self, max_norm: float) -> float:
        norm = TRLTrainer.clip_gradients(self, max_norm)
        self.unscale()
        return norm / self.scale
