"""One rank's part of a pipeline: schedules, steps over micro-batches, tied gradients, the global norm.

Built on torch.distributed.pipelining. Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.nn import functional

from assay.errors import UsageError
from assay.parallel.checkpoints.weight_loading import tied_names
from assay.parallel.clipping import gradient_norm
from assay.parallel.pipeline_parallel.stages import called_module


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of the forward and backward passes of a pipeline."""

    name: str
    """The name in torch."""
    layout: Literal["single", "loop", "v"]
    """single: one stage for each rank; loop: stages are assigned round-robin; v: two for each rank,
    in order and back, so that the first rank also has the last stage."""
    backward: Literal["whole", "split"] = "whole"
    """split: gradients of inputs and of weights are computed separately."""


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", "single"),
        Schedule("1F1B", "single"),
        Schedule("Interleaved1F1B", "loop"),
        Schedule("LoopedBFS", "loop"),
        Schedule("InterleavedZeroBubble", "loop", "split"),
        Schedule("ZBVZeroBubble", "v", "split"),
        Schedule("DualPipeV", "v", "split"),
    )
}


def find_schedule(name: str) -> Schedule:
    """Return the schedule called `name`. Raises: UsageError."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown pipeline schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def stages_of_rank(name: str, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the numbers of the stages of `rank`, in order.

    Raises: UsageError for an unknown name or a number of stages that does not fit its layout.
    """
    layout = find_schedule(name).layout
    fits, wanted = {
        "single": (num_stages == num_ranks, f"{num_ranks}"),
        "loop": (num_stages % num_ranks == 0, f"a multiple of {num_ranks}"),
        "v": (num_stages == 2 * num_ranks, f"{2 * num_ranks}"),
    }[layout]
    if not fits:
        raise UsageError(
            f"{name} on {num_ranks} ranks needs {wanted} pipeline stages, not {num_stages}"
        )
    if layout == "v":
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, num_ranks))


# A micro-batch: `input_ids`, `attention_mask` and `labels`, each (B, T) in int64.
_MicroBatch = Mapping[str, Tensor]

# The label of a token without a loss. Source: torch.nn.functional.cross_entropy.
_IGNORED = -100
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": _IGNORED}


