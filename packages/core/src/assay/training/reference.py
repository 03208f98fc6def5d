"""The trainer that others are held to: one process, one device, nothing fused."""

import gc
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.models import load_model
from assay.models.folders import RemoteCode
from assay.models.quiet import quiet_transformers
from assay.stages import StepReport, TrainingPlan
from assay.training.adapters import add_lora, load_adapter, save_adapter
from assay.training.batches import IGNORED, MicroBatch, check_batch
from assay.training.randomness import generator_states, restore_generators
from assay.training.setups import set_up
from assay.training.state_files import read_state, write_state

FEATURES = frozenset({"lora"})

# Of a checkpoint folder: what users take away, and what only a resume needs.
MODEL_FOLDER = "model"
TRAINER_STATE = "trainer"


class ReferenceTrainer:
    """Trains as a textbook does, in methods that are meant to be overridden one by one.

    A step is: gradients set to none; for each micro-batch `compute_loss` and `backward`; then
    `reduce_gradients`, `clip_gradients`, `optimizer_step`. Gradients stay until the next step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, remote_code: RemoteCode = "refuse") -> None:
        self._remote_code = remote_code
        self._num_steps = 0

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer. Raises: UsageError for what this trainer cannot do."""
        unknown = sorted(plan.features - FEATURES)
        if unknown or prod(plan.mesh.values()) != 1:
            wanted = ", ".join(unknown) or f"meshes such as {dict(plan.mesh)}"
            known = ", ".join(sorted(FEATURES))
            raise UsageError(
                f"the reference trainer does not know {wanted}; it is one process, and knows: {known}"
            )
        self.plan = plan
        self.device = open_run(parse_run(plan.run))
        self.device.seed(plan.seed)
        self.model = self.build_model(plan)
        self.optimizer = self.build_optimizer(self.model)

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        """The model in training mode on its device, with its adapter where one is asked for."""
        model = load_model(
            plan.model,
            dtype=parse_run(plan.run).dtype,
            device=self.device.torch_device,
            remote_code=self._remote_code,
        ).model
        model = set_up(model, plan.setup)
        if "lora" in plan.features:
            model = add_lora(model)
        return model.train()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over what is trainable. Raises: UsageError if nothing is."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise UsageError(f"{self.plan.model} has no trainable parameter")
        return torch.optim.AdamW(parameters, lr=self.plan.learning_rate)

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        """One optimizer step over the micro-batches of `batch`."""
        num_tokens = check_batch(batch)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        with self.device.execution():
            for micro_batch in batch:
                loss = self.compute_loss(self.on_device(micro_batch), num_tokens)
                self.backward(loss)
                total += loss.item()
            self.reduce_gradients()
            grad_norm = self.clip_gradients(self.plan.max_grad_norm)
            self.optimizer_step()
        report = StepReport(
            step=self._num_steps,
            loss=total,
            num_tokens=num_tokens,
            grad_norm=grad_norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
        )
        self._num_steps += 1
        return report

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        """Summed token losses over the unmasked label tokens of the whole step, nats.

        Over all micro-batches (and ranks) they add up to the mean of the step.
        """
        logits_BTV = self.model(
            input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
        ).logits
        # At least float32: a sum over a vocabulary in 8 bits would be the loudest error.
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        summed = functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            micro_batch["labels"][:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        return summed / num_step_tokens

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        loss.backward()

    def reduce_gradients(self) -> None:
        """Add up gradients over ranks: nothing to do on one."""

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`.

        Returns: the norm before.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))

    def optimizer_step(self) -> None:
        """Change the parameters."""
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Write a checkpoint into `folder`: the model for its users, the rest for a resume."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_model(folder / MODEL_FOLDER)
        state = self.state_dict()
        write_state(folder / TRAINER_STATE, {key: state[key] for key in state if key != "model"})

    def save_model(self, folder: Path) -> None:
        """Write the model, of an adapted one the adapter, as a Hugging Face folder."""
        if "lora" in self.plan.features:
            save_adapter(self.model, folder)
        else:
            model: Any = self.model
            with quiet_transformers():
                model.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Go on where `save` was called; `setup` comes first.

        Raises: AdapterError, StateFileError or UsageError if the checkpoint is not whole.
        """
        self.load_model(folder / MODEL_FOLDER)
        self._load_rest(read_state(folder / TRAINER_STATE))

    def load_model(self, folder: Path) -> None:
        """Read what `save_model` wrote."""
        if "lora" in self.plan.features:
            load_adapter(self.model, folder)
        else:
            dtype = parse_run(self.plan.run).dtype
            saved = load_model(str(folder), dtype=dtype, remote_code=self._remote_code).model
            self.model.load_state_dict(saved.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, whole: parameters, moments, generators."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": generator_states(self.device.torch_device),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; `setup` comes first."""
        self.model.load_state_dict(state["model"])
        self._load_rest(state)

    def _load_rest(self, state: Mapping[str, Any]) -> None:
        self.load_optimizer(state["optimizer"])
        self.load_generators(state["generators"])
        self._num_steps = state["num_steps"]

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore moments and counters."""
        self.optimizer.load_state_dict(dict(state))

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Restore the random number generators."""
        restore_generators(states, self.device.torch_device)

    def teardown(self) -> None:
        """Let go of model and optimizer."""
        del self.model, self.optimizer
        gc.collect()

    def on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        """The tensors of a micro-batch where the model is."""
        return {name: tensor.to(self.device.torch_device) for name, tensor in micro_batch.items()}
