"""Sets DeepSpeed up in this process, removes it without a trace, and compiles its CPU Adam once per user.

By itself DeepSpeed lets every process ask ninja what to compile, behind a lock file. A process that is
killed leaves the lock, and all later processes wait for it.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from assay.errors import MachineError, UsageError
from assay.launch import RemoteFunction, call
from assay.runs import Progress
from assay.runs.folders import cache_folder
from assay.watchdog import watched

_INSTALL = "the trainer deepspeed needs DeepSpeed: pip install 'assay-smoke[deepspeed]'"


def require_deepspeed() -> None:
    """Raise UsageError if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        raise UsageError(_INSTALL)


@contextmanager
def deepspeed_process(torch_device: str) -> Iterator[None]:
    """Make DeepSpeed usable on `torch_device` within the block.

    A single process gets a process group of one rank, which DeepSpeed requires.
    """
    with ExitStack() as stack:
        kind = torch.device(torch_device).type
        variables = {"DS_ACCELERATOR": kind, "LOCAL_RANK": "0"}
        stack.enter_context(mock.patch.dict(os.environ, variables | os.environ))
        _import_quietly()
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if kind == "cpu" else None,
                store=dist.HashStore(),  # type: ignore[attr-defined]  # of torch
                rank=0,
                world_size=1,
            )
            stack.callback(dist.destroy_process_group)
        stack.callback(_forget_groups)
        # Its compilation takes a minute, and only inference on the host calls it.
        stack.enter_context(mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None))
        if kind == "cpu":
            # Without AVX-512, float16 is slow but correct.
            from deepspeed.accelerator import get_accelerator

            accelerator: Any = get_accelerator()
            is_supported = mock.patch.object(accelerator, "is_fp16_supported", return_value=True)
            stack.enter_context(is_supported)
        yield


def _import_quietly() -> None:
    """Import DeepSpeed. Its warnings go to standard error, and its other messages are dropped."""
    import deepspeed

    del deepspeed
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # not that of a test runner
            handler.setStream(sys.stderr)


def _forget_groups() -> None:
    """Make DeepSpeed forget the process group that it found first."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None  # noqa: SLF001


# DeepSpeed's name of the extension.
_NAME = "cpu_adam"
# Relative error of updates and moments. The extension keeps betas and their powers in float32
# (csrc/includes/cpu_adam.h), whose spacing below one is 2^-24, so 1 - 0.999 (the default of torch's
# AdamW) has this relative error.
ROUNDING_OF_BETAS = 2**-25 / (1 - 0.999)


def cpu_adam(parameters: Sequence[nn.Parameter], defaults: Mapping[str, object]) -> Optimizer:
    """Return DeepSpeed's AdamW for parameters on the host. Call it within `deepspeed_process`.

    defaults: of torch's AdamW, for learning rate, betas, eps and weight decay.
    Raises: MachineError if compilation fails.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    load_extension()
    taken = {name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    adam: Optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **taken)
    return adam


def compile_ahead(folder: Path, progress: Progress) -> None:
    """Compile the extension in its own process if it is missing. It takes a minute.

    folder: an existing one, for the log of the compiler.
    Raises: MachineError if compilation fails.
    """
    if not extension_file().is_file():
        work: RemoteFunction[None, None] = RemoteFunction(f"{__name__}:compile_alone")
        call(work, None, folder=folder, name="cpu-adam", progress=progress)


def compile_alone(_: None, progress: Progress) -> None:
    """Compile the extension in this process."""
    with progress.step("compiling DeepSpeed's CPU Adam"), deepspeed_process("cpu"):
        load_extension()


def load_extension() -> None:
    """Load the extension from the cache, compiled if missing, and register it with DeepSpeed.

    Raises: MachineError if compilation fails.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    file = extension_file()
    if not file.is_file():
        _compile(file)
    spec = importlib.util.spec_from_file_location(_NAME, file)
    if spec is None or spec.loader is None:
        raise MachineError(f"{file} is not a Python extension: delete it to compile it again")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise MachineError(f"{error}: delete {file} to compile it again") from error
    OpBuilder._loaded_ops[_NAME] = module  # noqa: SLF001 - where DeepSpeed looks first


def extension_file() -> Path:
    """Return the compiled file for these versions and CPU instructions.

    The folder of packages of a runner goes before the cache.
    """
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    instructions = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    made_of = (version("deepspeed"), "torch", torch.__version__, python, instructions)
    file = Path(f"deepspeed-{'-'.join(made_of)}", f"{_NAME}.so")
    if packages := os.environ.get("ASSAY_PACKAGES"):
        compiled = Path(packages, "assay") / file
        if compiled.is_file():
            return compiled
    return cache_folder() / file


def _compile(file: Path) -> None:
    """Compile in a temporary folder and move the complete file to its place."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as folder, watched("folder", folder):
        try:
            with (
                mock.patch.dict(os.environ, {"TORCH_EXTENSIONS_DIR": folder}),
                redirect_stdout(sys.stderr),
            ):
                CPUAdamBuilder().jit_load(verbose=False)
            (Path(folder) / _NAME / file.name).replace(file)
        except (RuntimeError, OSError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise MachineError(
                f"cannot compile DeepSpeed's CPU Adam, which offload needs ({reason}): install a C++"
                " compiler and ninja"
            ) from error
