"""A dump in memory, for tests."""

from collections.abc import Mapping
from dataclasses import replace
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
            key=f"{module}.{port}.{step}",
            order=order,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
        )
        for order, ((module, port, step), value) in enumerate(values.items())
    ]
    by_key = {one.key: value for one, value in zip(tensors, values.values(), strict=True)}
    return Dump(
        format="memory", path=Path("memory"), tensors=tensors, read=lambda one: by_key[one.key],
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def damaged(dump: Dump, key: str) -> Dump:
    """Return a dump whose tensor `key` cannot be read."""

    def read(tensor: DumpedTensor) -> Tensor:
        if tensor.key == key:
            raise UnreadableFileError(f"{key} is damaged")
        return dump.read(tensor)

    assert key in {one.key for one in dump.tensors}
    return replace(dump, read=read)
