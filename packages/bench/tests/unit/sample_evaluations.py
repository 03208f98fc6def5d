"""Handmade evaluations."""

from collections.abc import Sequence
from typing import Any

from assay_bench.results import Evaluation, Item, TaskResult


def item(
    number: int,
    right: bool | None = True,
    log_probability: float | None = None,
    cluster: str | None = None,
) -> Item:
    return Item(
        key=f"k{number}",
        prompt_hash=f"p{number}",
        target_hash=f"t{number}",
        question=f"{number}+1=",
        target=str(number + 1),
        answer=str(number + 1) if right else "?",
        right=right,
        log_probability=log_probability,
        cluster=cluster,
    )


def task(items: Sequence[Item], name: str = "sums", **update: Any) -> TaskResult:
    return TaskResult(
        name=name, metric="acc", items=tuple(items), asked={"version": 1.0, "fewshot": 0}, **update
    )


def evaluation(*tasks: TaskResult, name: str = "model") -> Evaluation:
    return Evaluation(name, {one.name: one for one in tasks})


def answered(num_right: int, num_items: int) -> TaskResult:
    """A task whose first `num_right` items are right."""
    return task([item(number, right=number < num_right) for number in range(num_items)])
