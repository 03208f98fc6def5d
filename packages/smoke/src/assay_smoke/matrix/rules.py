"""Combinations that are refused, as data. Each rule cites a test or page that shows it.

A rule refuses the cases that have one of its words on every axis that it names. Rules that depend on
numbers of heads or layers are computed from the recipes of the micro models. Rules for the cards of one
vendor are in vendors.toml.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from assay.devices.vendor_names import find_vendor_name
from assay.errors import UsageError
from assay.files import read_toml
from assay.models.micro.recipes import find_recipe
from assay.parallel.tensor_parallel.division import HeadsError, share_heads
from assay_smoke.matrix.cases import (
    AXES,
    CARDS,
    Case,
    Family,
    Framework,
    state_checkpoint,
)

_DIVIDING: tuple[Framework, ...] = ("tensor-parallel", "pipeline")
_ZERO: tuple[Framework, ...] = ("zero1", "zero2", "zero3")

# The vendor of machines without an accelerator.
HOST = "cpu"

_VENDORS = Path(__file__).with_name("vendors.toml")

_TESTS = "packages/smoke/tests/unit/matrix/test_refusals.py::"


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to refuse cases."""

    name: str
    refuses: Mapping[str, frozenset[str]]
    """Words by axis. A case with one of them on each of these axes is refused."""
    reason: str
    """One sentence for a user who asked for such a case."""
    shown_by: str
    """FILE::TEST of this repository, or an address."""

    def applies(self, words: Mapping[str, str]) -> bool:
        """Return whether the rule refuses the case with these words by axis."""
        return all(words[axis] in refused for axis, refused in self.refuses.items())

    def describe(self) -> str:
        """Describe the combination, as in "framework pipeline, recompute"."""
        parts = []
        for axis in AXES:
            words = [word for word in axis.values if word in self.refuses.get(axis.name, ())]
            if words == [axis.name]:
                parts.append(axis.name)
            elif words and len(words) < len(axis.values):
                parts.append(f"{axis.name} {' or '.join(words)}")
        return ", ".join(parts)


def refusing(*, name: str, reason: str, shown_by: str, **words: str | Iterable[str]) -> Rule:
    """Make a rule from one or several words per axis.

    Raises: ValueError for an unknown axis or word, since such a rule would refuse nothing.
    """
    known = {axis.name: axis.values for axis in AXES}
    refuses = {
        axis: frozenset([one] if isinstance(one, str) else one) for axis, one in words.items()
    }
    for axis, asked in refuses.items():
        if not asked or not asked <= {*known.get(axis, ())}:
            raise ValueError(f"rule {name}: the axis {axis} lacks some of {sorted(asked)}")
    return Rule(name, MappingProxyType(refuses), reason, shown_by)


