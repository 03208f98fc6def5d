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
from assay.recording.programs import Group, Program, RecordedValue, Step, Value, numbers_in
from assay.reproduce.script import Reproduction, number_alike, reads, severity

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

# Errors of operations that do not run with other sizes or on other values.
_NOT_RUN = RuntimeError, IndexError, ValueError, TypeError, KeyError, NameError
# No program has this number.
_RECORDED = -1


class _RefusedError(Exception):
    """The reason why a value does not fail by itself."""


def build(
    pairs: Sequence[RecordedValue], recorded: str, limits: Mapping[str, float], device: str
) -> Reproduction | str:
    """Build the smallest reproduction of one of the values that fails.

    recorded: the candidate's dtype.
    device: the candidate's.
    Returns: the reproduction, or why no value fails by itself.
    """
    reasons = []
    for pair in sorted(pairs, key=lambda one: len(one.program.steps)):
        try:
            one = _with_clear_dtype(_pair_up(pair, recorded, limits, device), pair)
            return minimize(replace(one, whole=one))
        except _RefusedError as error:
            reasons.append(f"{pair.site}: {error}")
        except RuntimeError as error:
            reasons.append(f"{pair.site}: the operations do not run again: {first_line(error)}")
    return next(iter(reasons), "no value there is over its limit")


def _pair_up(
    pair: RecordedValue, recorded: str, limits: Mapping[str, float], device: str
) -> Reproduction:
    """Write both programs of a value with the same inputs. Raises: _RefusedError."""
    if pair.reference is None:
        raise _RefusedError("the reference does not make this value")
    ranks, rank = _exchanging(pair)
    (*ranks, reference), names, inputs = number_alike((*ranks, pair.reference))
    one = Reproduction(
        pair.site, ranks, rank, reference, names, inputs | dict(pair.answer), recorded, recorded,
        limits, device, pair.module_class,
    )  # fmt: skip
    is_known = one.candidate.target in reads(reference)
    # A mask that no operation made is the causal one, where the model passes none; tokens and labels come
    # from the code that reads texts.
    is_read = one.kind == "mask" or (one.kind == "exact" and not pair.site.at.module)
    if not pair.program.steps and not is_read and not is_known:
        raise _RefusedError("no operation of torch made it")
    return one


def _with_clear_dtype(one: Reproduction, pair: RecordedValue) -> Reproduction:
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
    name, error, *_ = one.measure(one.recorded, one.device)[0]
    if one.kind == "values" and name.startswith("shape"):
        raise _RefusedError("its shape is not the reference's, as of a shard or of packed rows")
    if len(one.ranks) > 1 and not isclose(error, pair.error, rel_tol=0.01):
        raise _RefusedError("its exchanges give another value when they run again")
    in_dtypes = [replace(one, dtype=dtype) for dtype in dict.fromkeys((one.recorded, "float32"))]
    found = [each for each in in_dtypes if reproduces(each)]
    if not found:
        raise _RefusedError(
            "the operations give the right value when they run again: compiled code is not recorded, and an"
            " error near its limit may vanish (check in float32 first)"
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
    sizes = {size for tensor in one.inputs.values() for size in tensor.shape}
    for size in sorted(sizes, reverse=True):
        smaller = (n for n in range(1, size) if size % n == 0 or n & (n - 1) == 0)
        found = (_try(one, size, n, least) for n in smaller)
        one = next((each for each in found if each is not None), one)
    return one


def _with_parts(program: Program) -> Program:
    """Take the parts of flat buffers for inputs: a buffer has no size of its own that shrinks.

    Returns: `program` itself without a buffer, or if an operation changes memory, which the parts share.
    """
    names_of = [step.operation.split(".")[1] for step in program.steps]
    changes_memory = any(name.endswith("_") for name in names_of if name not in _MOVES)
    if changes_memory or "as_strided" not in names_of:
        return program
    values = {number: one.clone() for number, one in program.inputs.items()}

    def value_of(leaf: Any) -> Any:  # noqa: ANN401 - an argument
        return values[leaf] if isinstance(leaf, Value) else leaf

    steps: list[Step] = []
    for step in program.steps:
        _, name, overload = step.operation.split(".")
        if name not in _MOVES or not values.keys() >= {*numbers_in(step.args)}:
            steps.append(step)
            continue
        function = getattr(getattr(torch.ops.aten, name), overload)
        made = function(*tree_map(value_of, step.args), **step.kwargs)
        values |= zip(step.results, made if step.has_several else [made], strict=True)
    read = reads(Program(steps, {}, {}, program.target)) & values.keys()
    names = {number: program.names.get(number, "buffer_part") for number in read}
    return Program(steps, {number: values[number] for number in read}, names, program.target)


def _try(one: Reproduction, size: int, smaller: int, times_limit: float) -> Reproduction | None:
    """Return the reproduction with dims of `size` cut to `smaller`; None if it fails less clearly."""
    tensors = {name: _cut(tensor, size, smaller) for name, tensor in one.tensors.items()}
    *ranks, reference = (_resize(each, size, smaller) for each in (*one.ranks, one.reference))
    made = replace(one, ranks=ranks, reference=reference, tensors=tensors)
    if not tensors["compared"].any():
        return None
    try:
        if one.kind == "values":
            made = replace(made, tensors=tensors | {"right": made.run().double()})
        is_alike = _statistics(made) == _statistics(one) and reproduces(made, times_limit)
    except _NOT_RUN:
        return None
    return made if is_alike else None


def _statistics(one: Reproduction) -> list[str]:
    """Return what the candidate fails by: statistics, another shape, or NaN."""
    return [name.partition(" (")[0] for name, *_ in one.measure(one.dtype, one.device)]


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


def _exchanging(pair: RecordedValue) -> tuple[Sequence[Program], int]:
    """Return the programs of the ranks that exchange tensors to make a value, and the candidate's number there.

    Its own program if it makes the value alone.
    """
    own = _exchanges(pair.program)
    groups = list(dict.fromkeys(group for _, group in own))
    if not groups:
        return [_with_parts(pair.program)], 0
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
    tensors = {} if "position" in one.site.port else one.tensors
    integers = [name for name, each in tensors.items() if each.dtype in (torch.int64, torch.int32)]
    return [name for name in integers if "position" not in name]
