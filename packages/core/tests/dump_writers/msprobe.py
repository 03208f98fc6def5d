"""Write a model's forward calls in the layout of msprobe's dumps, level L0, task tensor or statistics."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class MsprobeWriter:
    """A dump of one process, in the folder `step{step}/proc1` of `folder`."""

    def __init__(
        self, folder: Path, *, step: int = 0, process: str = "proc1", statistics: bool = False
    ) -> None:
        self.folder = folder / f"step{step}" / process
        self.statistics = statistics
        self.data: dict[str, Any] = {}
        self._calls: Counter[str] = Counter()
        (self.folder / "dump_tensor_data").mkdir(parents=True)

    def add_call(
        self, name: str, class_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: object,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Add one finished forward call of a module."""
        call = self._calls[name]
        self._calls[name] += 1
        key = f"Module.{name}.{class_name}.forward.{call}"
        output = output if isinstance(output, (tuple, list)) else [output]
        self.data[key] = {
            "input_args": [self._describe(f"{key}.input.{i}", v) for i, v in enumerate(args)],
            "input_kwargs": {k: self._describe(f"{key}.kwargs.{k}", v) for k, v in kwargs.items()},
            "output": [self._describe(f"{key}.output.{i}", v) for i, v in enumerate(output)],
            "parameters": {
                k: self._describe(f"{key}.parameters.{k}", v) for k, v in (parameters or {}).items()
            },
        }

    def close(self) -> None:
        """Write dump.json, as the tool's stop() does."""
        task = "statistics" if self.statistics else "tensor"
        index = {"task": task, "level": "L0", "framework": "pytorch", "data": self.data}
        (self.folder / "dump.json").write_text(json.dumps(index))

    def _describe(self, name: str, value: object) -> object:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            entry = {
                "type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape),
                "Max": value.max().item(), "Min": value.min().item(),
                "Mean": value.float().mean().item() if value.is_floating_point() else None,
                "Norm": value.float().norm().item() if value.is_floating_point() else None,
            }  # fmt: skip
            if not self.statistics:
                entry["data_name"] = f"{name}.pt"
                torch.save(value.clone(), self.folder / "dump_tensor_data" / f"{name}.pt")
            return entry
        if isinstance(value, (tuple, list)):
            return [self._describe(f"{name}.{i}", item) for i, item in enumerate(value)]
        if isinstance(value, (bool, int, float, str)):
            return {"type": type(value).__name__, "value": value}
        if hasattr(value, "items"):  # a ModelOutput
            return {k: self._describe(f"{name}.{k}", v) for k, v in value.items()}
        return None


@contextmanager
def dumped(model: nn.Module, folder: Path, *, parameters: bool = False) -> Iterator[MsprobeWriter]:
    """Dump every forward call of the modules of `model`, the model itself excepted."""
    writer = MsprobeWriter(folder)
    handles = []
    for name, module in model.named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: object,
            name: str = name,
        ) -> None:
            own = dict(module.named_parameters(recurse=False)) if parameters else {}
            writer.add_call(name, type(module).__name__, args, kwargs, output, own)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield writer
    finally:
        for handle in handles:
            handle.remove()
        writer.close()
