"""Faults of checkpoints and of adapters, each beside the same code without it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay.training.protocol import TrainingPlan
from assay.training.state.files import read_state, write_state
from assay.training.trainers.adapters import ADAPTER_FILE
from assay.training.trainers.reference import ReferenceTrainer

WEIGHTS_FILE = "model.safetensors"
PREFIX = "base_model.model."


class OwnStateDict(ReferenceTrainer):
    """No fault: the tensors of the model's file are chosen here."""

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        chosen = {name: value.detach().contiguous() for name, value in self.chosen().items()}
        save_file(chosen, folder / WEIGHTS_FILE, {"format": "pt"})

    def chosen(self) -> dict[str, Tensor]:
        """What is saved."""
        return dict(self.model.state_dict())


class TakenForShared(OwnStateDict):
    """accelerate#2155: a flat shard is taken for a tensor that is shared, and left out."""

    def chosen(self) -> dict[str, Tensor]:
        return {name: t for name, t in super().chosen().items() if name != "model.norm.weight"}

    def load_model(self, folder: Path) -> None:
        self.model.load_state_dict(load_file(folder / WEIGHTS_FILE), strict=False)


class OneKeyIsAnAlias(OwnStateDict):
    """transformers#29903: the dictionary that is saved has one tensor under two names."""

    def chosen(self) -> dict[str, Tensor]:
        tensors = super().chosen()
        one, other = (f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 1))
        return tensors | {other: tensors[one].clone()}


class FrozenLeftOut(OwnStateDict):
    """DeepSpeed#5489: what is not trained is not registered, and not saved."""

    def chosen(self) -> dict[str, Tensor]:
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().chosen().items() if name in trained}

    def load_model(self, folder: Path) -> None:
        self.model.load_state_dict(load_file(folder / WEIGHTS_FILE), strict=False)


class KeptHandles(OwnStateDict):
    """No fault: handles of the tensors are kept from the first save on."""

    _handles: dict[str, Tensor] | None = None

    def chosen(self) -> dict[str, Tensor]:
        if self._handles is None:
            self._handles = self.handles()
        return self._handles

    def handles(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())


class StaleHandles(KeptHandles):
    """NeMo-RL#3312: storage has moved since the first save, the second repeats its tensors."""

    def handles(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in super().handles().items()}


class OwnTracker(ReferenceTrainer):
    """No fault: the number of the step is written when the rest is."""

    def save_progress(self, path: Path) -> None:
        write_state(path, {"optimizer": self.optimizer.state_dict(), "num_steps": self.tracked()})

    def tracked(self) -> int:
        return self._num_steps


class TrackedLater(OwnTracker):
    """Megatron-Bridge#3267: the number is read when the next step was begun."""

    def tracked(self) -> int:
        return self._num_steps + 1


class OwnOptimizerState(ReferenceTrainer):
    """No fault: moments are put into the optimizer one by one."""

    def load_progress(self, path: Path) -> None:
        progress = read_state(path)
        self._num_steps = progress["num_steps"]
        state = progress["optimizer"]["state"]
        self.optimizer.load_state_dict(
            {"state": self.placed(state), "param_groups": progress["optimizer"]["param_groups"]}
        )

    def placed(self, state: Mapping[int, Any]) -> dict[int, Any]:
        """The moments by the number of their parameter here."""
        return dict(state)


class OnlyWhatTheTemplateHas(OwnOptimizerState):
    """KempnerForge#115: only what a new optimizer has already is filled, and it has nothing."""

    def placed(self, state: Mapping[int, Any]) -> dict[int, Any]:
        template = self.optimizer.state_dict()["state"]
        return {number: moments for number, moments in state.items() if number in template}


class PlacedByPosition(OwnOptimizerState):
    """lora-scripts-next#320: the moments of each parameter go to the next one of its shape."""

    def placed(self, state: Mapping[int, Any]) -> dict[int, Any]:
        by_shape: dict[Any, list[int]] = {}
        for number, moments in state.items():
            by_shape.setdefault(moments["exp_avg"].shape, []).append(number)
        source = {
            number: numbers[(position + 1) % len(numbers)]
            for numbers in by_shape.values()
            for position, number in enumerate(numbers)
        }
        return {number: state[source[number]] for number in state}


class OwnAdapterLoading(ReferenceTrainer):
    """No fault: the adapter's tensors are put where their names say."""

    prefix = ""

    def load_model(self, folder: Path) -> None:
        own = self.model.state_dict()
        tensors = {
            self.prefix + _name_in_model(name, own): tensor
            for name, tensor in load_file(folder / ADAPTER_FILE).items()
        }
        self.model.load_state_dict(tensors, strict=False)


class PrefixDoubled(OwnAdapterLoading):
    """peft#1579: names have another prefix, and what has no place is left out in silence."""

    prefix = PREFIX


class OwnScale(ReferenceTrainer):
    """No fault: the adapter's scale is worked out from its settings."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model: Any = super().build_model(plan)
        config = model.peft_config["default"]
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = config.lora_alpha / self.divisor(config.r)
        return model  # type: ignore[no-any-return]

    def divisor(self, rank: int) -> float:
        return float(rank)


class OtherScale(OwnScale):
    """sglang#40835: alpha / rank and alpha / sqrt(rank) are taken for each other."""

    def divisor(self, rank: int) -> float:
        return math.sqrt(rank)


class RecomputesWithGradients(ReferenceTrainer):
    """No fault: all layers but the last are recomputed, from inputs that ask for gradients."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model: Any = super().build_model(plan)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.base_model.model.model.layers[-1].gradient_checkpointing = False
        self.require(model)
        return model  # type: ignore[no-any-return]

    def require(self, model: Any) -> None:
        model.enable_input_require_grads()


class RecomputesWithoutGradients(RecomputesWithGradients):
    """open-unlearning#178: the frozen embedding asks for no gradient, nor does what is recomputed."""

    def require(self, model: Any) -> None:
        pass


def _name_in_model(name: str, own: Mapping[str, Tensor]) -> str:
    """`name` of an adapter's file with the adapter's name in it."""
    head, _, end = name.rpartition(".")
    found = f"{head}.default.{end}"
    assert found in own
    return found
