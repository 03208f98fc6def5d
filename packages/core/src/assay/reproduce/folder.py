"""Build a reproduction from the recorded programs, and make it smaller while it still fails.

A size S, such as that of the batch, of the heads or of the channels, becomes a smaller one in all inputs and
in all arguments that are sizes. What is wrong after that is refused: an error of torch, a reference that
fails, a candidate that passes or has another shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from assay.dtypes import float_format
from assay.models.config_files import first_line
from assay.recording.programs import Group, Program, ProgramPair, Step, numbers_in
from assay.reproduce.script import Kind, Reproduction, number_alike, reads, renumber, severity

# Operations that get sizes as arguments, without those that write.
_SIZED = frozenset(
    """view reshape expand repeat zeros ones full empty new_zeros new_ones new_full new_empty new_empty_strided arange slice
    split_with_sizes split narrow""".split()  # noqa: SIM905
)
# Operations that move values and change none.
_MOVES = frozenset({"as_strided", "copy_", "empty", "slice", "split", "view"})
# Times the limit: a smaller reproduction keeps this much of the error, so that another machine sees it.
_LEAST = 2.0
# Times the limit: fewer values still show it.
_CLEAR = 5.0
# Of the float64 run of the reference's operations, to the recorded answer in float32.
_SAME = 1e-5

# Tensors of more bytes also lose sizes that a differing operation slices or reduces: the folder fits into 1 MB.
_MOST_BYTES = 1_000_000
# Errors of operations that do not run with other sizes or on other values.
_NOT_RUN = RuntimeError, IndexError, ValueError, TypeError, KeyError, NameError
# No program has this number.
_RECORDED = -1


class _RefusedError(Exception):
    """The reason why a value does not fail by itself."""


def build(
    pairs: Sequence[ProgramPair], recorded: str, limits: Mapping[str, float], device: str
) -> Reproduction | str:
    """Build the smallest reproduction of one of the values that fails.

    recorded: the candidate's dtype.
    device: the candidate's.
    Returns: the reproduction, or why no value fails by itself.
    """
    reasons = []
    for pair in sorted(pairs, key=lambda one: len(one.candidate.steps)):
        try:
            one = _with_clear_dtype(_pair_up(pair, recorded, limits, device), pair)
            one = minimize(replace(one, recorded_rows=one.measure(one.dtype, one.device)))
            return one if _is_small(one) else minimize(_with_parts(one))
        except _RefusedError as error:
            reasons.append(f"{pair.site}: {error}")
        except RuntimeError as error:
            reasons.append(f"{pair.site}: the operations do not run again: {first_line(error)}")
    return next(iter(reasons), "no value there is over its limit")


def _pair_up(
    pair: ProgramPair, recorded: str, limits: Mapping[str, float], device: str
) -> Reproduction:
    """Write both programs of a value with the same inputs. Raises: _RefusedError."""
    if pair.reference is None:
        raise _RefusedError("the reference does not make this value")
    ranks, rank = _exchanging(pair)
    programs, names, inputs = number_alike((pair.candidate, pair.reference, *ranks))
    candidate, reference, *ranks = programs
    answer = pair.answer["right"]
    kind: Kind = "values" if answer.is_floating_point() else "exact"
    kind = "mask" if answer.dtype is torch.bool else kind
    is_known = candidate.target in reads(reference)
    # A mask that no operation made is the causal one, where the model passes none; tokens and labels come
    # from the code that reads texts.
    is_read = kind == "mask" or (kind == "exact" and not pair.site.at.module)
    if not pair.candidate.steps and not is_read and not is_known:
        raise _RefusedError("no operation of torch made it")
    tensors = inputs | dict(pair.answer)
    return Reproduction(
        pair.site, candidate, reference, names, tensors, kind, recorded, recorded, limits,
        device, ranks, rank, pair.module_class, whole=tensors,
    )  # fmt: skip


def _with_clear_dtype(one: Reproduction, pair: ProgramPair) -> Reproduction:
    """Choose the dtype in which the error shows best. Raises: _RefusedError if it shows in none."""
    answer, kept, wide = pair.answer["right"], pair.answer["compared"], one.run()
    if one.kind == "mask" and wide.shape[-2:] != answer.shape[-2:]:
        # Of packed rows: the reference makes its parts, and no operation the whole.
        names, right = {**one.names, _RECORDED: "recorded"}, Program([], {}, {}, _RECORDED)
        tensors = {**one.tensors, "recorded": answer}
        one = replace(one, reference=right, names=names, tensors=tensors)
    if one.kind == "values":
        # A reference without steps takes the recorded value as the next module gets it, rounded.
        same = _SAME if one.reference.steps else float_format(one.recorded).unit_roundoff
        is_same = wide.shape == answer.shape
        if not is_same or not (wide - answer)[kept].norm() <= same * answer[kept].double().norm():
            raise _RefusedError("the reference's operations do not give the recorded value again")
        one = replace(one, tensors={**one.tensors, "right": wide.double()})
    if not one.has_one_shape:
        raise _RefusedError("its shape is not the reference's, as of a shard or of packed rows")
    error = one.measure(one.recorded, one.device)[0][1]
    if one.ranks and not isclose(error, pair.error, rel_tol=0.01):
        raise _RefusedError("its exchanges give another value when they run again")
    in_dtypes = [replace(one, dtype=dtype) for dtype in dict.fromkeys((one.recorded, "float32"))]
    found = [each for each in in_dtypes if reproduces(each)]
    if not found:
        raise _RefusedError(
            "the operations give the right value when they run again; near its limit, check in float32 first"
        )
    # Another computation shows best in float32, and may hide in the noise of fewer values.
    is_clear = found[0].severity > _CLEAR or found[0].severity >= found[-1].severity
    return found[0] if is_clear else found[-1]


def reproduces(one: Reproduction, times_limit: float = 1.0) -> bool:
    """Return True if the candidate's program fails, and the reference's passes.

    times_limit: the error must exceed the limit by this factor.
    """
    healthy = severity(one.measure(one.dtype, "cpu", "reference"))
    return healthy <= 1 and not one.severity <= times_limit


def minimize(one: Reproduction) -> Reproduction:
    """Return the smallest reproduction that is found; `one` itself if none is smaller."""
    least = max(1.0, min(_LEAST, one.severity / 2))
    # An operation that one side alone runs shows no error without the sizes that it slices or sums.
    shown = {size for steps in one.differing for step in steps for size in step.lost}
    sizes = {size for tensor in one.inputs.values() for size in tensor.shape}
    for size in sorted(sizes, key=lambda size: (size in shown, -size)):
        if size in shown and _is_small(one):
            break
        smaller = (n for n in range(1, size) if size % n == 0 or n & (n - 1) == 0)
        found = (_try(one, size, n, least) for n in smaller)
        one = next((each for each in found if each is not None), one)
    return one


def _is_small(one: Reproduction) -> bool:
    return sum(tensor.nbytes for tensor in one.tensors.values()) <= _MOST_BYTES


def _without_unread(one: Reproduction) -> Reproduction:
    read = {one.names.get(number) for number in reads(one.candidate, one.reference)}
    read |= {"right", "compared"}
    return replace(one, tensors={k: v for k, v in one.tensors.items() if k in read})


def _with_parts(one: Reproduction) -> Reproduction:
    """Take the parts of flat buffers for the candidate's inputs: a buffer has no size of its own that shrinks.

    Returns: `one` itself if the candidate gives another value with them.
    """
    moved, made = {*one.names}, dict[int, int]()
    steps: list[Step] = []
    for step in one.candidate.steps:
        if step.operation.split(".")[1] in _MOVES and moved.issuperset(numbers_in(step.args)):
            made |= {number: -len(made) - k for k, number in enumerate(step.results, 2)}
            moved |= made.keys()
        else:
            steps.append(renumber(step, made))
    if one.ranks or one.candidate.target in made:
        return one
    candidate, inner = Program(steps, {}, {}, one.candidate.target), one.candidate
    read = reads(candidate)
    names, tensors = {**one.names}, {**one.tensors}
    for number, new in made.items():
        if new in read:
            names[new] = name = f"buffer_part_{len(names) - len(one.names) + 1}"
            part = replace(one, candidate=replace(inner, target=number))
            tensors[name] = part.run("candidate", one.recorded)
    changed = replace(one, candidate=candidate, names=names, tensors=tensors)
    values = (each.run("candidate", one.recorded) for each in (one, changed))
    return _without_unread(changed) if torch.equal(*values) else one


def _try(one: Reproduction, size: int, smaller: int, times_limit: float) -> Reproduction | None:
    """Return the reproduction with dims of `size` cut to `smaller`; None if it fails less clearly."""
    tensors = {name: _cut(tensor, size, smaller) for name, tensor in one.tensors.items()}
    candidate, reference, *ranks = (
        _resize(program, size, smaller) for program in (one.candidate, one.reference, *one.ranks)
    )
    made = replace(one, candidate=candidate, reference=reference, ranks=ranks, tensors=tensors)
    if not tensors["compared"].any():
        return None
    try:
        if one.kind == "values":
            made = replace(made, tensors=tensors | {"right": made.run().double()})
        is_clear = made.has_one_shape and reproduces(made, times_limit)
    except _NOT_RUN:
        return None
    return made if is_clear else None


def _cut(tensor: Tensor, size: int, smaller: int) -> Tensor:
    part = tuple(slice(smaller if of_dim == size else None) for of_dim in tensor.shape)
    return tensor[part].contiguous()


def _resize(program: Program, size: int, smaller: int) -> Program:
    def resized(leaf: Any) -> Any:  # noqa: ANN401 - an argument
        return leaf // size * smaller if type(leaf) is int and leaf % size == 0 else leaf

    steps = [
        step._replace(args=tree_map(resized, step.args), kwargs=tree_map(resized, step.kwargs))
        if step.operation.split(".")[1] in _SIZED
        else step
        for step in program.steps
    ]
    return replace(program, steps=steps)


def _exchanging(pair: ProgramPair) -> tuple[Sequence[Program], int]:
    """Return the programs of the ranks that exchange tensors to make a value, and the candidate's number there.

    No programs if the candidate makes it alone.
    """
    own = _exchanges(pair.candidate)
    groups = list(dict.fromkeys(group for _, group in own))
    if not groups:
        return (), 0
    ranks = [pair.ranks[rank] for rank in groups[0]] if pair.ranks else []
    if not ranks or any(_exchanges(one) != own for one in ranks) or groups[1:]:
        raise _RefusedError("ranks make other exchanges for this value")
    return ranks, groups[0].index(pair.rank)


def _exchanges(program: Program) -> list[tuple[str, Group]]:
    """Return the operations that exchange tensors between ranks, each with its group."""
    steps = ((step.operation, argument) for step in program.steps for argument in step.args)
    return [(name, argument) for name, argument in steps if isinstance(argument, Group)]


def find_tokens(one: Reproduction) -> list[str]:
    """Return the names of tensors that may hold tokens of prompts: integers, but for positions."""
    if "position" in one.site.port:
        return []
    return [
        name
        for name, tensor in one.tensors.items()
        if tensor.dtype in (torch.int64, torch.int32) and "position" not in name
    ]