def _families_that(test: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    """Return the families whose recipe settings satisfy `test`."""
    return [family for family in get_args(Family) if test(find_recipe(family).settings)]


def _cannot_share_heads(settings: Mapping[str, Any], cards: int) -> bool:
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    try:
        share_heads(heads, kv_heads, cards)
    except HeadsError:
        return True
    return False


def _has_fewer_layers(settings: Mapping[str, Any], cards: int) -> bool:
    return bool(settings["num_hidden_layers"] < cards)


def _computed_rules() -> Iterator[Rule]:
    """Yield the rules that the micro models' heads and layers imply."""
    for cards in CARDS:
        if few := _families_that(partial(_cannot_share_heads, cards=cards)):
            yield refusing(
                name=f"tensor-parallel-heads-{cards}",
                framework="tensor-parallel",
                cards=str(cards),
                family=few,
                reason=f"The query heads of these models do not divide into {cards} equal shares.",
                shown_by=f"{_TESTS}test_heads_that_cannot_be_shared_out_are_refused",
            )
        if few := _families_that(partial(_has_fewer_layers, cards=cards)):
            yield refusing(
                name=f"pipeline-layers-{cards}",
                framework="pipeline",
                cards=str(cards),
                family=few,
                reason=f"These models have fewer layers than {cards} stages.",
                shown_by=f"{_TESTS}test_more_stages_than_layers_are_refused",
            )
    if tied := _families_that(lambda settings: settings.get("tie_word_embeddings", True)):
        yield refusing(
            name="pipeline-tied-head",
            framework="pipeline",
            family=tied,
            reason="Head and embedding share one parameter. Each end of a pipeline has a part of its"
            " gradient, which cannot be compared yet.",
            shown_by=f"{_TESTS}test_a_tied_head_is_refused_in_a_pipeline",
        )


def _that_save(checkpoint: str) -> list[str]:
    return [name for name in get_args(Framework) if state_checkpoint(name) == checkpoint]


RULES: tuple[Rule, ...] = (
    refusing(
        name="one-process-one-card",
        framework="one-process",
        cards=[str(cards) for cards in CARDS if cards > 1],
        reason="One process trains on one card.",
        shown_by=f"{_TESTS}test_one_process_has_no_second_rank",
    ),
    refusing(
        name="one-card-is-one-process",
        framework=["ddp", "tensor-parallel", "pipeline"],
        cards="1",
        reason="One card leaves nothing to spread, so the case would repeat one-process.",
        shown_by=f"{_TESTS}test_on_one_card_nothing_is_spread",
    ),
    refusing(
        name="fsdp-one-card",
        framework="fsdp",
        cards="1",
        reason="On one card the trainer neither shards nor offloads, so the case would repeat"
        " one-process.",
        shown_by=f"{_TESTS}test_on_one_card_nothing_is_spread",
    ),
    *_computed_rules(),
    refusing(
        name="tensor-parallel-gemma2",
        framework="tensor-parallel",
        family="gemma2",
        reason="Gemma 2 scales its embeddings, and only a plain embedding can be divided.",
        shown_by=f"{_TESTS}test_a_scaled_embedding_cannot_be_divided",
    ),
    refusing(
        name="pipeline-recompute",
        framework="pipeline",
        recompute="recompute",
        reason="Recomputation within a pipeline stage is not implemented.",
        shown_by=f"{_TESTS}test_what_a_trainer_does_not_know_is_an_error",
    ),
    refusing(
        name="offload-replicated",
        framework=["one-process", "ddp"],
        offload="offload",
        reason="Only trainers that shard (FSDP2, ZeRO) can offload to the host.",
        shown_by=f"{_TESTS}test_what_a_trainer_does_not_know_is_an_error",
    ),
    refusing(
        name="offload-divided",
        framework=_DIVIDING,
        offload="offload",
        reason="FSDP2 does the offloading, and a mesh of tp or pp alone has no FSDP2.",
        shown_by=f"{_TESTS}test_a_divided_model_is_not_sharded",
    ),
    refusing(
        name="float16-divided",
        framework=_DIVIDING,
        precision="float16",
        reason="FSDP2 keeps the float32 master weights, and a mesh of tp or pp alone has no FSDP2.",
        shown_by=f"{_TESTS}test_a_divided_model_is_not_sharded",
    ),
    refusing(
        name="compile",
        framework=[*_DIVIDING, *_ZERO],
        compile="compile",
        reason="Only one process, DDP and FSDP2 compile their layers.",
        shown_by=f"{_TESTS}test_what_a_trainer_does_not_know_is_an_error",
    ),
    refusing(
        name="packed",
        framework=_DIVIDING,
        batches="packed",
        reason="Only one process, DDP, FSDP2 and ZeRO train on packed batches.",
        shown_by=f"{_TESTS}test_what_a_trainer_does_not_know_is_an_error",
    ),
    refusing(
        name="zero-float16-offload",
        framework=["zero1", "zero2"],
        precision="float16",
        offload="offload",
        reason="DeepSpeed 0.19 keeps the infinities of one overflow in its float32 gradients and"
        " overflows in every later step.",
        shown_by="packages/smoke/tests/subsystem/test_overflow_with_offload.py"
        "::test_an_overflow_is_never_left_behind",
    ),
    refusing(
        name="adapter-without-lora",
        lora="no",
        checkpoint=["adapter", "merged"],
        reason="Without LoRA there is no adapter to save or merge.",
        shown_by=f"{_TESTS}test_without_lora_there_is_no_adapter",
    ),
    refusing(
        name="whole-model-with-lora",
        lora="lora",
        checkpoint="hugging-face",
        reason="LoRA saves the adapter, and the whole model is checkpoint merged.",
        shown_by=f"{_TESTS}test_under_lora_no_whole_model_is_saved",
    ),
    refusing(
        name="full-of-shards",
        framework=_that_save("sharded"),
        checkpoint="full",
        reason="Each rank holds and saves a part of the state, and the whole model is checkpoint"
        " hugging-face.",
        shown_by=f"{_TESTS}test_only_replicas_have_all_of_the_state",
    ),
    refusing(
        name="shards-of-replicas",
        framework=_that_save("full"),
        checkpoint="sharded",
        reason="Every rank holds the whole state, so there are no parts to save.",
        shown_by=f"{_TESTS}test_only_replicas_have_all_of_the_state",
    ),
)


def check_compatible(case: Case, rules: Iterable[Rule] = RULES) -> str | None:
    """Return the reason of the first rule that refuses `case`, or None."""
    return next((rule.reason for rule in rules if rule.applies(case.words)), None)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(_VENDORS)


def vendor_names() -> tuple[str, ...]:
    """Return the vendors in the order of their file."""
    return tuple(_tables())


def require_vendor(name: str) -> str:
    """Return the vendor that is called `name`. Raises: UsageError if it has no table."""
    vendor = find_vendor_name(name)
    if vendor not in _tables():
        raise UsageError(f"--vendor {name}: there is {', '.join(vendor_names())}")
    return vendor


def rules_of_vendor(vendor: str) -> tuple[Rule, ...]:
    """Return the rules for the vendor's cards alone; none for a vendor without a table."""
    return tuple(
        refusing(
            name=f"{vendor}-{entry['name']}",
            reason=entry["reason"],
            shown_by=entry["shown_by"],
            **entry["words"],
        )
        for entry in _tables().get(vendor, {}).get("refuses", ())
    )


def rules_for(vendor: str) -> tuple[Rule, ...]:
    """Return all rules that hold on the vendor's cards."""
    return (*RULES, *rules_of_vendor(vendor))
