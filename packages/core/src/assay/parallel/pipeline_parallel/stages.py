"""A decoder cut into the stages of a pipeline; every module keeps the path that it has in the whole.

A stage is the model itself without what other stages have. It runs transformers' own forward over
the layers that are left, so that masks, positions, rotary tables, multipliers and scaled logits
are those of the model. Each stage makes its masks anew from the attention mask, which every rank
has: what travels from stage to stage is the hidden state alone.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from assay.errors import UsageError
from assay.parallel.checkpoints.weight_loading import tied_names

# Their decoders are embedding, layers, norm and head, and nothing else, in this order.
MODEL_TYPES = frozenset({"llama", "granite", "qwen3", "mistral", "mixtral", "phi3"})


# The attribute by which a stage is known.
_STAGE_NUMBER = "_assay_stage"


class StageError(UsageError):
    """A model that cannot be cut, or not in this way."""

    @classmethod
    def too_many(cls, num_layers: int, num_stages: int) -> "StageError":
        """Each stage needs a layer."""
        return cls(f"{num_layers} layers cannot be divided over {num_stages} pipeline stages")

    @classmethod
    def unknown(cls, model_type: str) -> "StageError":
        """A decoder of which we do not know what happens between its layers."""
        known = ", ".join(sorted(MODEL_TYPES))
        return cls(f"models of type {model_type!r} cannot be cut into stages; known: {known}")

    @classmethod
    def other_layers(cls, num_layers: int, planned: int) -> "StageError":
        """The plan is for another model."""
        return cls(f"the stages are planned for {planned} layers, the model has {num_layers}")

    @classmethod
    def trained_auxiliary_loss(cls) -> "StageError":
        """Its sum goes over the layers of all stages."""
        return cls(
            "output_router_logits: the loss of the router is not known to stages; turn it off"
        )


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The layers of each stage. The first one has the embedding too, the last one norm and head."""

    layers: tuple[range, ...]

    @classmethod
    def balanced(cls, num_layers: int, num_stages: int) -> "StagePlan":
        """As many layers for each stage as can be; what is left over goes to the front.

        The last stage has the head beside its layers, which costs more than the embedding.
        Raises: StageError.
        """
        if not 0 < num_stages <= num_layers:
            raise StageError.too_many(num_layers, num_stages)
        size, left = divmod(num_layers, num_stages)
        starts = [stage * size + min(stage, left) for stage in range(num_stages + 1)]
        return cls(tuple(map(range, starts, starts[1:])))

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return len(self.layers)

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.layers) - 1


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter of which the first and the last stage have a copy each."""

    first_name: str
    last_name: str


def tied_over_stages(model: nn.Module) -> TiedParameter | None:
    """The copies that the ends of a pipeline of `model` (or of a stage of it) have.

    None where embedding and head are not tied.
    """
    for last_name, first_name in tied_names(model).items():
        return TiedParameter(first_name, last_name)
    return None


def called_module(model: nn.Module) -> nn.Module:
    """What is called in training: `model`, or of a stage that peft has wrapped the stage itself.

    The wrapper's signature is not that of a stage; the adapters are in the stage.
    """
    if not hasattr(model, "get_base_model"):
        return model
    base: nn.Module = cast("Any", model).get_base_model()
    return base if _STAGE_NUMBER in vars(base) else model


def cut_stage(model: nn.Module, plan: StagePlan, stage: int) -> nn.Module:
    """Cut off from `model`, in place, all that stage number `stage` does not have.

    Best done on the meta device, before weights are read. The result is called with token ids
    (B, T), of later stages with hidden states (B, T, H), and `attention_mask`; it returns hidden
    states, of the last stage logits (B, T, V). Its `config` stays that of the whole model.
    Raises: StageError.
    """
    whole = cast("Any", model)
    config = whole.config
    _check(config, plan)
    vars(model)[_STAGE_NUMBER] = stage
    if plan.num_stages == 1:
        model.forward = MethodType(_forward_whole, model)
        return model
    body = whole.model
    kept = plan.layers[stage]
    _cut_layers(body, kept)
    if stage > 0:
        body.embed_tokens = None
        if hasattr(body, "embedding_multiplier"):
            body.embedding_multiplier = 1.0  # applied by the first stage
    if stage < plan.last:
        del body.norm
        body.norm = _pass_on
        whole.lm_head = None
    # peft looks for the other end.
    whole._tied_weights_keys = None  # noqa: SLF001 - of transformers
    model.forward = MethodType(_FORWARDS[stage > 0, stage == plan.last], model)
    return model


def _check(config: Any, plan: StagePlan) -> None:  # noqa: ANN401 - any model's
    if config.model_type not in MODEL_TYPES:
        raise StageError.unknown(config.model_type)
    planned = [layer for layers in plan.layers for layer in layers]
    if planned != [*range(config.num_hidden_layers)]:
        raise StageError.other_layers(config.num_hidden_layers, len(planned))
    if getattr(config, "output_router_logits", False):
        raise StageError.trained_auxiliary_loss()


def _cut_layers(body: Any, kept: range) -> None:  # noqa: ANN401 - any model's decoder
    layers = nn.ModuleList()
    for index in kept:
        layers.add_module(str(index), body.layers[index])
    body.layers = layers
    # The decoder counts its layers, and the kinds of their masks, by its configuration.
    body.config = copy.deepcopy(body.config)
    kinds = getattr(body.config, "layer_types", None)
    if kinds is not None:
        body.config.layer_types = [kinds[index] for index in kept]
    body.config.num_hidden_layers = len(kept)


def _pass_on(hidden_BTH: Tensor) -> Tensor:
    return hidden_BTH


def _forward_whole(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ANN401
    return _logits(self, input_ids=input_ids, attention_mask=attention_mask)


def _forward_first(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ANN401
    return _hidden(self, input_ids=input_ids, attention_mask=attention_mask)


def _forward_middle(
    self: Any,  # noqa: ANN401
    inputs_embeds: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    return _hidden(self, inputs_embeds=inputs_embeds, attention_mask=attention_mask)


def _forward_last(
    self: Any,  # noqa: ANN401
    inputs_embeds: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    return _logits(self, inputs_embeds=inputs_embeds, attention_mask=attention_mask)


_FORWARDS = {
    (False, False): _forward_first,
    (True, False): _forward_middle,
    (True, True): _forward_last,
}


def _hidden(stage: Any, **inputs: Tensor | None) -> Tensor:  # noqa: ANN401 - any model
    return cast("Tensor", stage.model(**inputs, use_cache=False).last_hidden_state)


def _logits(stage: Any, **inputs: Tensor | None) -> Tensor:  # noqa: ANN401 - any model
    # The class's forward: that of the instance is the stage's.
    return cast("Tensor", type(stage).forward(stage, **inputs, use_cache=False).logits)
