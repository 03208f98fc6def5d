"""A dump in memory, for tests."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.files import UnreadableFileError
from assay.sites import CallSite, Site

# (module, port, step) of a tensor; the order of the entries is that of the calls.
Values = Mapping[tuple[str, str, int], Tensor]


def make_dump(values: Values, **fields: object) -> Dump:
    """Return a dump of forward passes that holds `values`."""
    tensors = [
        DumpedTensor(
            Site(CallSite(step, module), port),
            f"{module}.{port}.{step}",
            partial(value.view_as, value),
            order,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
        )
        for order, ((module, port, step), value) in enumerate(values.items())
    ]
    return Dump(format="memory", path=Path("memory"), tensors=tensors, **fields)  # type: ignore[arg-type]


def with_values(dump: Dump, values: Mapping[str, Tensor]) -> Dump:
    """Return a dump whose tensors have other values, by key."""
    tensors = [replace(one, load=partial(values.__getitem__, one.key)) for one in dump.tensors]
    return replace(dump, tensors=tensors)


def damaged(dump: Dump, key: str) -> Dump:
    """Return a dump whose tensor `key` cannot be read."""

    def load() -> Tensor:
        raise UnreadableFileError(f"{key} is damaged")

    assert key in {one.key for one in dump.tensors}
    tensors = [replace(one, load=load) if one.key == key else one for one in dump.tensors]
    return replace(dump, tensors=tensors)
