"""Make a reproduction smaller while it still fails.

A size S, such as that of the batch, of the heads or of the channels, becomes a smaller one in all inputs and
in all arguments that are sizes. What is wrong after that is refused: an error of torch, a reference that
fails, a candidate that passes or has another shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from assay.recording.programs import Program
from assay.reproduce.script import Reproduction, severity

# Operations that get sizes as arguments, without those that write.
_SIZED = frozenset(
    """view _unsafe_view reshape expand repeat zeros ones full empty new_zeros new_ones new_full new_empty arange
    slice split_with_sizes split narrow""".split()  # noqa: SIM905
)


def reproduces(one: Reproduction, dtype: str) -> bool:
    """Return True if the candidate's program fails in `dtype`, and the reference's passes."""
    device = one.words.device
    healthy = severity(one.measure(dtype, "cpu", "reference"))
    return healthy <= 1 and not severity(one.measure(dtype, device)) <= 1


def minimize(one: Reproduction) -> Reproduction:
    """Return the smallest reproduction that is found; `one` itself if none is smaller."""
    for size in sorted(set(_sizes(one.tensors)), reverse=True):
        for smaller in _smaller(size):
            if (found := _try(one, size, smaller)) is not None:
                one = found
                break
    return one


def _smaller(size: int) -> list[int]:
    """Return the divisors and the powers of two below `size`."""
    return [one for one in range(1, size) if size % one == 0 or one & (one - 1) == 0]


def _sizes(tensors: Mapping[str, Tensor]) -> Iterator[int]:
    for name, tensor in tensors.items():
        if name not in ("answer", "kept"):
            yield from (size for size in tensor.shape if size > 1)


def _try(one: Reproduction, size: int, smaller: int) -> Reproduction | None:
    tensors = {name: _cut(tensor, size, smaller) for name, tensor in one.tensors.items()}
    made = replace(
        one,
        candidate=_resize(one.candidate, size, smaller),
        reference=_resize(one.reference, size, smaller),
        tensors=tensors,
    )
    try:
        if not tensors["kept"].any():
            return None
        if one.kind == "values":
            made = replace(made, tensors=tensors | {"answer": made.run_wide().double()})
        return made if made.has_one_shape and reproduces(made, one.dtype) else None
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


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
