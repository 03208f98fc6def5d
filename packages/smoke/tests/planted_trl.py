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
