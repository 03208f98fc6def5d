"""A training loop of one's own, wrapped so that assay can check it.

    assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16 \
        --candidate-trainer examples/own_trainer.py:OwnTrainer

The verdict is PASS.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.models import load_model
from assay.training import MicroBatch, StepReport, TrainingPlan, count_label_tokens, set_up


class OwnTrainer:
    """A plain PyTorch loop over a Hugging Face model."""

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer."""
        if plan.mesh or plan.features:
            raise ValueError("this trainer knows one process and no features such as lora")
        self.plan, self.num_steps = plan, 0
        self.device, dtype = plan.run.split("/")
        torch.manual_seed(plan.seed)
        # Also micro:... recipes; AutoModelForCausalLM.from_pretrained does for folders and names.
        model = load_model(plan.model, dtype=dtype, device=self.device).model
        self.model: nn.Module = set_up(model, plan.setup).train()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=plan.learning_rate
        )

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one optimizer step over the micro-batches of `batch`."""
        num_tokens = sum(count_label_tokens(micro_batch) for micro_batch in batch)
        self.optimizer.zero_grad(set_to_none=True)  # here, not after the step: .grad is compared
        total = 0.0
        for micro_batch in batch:
            on_device = {name: value.to(self.device) for name, value in micro_batch.items()}
            loss = self.compute_loss(on_device, num_tokens)
            self.backward(loss)
            total += loss.item()
        norm = self.clip_gradients(self.plan.max_grad_norm)
        self.optimizer_step()
        self.num_steps += 1
        return StepReport(self.num_steps - 1, total, num_tokens, norm, self.plan.learning_rate)

    # The phases of a step as methods of their own: so each is compared by itself.

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        """Return one micro-batch's share in the mean over all label tokens of the step."""
        logits_BTV = self.model(
            input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
        ).logits
        summed = nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1).float(),
            micro_batch["labels"][:, 1:].flatten(),  # -100 does not count
            reduction="sum",
        )
        return summed / num_step_tokens

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""
        loss.backward()

    def clip_gradients(self, max_norm: float) -> float:
        """Clip to the global norm; the norm before."""
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def optimizer_step(self) -> None:
        """Change the parameters."""
        self.optimizer.step()

    # What is kept between two steps.

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": {"torch": torch.get_rng_state()},
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generators"]["torch"])
        self.num_steps = state["num_steps"]

    def save(self, folder: Path) -> None:
        """Write a checkpoint: `model` for its users, the rest for `load`."""
        self.model.save_pretrained(folder / "model")  # type: ignore[operator]  # of transformers
        torch.save(self.state_dict(), folder / "state.pt")

    def load(self, folder: Path) -> None:
        """Resume from the checkpoint in `folder`."""
        self.load_state_dict(torch.load(folder / "state.pt"))

    def teardown(self) -> None:
        """Let go of the memory."""
        del self.model, self.optimizer