class Pipeline:
    """One rank's stages of a pipeline over the ranks of `mesh`.

    Every rank gets the whole batch: the first stage uses the tokens, each stage the attention mask,
    the last one the labels. Losses are sums over tokens, divided by the number of tokens of the whole
    step (over all ranks), so that gradients of micro-batches add up.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        mesh: DeviceMesh,
        *,
        schedule: str = "1F1B",
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the pipeline, before the optimizer.

        stages: by number, from `cut_stage`; tensor parallelism, LoRA and FSDP2 may be applied.
        mesh: of one axis.
        schedule: a name in `SCHEDULES`.
        hidden_dtype: of the hidden states between stages, by default the parameters' dtype; under
            mixed precision the compute dtype.
        Raises: UsageError for a schedule that is unknown or incompatible with FSDP2.
        """
        self.stages = {index: called_module(stage) for index, stage in stages.items()}
        self.schedule = find_schedule(schedule)
        if self.schedule.backward == "split" and any(
            isinstance(module, FSDPModule)
            for stage in self.stages.values()
            for module in stage.modules()
        ):
            whole = ", ".join(name for name, of in SCHEDULES.items() if of.backward == "whole")
            raise UsageError(
                f"{schedule} splits the backward pass, and FSDP2 then loses gradients; for sharded"
                f" stages take one of {whole}"
            )
        self._num_stages = num_stages
        self._mesh = mesh
        self._group = mesh.get_group()
        self._device = torch.device(mesh.device_type)
        self._config = cast("Any", next(iter(self.stages.values()))).config
        self._hidden_dtype = hidden_dtype or next(
            parameter.dtype for stage in self.stages.values() for parameter in stage.parameters()
        )
        self._loss = _TokenLoss()
        # The shape for which the schedule was built, and the schedule.
        self._built: tuple[tuple[int, ...], Any] | None = None

    def forward_backward(self, batch: Sequence[_MicroBatch], num_step_tokens: int) -> Tensor:
        """Run forward and backward over all micro-batches of `batch`, and sum their gradients.

        num_step_tokens: label tokens of the whole step, on all data-parallel ranks.
        Returns: the loss of these micro-batches, the same on all ranks of the pipeline.
        Raises: UsageError for a batch that cannot be run.
        """
        padded = pad_alike(batch)
        num, rows, length = len(batch), len(batch[0]["input_ids"]), padded["input_ids"].shape[1]
        if self.schedule.layout == "v" and num < self._num_stages:
            raise UsageError(
                f"{self.schedule.name} needs at least {self._num_stages} micro-batches in each step,"
                f" not {num}"
            )
        kept = self._gradients_of_shards()
        schedule = self._built_for(num, rows, length)
        self._loss.num_step_tokens = num_step_tokens
        losses: list[Tensor] = []
        inputs = (padded["input_ids"],) if 0 in self.stages else ()
        last = (
            {"target": padded["labels"], "losses": losses}
            if self._num_stages - 1 in self.stages
            else {}
        )
        schedule.step(
            *inputs, attention_mask=padded["attention_mask"], return_outputs=False, **last
        )
        for parameter, gradient in kept:
            if parameter.grad is not gradient:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else None
        loss = torch.zeros((), device=self._device) if total is None else total.float()
        dist.all_reduce(loss, group=self._group)
        return loss

    def sum_tied_gradients(self) -> None:
        """Sum the gradients of tied embedding and head, so that their copies stay bitwise equal.

        Called once a step, after the last `forward_backward` and before clipping.
        """
        # The (local) gradients of this rank's copies, by end: 0 is the first stage, 1 the last.
        own: dict[int, Tensor] = {}
        for end, name, parameter in self._tied_parameters():
            gradient = parameter.grad
            if gradient is None:
                raise UsageError(
                    f"{name} is tied over the ends of the pipeline and has no gradient here"
                )
            own[end] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if len(own) == 2:
            total = own[0] + own[1]
            for gradient in own.values():
                gradient.copy_(total)
        elif own:
            ((end, gradient),) = own.items()
            is_first = end == 1 or self.schedule.layout == "v"
            peer = dist.get_global_rank(self._group, 0 if is_first else self._mesh.size() - 1)
            # The group can send only tensors on its device.
            sent = gradient.to(self._device).contiguous()
            received = torch.empty_like(sent)
            exchange = [
                dist.P2POp(dist.isend, sent, peer, self._group),
                dist.P2POp(dist.irecv, received, peer, self._group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradient.add_(received.to(gradient.device))

    def gradient_norm(self) -> Tensor:
        """Compute the gradient norm of the whole model, the same on all ranks.

        A tied parameter counts once.
        """
        copies = {id(parameter) for end, _, parameter in self._tied_parameters() if end == 1}
        norm = gradient_norm(
            parameter.grad
            for parameter in self.parameters()
            if parameter.grad is not None and id(parameter) not in copies
        )
        square = norm.to(self._device).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model is at most `max_norm`.

        Returns: the norm before scaling, as `gradient_norm`.
        """
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm, foreach=False)
        return norm

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters of this rank's stages."""
        return [parameter for stage in self.stages.values() for parameter in stage.parameters()]

    def _tied_parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for end, index in ((0, 0), (1, self._num_stages - 1)):
            stage = self.stages.get(index)
            if stage is None or self._num_stages == 1:
                continue
            for last_name, first_name in tied_names(stage).items():
                name = (first_name, last_name)[end]
                parameter = stage.get_parameter(name)
                if parameter.requires_grad:
                    yield end, name, parameter

    def _gradients_of_shards(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the current gradients of stages that FSDP2 has sharded.

        torch 2.13 sets them to None when a stage runs first, which is right only after a run that
        infers shapes (`PipelineStage._post_metadata_inference_cleanup`).
        """
        return [
            (parameter, parameter.grad)
            for stage in self.stages.values()
            if any(isinstance(module, FSDPModule) for module in stage.modules())
            for parameter in stage.parameters()
            if parameter.grad is not None
        ]

    def _built_for(self, num: int, rows: int, length: int) -> Any:  # noqa: ANN401 - a schedule of torch
        """Build the schedule for `num` micro-batches of `rows` times `length` tokens, or reuse it.

        Stages get all shapes, as torch would infer them by running each stage on uninitialized data.
        """
        shape = (num, rows, length)
        if self._built is None or self._built[0] != shape:
            stages = [self._stage(index, rows, length) for index in sorted(self.stages)]
            name = self.schedule.name
            if name == "1F1B" and num < self._num_stages:
                name = "GPipe"  # the same order; torch's 1F1B refuses
            schedule_class = cast("Any", get_schedule_class(name))
            self._built = (
                shape,
                schedule_class(
                    stages[0] if self.schedule.layout == "single" else stages,
                    num,
                    loss_fn=self._loss,
                    scale_grads=False,
                ),
            )
        return self._built[1]

    def _stage(self, index: int, rows: int, length: int) -> PipelineStage:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(
                shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point
            )

        ids = empty(rows, length, dtype=torch.int64)
        hidden = empty(rows, length, self._config.hidden_size, dtype=self._hidden_dtype)
        logits = empty(rows, length, self._config.vocab_size, dtype=self._hidden_dtype)
        return PipelineStage(
            self.stages[index],
            index,
            self._num_stages,
            self._device,
            input_args=ids if index == 0 else hidden,
            output_args=logits if index == self._num_stages - 1 else hidden,
            group=self._group,
        )


def pad_alike(batch: Sequence[_MicroBatch]) -> dict[str, Tensor]:
    """Pad the rows of all micro-batches on the right to the longest, (M * B, T).

    Padding has no label and is masked.
    Raises: UsageError if the numbers of rows differ.
    """
    rows = [len(micro_batch["input_ids"]) for micro_batch in batch]
    if len({*rows}) != 1:
        # All tensors between stages have one shape.
        raise UsageError(f"micro-batches of a pipeline need equally many rows, not {rows}")
    length = max(micro_batch["input_ids"].shape[1] for micro_batch in batch)
    return {
        name: torch.cat(
            [
                functional.pad(tensor, (0, length - tensor.shape[1]), value=value)
                for tensor in (micro_batch[name] for micro_batch in batch)
            ]
        )
        for name, value in _PADDING.items()
    }


class _TokenLoss:
    """Summed token losses over the label tokens of the whole step, nats."""

    num_step_tokens = 0

    def __call__(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        # At least float32: the sum over a vocabulary in bfloat16 would be the largest error.
        wide_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        summed = functional.cross_entropy(
            wide_BTV[:, :-1].flatten(0, 1),
            labels_BT[:, 1:].flatten(),
            ignore_index=_IGNORED,
            reduction="sum",
        )
        return summed / self.num_step_tokens
