"""A decoder cut into pipeline stages, one rank's part of a training over them, FSDP2, and clipping over ranks.

A stage is the model without the modules of other stages, in which modules keep their paths. It runs
transformers' own forward over its layers, with the model's masks, positions, rotary tables, multipliers and
scaled logits. Each stage computes its masks from the attention mask, which every rank has. Stages send only
hidden states. Schedules are those of torch.distributed.pipelining.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from assay.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# As in torch.nn.utils.clip_grad_norm_.
_EPSILON = 1e-6


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Compute the Euclidean norm of the whole gradients, the same on all ranks.

    Plain gradients are the same on all ranks and count once; DTensors may have different meshes.
    Sums are in float32; in float64 for float64 gradients.
    Returns: a plain scalar; 0 without gradients; nan if one holds a NaN.
    """
    plain: list[Tensor] = []
    divided: dict[object, tuple[DTensor, list[Tensor]]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            plain.append(_sum_of_squares(gradient))
            continue
        whole = gradient.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
        )
        key = (whole.device_mesh, whole.placements)
        _, sums = divided.setdefault(key, (whole, []))
        sums.append(_sum_of_squares(whole.to_local()))
    for of_mesh, sums in divided.values():
        placements = [p if p.is_replicate() else Partial() for p in of_mesh.placements]
        local = torch.stack(sums).sum()
        plain.append(
            DTensor.from_local(
                local, of_mesh.device_mesh, placements, run_check=False
            ).full_tensor()
        )
    return torch.stack(plain).sum().sqrt() if plain else torch.tensor(0.0)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` so that their global norm is at most `max_norm`.

    Returns: the norm before scaling, as `gradient_norm`.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = gradient_norm(gradients)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(local.device, local.dtype))
    return norm


def _sum_of_squares(local: Tensor) -> Tensor:
    wide = local.detach()
    wide = wide if wide.dtype == torch.float64 else wide.float()
    return wide.square().sum()


# Model types whose decoder is exactly embedding, layers, norm and head.
MODEL_TYPES = frozenset({"llama", "granite", "qwen3", "mistral", "mixtral", "phi3"})

# The attribute that marks a module as a stage.
_STAGE_NUMBER = "_assay_stage"


def divide_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage: equally many, and one more in the first ones if some are left.

    The last stage gets none of these, as the head costs more than the embedding.
    Raises: UsageError if there are fewer layers than stages.
    """
    if not 0 < num_stages <= num_layers:
        raise UsageError(f"{num_layers} layers cannot be divided over {num_stages} pipeline stages")
    size, left = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, left) for stage in range(num_stages + 1)]
    return [range(*one) for one in pairwise(starts)]


def called_module(model: nn.Module) -> nn.Module:
    """Return the module to call in training: `model`, or the stage that peft has wrapped.

    peft's wrapper has another signature; the adapters are in the stage.
    """
    if not hasattr(model, "get_base_model"):
        return model
    base: nn.Module = cast("Any", model).get_base_model()
    return base if _STAGE_NUMBER in vars(base) else model


def cut_stage(model: nn.Module, num_stages: int, stage: int) -> nn.Module:
    """Remove from `model`, in place, the modules of all stages but number `stage`.

    The first stage has the embedding, the last one norm and head. The first stage takes token ids (B, T),
    later ones hidden states (B, T, H), and all an `attention_mask`; the last stage returns logits
    (B, T, V), the others hidden states. `model.config` still describes the whole model.
    Raises: UsageError for a model that cannot be cut.
    """
    whole = cast("Any", model)
    layers = _divide(whole.config, num_stages)
    vars(model)[_STAGE_NUMBER] = stage
    if num_stages == 1:
        model.forward = MethodType(_make_forward(0, is_last=True), model)
        return model
    body, is_last = whole.model, stage == num_stages - 1
    _cut_layers(body, layers[stage])
    if stage > 0:
        body.embed_tokens = None
        if hasattr(body, "embedding_multiplier"):
            body.embedding_multiplier = 1.0  # applied by the first stage
    if not is_last:
        del body.norm
        body.norm = _pass_on
        whole.lm_head = None
    # peft would look for both tied parameters.
    whole._tied_weights_keys = None  # noqa: SLF001 - of transformers
    model.forward = MethodType(_make_forward(stage, is_last=is_last), model)
    return model


def _divide(config: "PretrainedConfig", num_stages: int) -> list[range]:
    if num_stages > 1 and config.tie_word_embeddings:
        raise UsageError(
            "the head is tied to the embeddings: in a pipeline each end has a part of their"
            " gradient, which cannot be compared yet; use dp or tp"
        )
    if config.model_type not in MODEL_TYPES:
        raise UsageError(
            f"models of type {config.model_type!r} cannot be cut into stages;"
            f" known: {', '.join(sorted(MODEL_TYPES))}"
        )
    if getattr(config, "output_router_logits", False):
        # It is a sum over the layers of all stages.
        raise UsageError(
            "output_router_logits: the loss of the router is not known to stages; turn it off"
        )
    return divide_layers(config.num_hidden_layers, num_stages)


def _cut_layers(body: Any, kept: range) -> None:  # noqa: ANN401 - a decoder of transformers
    layers = nn.ModuleList()
    for index in kept:
        layers.add_module(str(index), body.layers[index])
    body.layers = layers
    # The decoder's forward reads number of layers and kinds of masks from its config.
    body.config = copy.deepcopy(body.config)
    kinds = getattr(body.config, "layer_types", None)
    if kinds is not None:
        body.config.layer_types = [kinds[index] for index in kept]
    body.config.num_hidden_layers = len(kept)


def _pass_on(hidden_BTH: Tensor) -> Tensor:
    return hidden_BTH


def _make_forward(stage: int, *, is_last: bool) -> Callable[..., Tensor]:
    """Return the forward of a stage, over token ids (B, T) in the first one, else over hidden states."""
    name = "inputs_embeds" if stage else "input_ids"

    def forward(self: Any, inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ANN401 - of transformers
        given = {name: inputs, "attention_mask": attention_mask, "use_cache": False}
        if not is_last:
            return cast("Tensor", self.model(**given).last_hidden_state)
        # The class's forward, as `cut_stage` has replaced the instance's.
        return cast("Tensor", type(self).forward(self, **given).logits)

    return forward


# A micro-batch: `input_ids`, `attention_mask` and `labels`, each (B, T) in int64.
_MicroBatch = Mapping[str, Tensor]

# The label of a token without a loss. Source: torch.nn.functional.cross_entropy.
_IGNORED = -100
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": _IGNORED}


class Pipeline:
    """One rank's stage of a pipeline over the ranks of `mesh`, under 1F1B.

    Every rank gets the whole batch: the first stage uses the tokens, each stage the attention mask,
    the last one the labels. Losses are sums over tokens, divided by the number of tokens of the whole
    step (over all ranks), so that gradients of micro-batches add up.
    """

    def __init__(
        self, stage: nn.Module, mesh: DeviceMesh, *, hidden_dtype: torch.dtype | None = None
    ) -> None:
        """Make the pipeline, before the optimizer.

        stage: from `cut_stage`; tensor parallelism, LoRA and FSDP2 may be
            applied.
        mesh: of one axis.
        hidden_dtype: of the hidden states between stages, by default the parameters' dtype; under
            mixed precision the compute dtype.
        """
        self.stage = called_module(stage)
        self._index, self._num_stages = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        self._device = torch.device(mesh.device_type)
        self._config = cast("Any", self.stage).config
        self._hidden_dtype = hidden_dtype or next(self.stage.parameters()).dtype
        self._loss = _TokenLoss()
        # The shape for which the schedule was built, and the schedule.
        self._built: tuple[tuple[int, ...], Any] | None = None

    @property
    def _is_last(self) -> bool:
        return self._index == self._num_stages - 1

    def forward_backward(self, batch: Sequence[_MicroBatch], num_step_tokens: int) -> Tensor:
        """Run forward and backward over all micro-batches of `batch`, and sum their gradients.

        num_step_tokens: label tokens of the whole step, on all data-parallel ranks.
        Returns: the loss of these micro-batches, the same on all ranks of the pipeline.
        Raises: UsageError for a batch that cannot be run.
        """
        padded = pad_alike(batch)
        num, rows, length = len(batch), len(batch[0]["input_ids"]), padded["input_ids"].shape[1]
        kept = self._gradients_of_shards()
        schedule = self._built_for(num, rows, length)
        self._loss.num_step_tokens = num_step_tokens
        losses: list[Tensor] = []
        inputs = (padded["input_ids"],) if self._index == 0 else ()
        last = {"target": padded["labels"], "losses": losses} if self._is_last else {}
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

    def gradient_norm(self) -> Tensor:
        """Compute the gradient norm of the whole model, the same on all ranks."""
        norm = gradient_norm(one.grad for one in self.stage.parameters() if one.grad is not None)
        square = norm.to(self._device).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model is at most `max_norm`.

        Returns: the norm before scaling, as `gradient_norm`.
        """
        norm = self.gradient_norm()
        nn.utils.clip_grads_with_norm_(self.stage.parameters(), max_norm, norm, foreach=False)
        return norm

    def _gradients_of_shards(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the current gradients of a stage that FSDP2 has sharded.

        torch 2.13 sets them to None when a stage runs first, which is right only after a run that
        infers shapes (`PipelineStage._post_metadata_inference_cleanup`).
        """
        if not any(isinstance(module, FSDPModule) for module in self.stage.modules()):
            return []
        return [(one, one.grad) for one in self.stage.parameters() if one.grad is not None]

    def _built_for(self, num: int, rows: int, length: int) -> Any:  # noqa: ANN401 - a schedule of torch
        """Build the schedule for `num` micro-batches of `rows` times `length` tokens, or reuse it.

        Stages get all shapes, as torch would infer them by running each stage on uninitialized data.
        """
        shape = (num, rows, length)
        if self._built is None or self._built[0] != shape:
            # The same order; torch's 1F1B refuses fewer micro-batches than stages.
            kind = ScheduleGPipe if num < self._num_stages else Schedule1F1B
            stage = self._pipeline_stage(rows, length)
            self._built = shape, kind(stage, num, loss_fn=self._loss, scale_grads=False)
        return self._built[1]

    def _pipeline_stage(self, rows: int, length: int) -> PipelineStage:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(
                shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point
            )

        ids = empty(rows, length, dtype=torch.int64)
        hidden = empty(rows, length, self._config.hidden_size, dtype=self._hidden_dtype)
        logits = empty(rows, length, self._config.vocab_size, dtype=self._hidden_dtype)
        return PipelineStage(
            self.stage,
            self._index,
            self._num_stages,
            self._device,
            input_args=ids if self._index == 0 else hidden,
            output_args=logits if self._is_last else hidden,
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


def shard_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    kept_on: Literal["device", "host"] = "device",
) -> nn.Module:
    """Shard `model`, a decoder or a stage of it, in place: each layer as a unit, then the rest.

    Gradients are summed over ranks instead of averaged, because losses are divided by the number of
    tokens on all ranks.
    mesh: one axis, or two for replicas of shards (replicas first).
    compute_dtype: for mixed precision; parameters and reductions keep the parameters' dtype.
    kept_on: the location of shards, gradients and the optimizer's state.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if compute_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=next(model.parameters()).dtype
        )
    if kept_on == "host":
        # Pinned memory needs an accelerator.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(called_module(model), **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = cast("Any", module)
            # Before torch 2.8 the divisor had another name, and sums could not be chosen.
            set_divisor = getattr(unit, "set_gradient_divide_factor", None)
            (set_divisor or unit.set_reduce_scatter_divide_factor)(1.0)
            if hasattr(unit, "set_force_sum_reduction_for_comms"):
                unit.set_force_sum_reduction_for_comms(True)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the decoder layers, by the classes that transformers names for sharding."""
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    return [module for module in model.modules() if type(module).__name__ in names]
