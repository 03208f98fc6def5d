"""A decoder cut into pipeline stages, in which modules keep the paths of the whole model.

A stage is the model without the modules of other stages. It runs transformers' own forward over
its layers, with the model's masks, positions, rotary tables, multipliers and scaled logits. Each
stage computes its masks from the attention mask, which every rank has. Stages send only hidden states.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import copy
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from assay.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
        model.forward = MethodType(_forward_whole, model)
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
    model.forward = MethodType(_FORWARDS[stage > 0, is_last], model)
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


def _forward_whole(
    self: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    return _logits(self, input_ids=input_ids, attention_mask=attention_mask)


def _forward_first(
    self: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    return _hidden(self, input_ids=input_ids, attention_mask=attention_mask)


def _forward_middle(
    self: nn.Module, inputs_embeds: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    return _hidden(self, inputs_embeds=inputs_embeds, attention_mask=attention_mask)


def _forward_last(
    self: nn.Module, inputs_embeds: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    return _logits(self, inputs_embeds=inputs_embeds, attention_mask=attention_mask)


_FORWARDS = {
    (False, False): _forward_first,
    (True, False): _forward_middle,
    (True, True): _forward_last,
}


def _hidden(stage: nn.Module, **inputs: Tensor | None) -> Tensor:
    decoder = cast("nn.Module", stage.model)
    return cast("Tensor", decoder(**inputs, use_cache=False).last_hidden_state)


def _logits(stage: nn.Module, **inputs: Tensor | None) -> Tensor:
    # The class's forward, as `cut_stage` has replaced the instance's.
    return cast("Tensor", type(stage).forward(stage, **inputs, use_cache=False).logits)
