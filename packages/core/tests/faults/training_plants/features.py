"""Trainers that apply a feature of their plan with one fault each: packed rows, a scaled loss, compiling.

They are asked for the feature, and right without the fault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional

from assay.parallel.pipeline import clip_gradients
from assay.training.batches import pack_rows
from assay.training.protocol import MicroBatch, TrainingPlan
from assay.training.trainers.parallel import FSDPTrainer
from assay.training.trainers.reference import ReferenceTrainer

LAYER = 1
# A layer in one piece has far more operations than any of its modules by itself.
_OPERATIONS_OF_A_LAYER = 30


class IgnoresFeatures(ReferenceTrainer):
    """No fault but silence: what it is asked for is not done."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(replace(plan, features=frozenset()))


class SeamLost(ReferenceTrainer):
    """The second row is taken for the end of the first: its positions go on, and it sees both."""

    def arrange(self, own: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        packed = pack_rows(own)
        begins = [*(packed["position_ids"][0] == 0).nonzero()[:, 0].tolist(), None]
        packed["position_ids"][0, begins[1] : begins[2]] += begins[1]
        return [packed]


class LabelAcrossTheSeam(ReferenceTrainer):
    """The last token of a row learns how the next row begins."""

    def arrange(self, own: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        labels = torch.cat([one["labels"][one["attention_mask"] != 0] for one in own])
        return [{**pack_rows(own), "labels": labels[None]}]


class PaddingIsARow(ReferenceTrainer):
    """Rows are laid end to end with their padding, which sees and is seen."""

    def arrange(self, own: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        whole = [{**one, "attention_mask": torch.ones_like(one["attention_mask"])} for one in own]
        return [pack_rows(whole)]


class ClippedAsItIsScaled(ReferenceTrainer):
    """Gradients are clipped first: GradScaler takes the scale off in its step."""

    def clip_gradients(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self._trained(), max_norm))


class UnscaledByTheNextScale(ReferenceTrainer):
    """The scale is changed between backward and unscaling."""

    def clip_gradients(self, max_norm: float) -> float:
        self.scaler.update(self.scaler.get_scale() / 2)
        return super().clip_gradients(max_norm)


class StepsInSpiteOfOverflow(ReferenceTrainer):
    """The optimizer is stepped past GradScaler, which skips nothing then."""

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def adapt_scale(self) -> bool:
        super().adapt_scale()
        return False


class ScaleNotRestored(ReferenceTrainer):
    """A resumed run begins with the first scale again."""

    def load_counters(self, state: Mapping[str, Any]) -> None:
        self._num_steps = state["num_steps"]


class FoundInfNotReduced(FSDPTrainer):
    """Each rank looks for what overflowed in its own shards, and steps by itself."""

    def clip_gradients(self, max_norm: float) -> float:
        gradients = [_local(one.grad) for one in self._trained() if one.grad is not None]
        self._overflowed = not all(bool(one.isfinite().all()) for one in gradients)
        for one in gradients:
            one.div_(self.scaler.get_scale())
        return float(clip_gradients(self._trained(), max_norm))

    def optimizer_step(self) -> None:
        if not self._overflowed:
            self.optimizer.step()

    def adapt_scale(self) -> bool:
        found = torch.tensor(float(self._overflowed))
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found:
            self.scaler.update(self.scaler.get_scale() / 2)
        return bool(found)


class OtherActivation(ReferenceTrainer):
    """A compiler takes one activation for another, in one layer."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        layer = model.get_submodule(f"model.layers.{LAYER}")
        layer.compile(backend=_with_gelu(1), dynamic=True)
        return model


class OtherActivationInOnePiece(ReferenceTrainer):
    """The same, where it compiles the whole layer in one piece, as nobody measures it."""

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        model = super().build_model(plan)
        layer = model.get_submodule(f"model.layers.{LAYER}")
        layer.compile(backend=_with_gelu(_OPERATIONS_OF_A_LAYER), dynamic=True)
        return model


def _with_gelu(fewest_operations: int) -> Callable[..., Any]:
    """A backend that runs what it is given, but for silu in graphs of so many operations."""

    def backend(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        del inputs
        calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
        for node in calls:
            if node.target is functional.silu and len(calls) >= fewest_operations:
                node.target, node.kwargs = functional.gelu, {}
        graph.recompile()
        run: Callable[..., Any] = graph.forward
        return run

    return backend


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[no-any-return]
