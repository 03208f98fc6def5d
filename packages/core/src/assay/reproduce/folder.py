"""Build a reproduction from the recorded programs, make it smaller while it still fails, and write its folder.

A size S, such as that of the batch, of the heads or of the channels, becomes a smaller one in all inputs and
in all arguments that are sizes. What is wrong after that is refused: an error of torch, a reference that
fails, a candidate that passes or has another shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.dtypes import float_format
from assay.models.config_files import first_line
from assay.recording.programs import GROUP, Program, ProgramPair
from assay.reproduce.script import (
    OTHER,
    RIGHT,
    Kind,
    Reproduction,
    Words,
    describe_machine,
    name_inputs,
    render,
    severity,
    write_folder,
)
from assay.verdicts import Verdict

# Operations that get sizes as arguments, without those that write.
_SIZED = frozenset(
    """view _unsafe_view reshape expand repeat zeros ones full empty new_zeros new_ones new_full new_empty arange
    slice split_with_sizes split narrow""".split()  # noqa: SIM905
)


# Times the limit: a smaller reproduction keeps this much of the error, so that another machine sees it.
_LEAST = 2.0


def reproduces(one: Reproduction, dtype: str, times_limit: float = 1.0) -> bool:
    """Return True if the candidate's program fails in `dtype`, and the reference's passes.

    times_limit: the error must exceed the limit by this factor.
    """
    device = one.words.device
    healthy = severity(one.measure(dtype, "cpu", "reference"))
    return healthy <= 1 and not severity(one.measure(dtype, device)) <= times_limit


# It ends the process if the query heads are fewer than the key heads (torch 2.13).
_UNSAFE = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def minimize(one: Reproduction) -> Reproduction:
    """Return the smallest reproduction that is found; `one` itself if none is smaller."""
    if _UNSAFE in {step.operation for step in (*one.candidate.steps, *one.reference.steps)}:
        return one
    tensors = [one.tensors[name] for name in one.tensors.keys() - {"answer", "kept"}]
    least = max(1.0, min(_LEAST, severity(one.measure(one.dtype, one.words.device)) / 2))
    for size in sorted({size for tensor in tensors for size in tensor.shape}, reverse=True):
        smaller = (n for n in range(1, size) if size % n == 0 or n & (n - 1) == 0)
        found = (_try(one, size, n, least) for n in smaller)
        one = next((each for each in found if each is not None), one)
    return one


def _try(one: Reproduction, size: int, smaller: int, times_limit: float) -> Reproduction | None:
    """Return the reproduction with dims of `size` cut to `smaller`; None if it fails less clearly."""
    tensors = {name: _cut(tensor, size, smaller) for name, tensor in one.tensors.items()}
    made = replace(
        one,
        candidate=_resize(one.candidate, size, smaller),
        reference=_resize(one.reference, size, smaller),
        ranks=[_resize(program, size, smaller) for program in one.ranks],
        tensors=tensors,
    )
    try:
        if not tensors["kept"].any():
            return None
        if one.kind == "values":
            made = replace(made, tensors=tensors | {"answer": made.run_wide().double()})
        is_clear = made.has_one_shape and reproduces(made, one.dtype, times_limit)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    return made if is_clear else None


def _cut(tensor: Tensor, size: int, smaller: int) -> Tensor:
    for dim, of_dim in enumerate(tensor.shape):
        if of_dim == size:
            tensor = tensor.narrow(dim, 0, smaller)
    return tensor.contiguous()


def _resize(program: Program, size: int, smaller: int) -> Program:
    def resized(value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, list):
            return [resized(one) for one in value]
        if isinstance(value, int) and not isinstance(value, bool) and value and value % size == 0:
            return value // size * smaller
        return value

    steps = [
        step._replace(
            args=[resized(one) for one in step.args],
            kwargs={k: resized(one) for k, one in step.kwargs.items()},
        )
        if step.operation.split(".")[1] in _SIZED
        else step
        for step in program.steps
    ]
    return replace(program, steps=steps)


# Of the float64 run of the reference's operations, to the recorded answer in float32.
_SAME = 1e-5
# Times the limit: fewer values still show it.
_CLEAR = 5.0


class _NotReproducedError(Exception):
    """The reason why a value does not fail by itself."""


def build(
    pairs: Sequence[ProgramPair], recorded: str, limits: Mapping[str, float], words: Words
) -> Reproduction | str:
    """Build the smallest reproduction of one of the values that fails.

    recorded: the candidate's dtype.
    Returns: the reproduction, or why no value fails by itself.
    """
    reasons = []
    for pair in sorted(pairs, key=lambda one: len(one.candidate.steps)):
        try:
            return _build_one(pair, recorded, limits, words)
        except _NotReproducedError as error:
            reasons.append(f"{pair.site}: {error}")
    return next(iter(reasons), "no value there is over its limit")


def _build_one(
    pair: ProgramPair, recorded: str, limits: Mapping[str, float], words: Words
) -> Reproduction:
    """Build the reproduction of one value. Raises: _NotReproducedError if it does not fail by itself."""
    if pair.reference is None:
        raise _NotReproducedError("the reference does not make this value")
    ranks, rank = _exchanging(pair)
    names, inputs = name_inputs((pair.candidate, pair.reference, *ranks))
    answer = pair.answer["answer"]
    kind: Kind = "values" if answer.is_floating_point() else "exact"
    kind = "mask" if answer.dtype is torch.bool else kind
    is_known = set(names[0].values()) <= set(names[1].values())
    # A mask that no operation made is the causal one, where the model passes none; tokens and labels come
    # from the code that reads texts.
    is_read = kind == "mask" or (kind == "exact" and not pair.site.at.module)
    if not pair.candidate.steps and not is_read and not is_known:
        raise _NotReproducedError("no operation of torch made it")
    one = Reproduction(
        pair.site, pair.candidate, pair.reference, names, inputs | dict(pair.answer), kind, recorded,
        recorded, limits, words, ranks, rank,
    )  # fmt: skip
    try:
        wide = one.run_wide()
        # A reference without steps takes the recorded value as the next module gets it, rounded.
        same = _SAME if pair.reference.steps else float_format(recorded).unit_roundoff
        if not _is_same(wide, pair.answer, kind, same):
            raise _NotReproducedError(
                "the reference's operations do not give the recorded value again"
            )
        if not one.has_one_shape:
            raise _NotReproducedError(
                "its shape is not the reference's, as that of a shard or of packed rows"
            )
        if kind == "values":
            one = replace(one, tensors={**one.tensors, "answer": wide.double()})
        if ranks and not isclose(
            one.measure(recorded, words.device)[0][1], pair.error, rel_tol=0.01
        ):
            raise _NotReproducedError("its exchanges give another value when they run again")
        found = [dtype for dtype in dict.fromkeys((recorded, "float32")) if reproduces(one, dtype)]
    except RuntimeError as error:
        raise _NotReproducedError(f"the operations do not run again: {first_line(error)}") from None
    if not found:
        raise _NotReproducedError(
            "the operations give the right value when they run again; if the ratio is near its limit, check in"
            " float32 first"
        )
    # Another computation shows best in float32, and may hide in the noise of fewer values.
    wrong = {dtype: severity(one.measure(dtype, words.device)) for dtype in found}
    is_clear = wrong[found[0]] > _CLEAR or wrong[found[0]] >= wrong[found[-1]]
    return minimize(replace(one, dtype=found[0] if is_clear else found[-1]))


def _exchanging(pair: ProgramPair) -> tuple[Sequence[Program], int]:
    """Return the programs of the ranks that exchange tensors to make a value, and the candidate's number there.

    No programs if the candidate makes it alone.
    """
    own = _exchanges(pair.candidate)
    if not own:
        return (), 0
    group, *others = {tuple(group) for _, group in own}
    if others:
        raise _NotReproducedError("ranks exchange tensors in several groups to make it")
    ranks = [pair.ranks[rank] for rank in group] if pair.ranks else []
    if not ranks or any(_exchanges(one) != own for one in ranks):
        raise _NotReproducedError("ranks make other exchanges for this value")
    return ranks, group.index(pair.rank)


def _exchanges(program: Program) -> list[tuple[str, list[int]]]:
    """Return the operations that exchange tensors between ranks, each with its group."""
    return [
        (step.operation, argument[GROUP])
        for step in program.steps
        for argument in step.args
        if isinstance(argument, dict) and GROUP in argument
    ]


def _is_same(wide: Tensor, recorded: Mapping[str, Tensor], kind: Kind, error: float) -> bool:
    answer, kept = recorded["answer"], recorded["kept"]
    if kind != "values":
        return True
    if wide.shape != answer.shape:
        return False
    wide, answer = wide[kept], answer[kept].double()
    return bool((wide - answer).norm() <= error * answer.norm())


def find_tokens(one: Reproduction) -> list[str]:
    """Return the names of tensors that may hold tokens of prompts: integers, but for positions."""
    if "position" in one.site.port:
        return []
    return [
        name
        for name, tensor in one.tensors.items()
        if tensor.dtype in (torch.int64, torch.int32) and "position" not in name
    ]


def write(one: Reproduction, verdict: Verdict, folder: Path) -> Path:
    """Write the four files into `folder`. Returns: reproduce.py."""
    device = one.words.device
    lines = [line.strip() for line in one.text.splitlines()]
    fields = vars(one) | one.words._asdict()
    fields |= {
        "there": describe_machine(verdict),
        "operations": list(dict.fromkeys(step.operation for step in one.candidate.steps)),
        "marked": [line.removesuffix(OTHER) for line in lines if line.endswith(OTHER)],
        "right": [line.removesuffix(RIGHT) for line in lines if line.endswith(RIGHT)],
        "rows": one.measure(one.dtype, device),
        "fails_on_cpu": severity(one.measure(one.dtype, "cpu")) > 1,
        "fails_as_recorded": severity(one.measure(one.recorded, device)) > 1,
    }
    readme = render("README.md.j2", fields)
    return write_folder(folder, verdict, str(one.site), one.tensors, one.text, readme)
