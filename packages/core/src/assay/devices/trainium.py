"""AWS Trainium, which the packages torch_xla and torch_neuronx add to torch as "xla"."""

import importlib
import os
import re
import shlex
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from assay.devices.base import DeviceVendor
from assay.devices.torch_backend import VendorPackageDevice, seed_generators, version_of
from assay.errors import MachineError

TRAINIUM = DeviceVendor(
    name="trainium",
    title="AWS Trainium",
    distributed_backend="xla",
    compile_backend="openxla",
    runner_labels=("assay-trainium",),
    visible_devices="NEURON_RT_VISIBLE_CORES",
    measures_memory=False,
)

# The type of an EC2 instance, such as "trn1.32xlarge".
_INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")
_DRIVER = Path("/dev/neuron0")
_UNKNOWN = "unknown"

# Dtype names of --auto-cast-type. Source: neuronx-cc command line reference,
# https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/neuronx-cc/api-reference-guide/neuron-compiler-cli-reference-guide.html
_CAST_TYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}

# Earlier compilers cast the operands of float32 products by default.
# Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/release-notes/components/compiler.html, 2.22
_FIRST_WITHOUT_CASTS = (2, 22)

# "1" makes torch_xla keep float32 as bfloat16. Both variables are deprecated.
# Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/announcements/neuron2.x/announce-eos-xla-bf16.html
_FLOAT32_AS_BFLOAT16 = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")


class TrainiumDevice(VendorPackageDevice):
    """One NeuronCore through torch_xla, which collects operations into graphs.

    From torch 2.10 on, torch_neuronx has its own device, which this adapter does not support.
    Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/about/index.html
    Source: https://docs.pytorch.org/xla/release/r2.8/learn/api-guide.html
    """

    kind = "xla"
    maker = TRAINIUM
    package = "torch_neuronx"
    more_packages = ("torch_xla", "neuronxcc")

    @classmethod
    def module(cls) -> ModuleType:
        """Return `torch_xla`: torch has no module for the device."""
        importlib.import_module(cls.package)
        return importlib.import_module("torch_xla")

    @classmethod
    def missing_software(cls) -> list[str]:
        """List missing packages and a missing driver, for which torch_neuronx would wait."""
        driver = [] if _DRIVER.exists() else [f"the driver of AWS Neuron ({_DRIVER})"]
        return [*super().missing_software(), *driver]

    @classmethod
    def is_usable(cls) -> bool:
        """Return True if torch_xla counts a core."""
        return int(cls.module().device_count()) > 0

    @classmethod
    def product_of(cls, index: int) -> str:
        """Return the same name for all cores of an instance."""
        del index
        return TRAINIUM.title

    def product(self) -> str:
        """Return the title and the type of the instance."""
        return f"{TRAINIUM.title} ({_instance()})"

    def architecture(self) -> str:
        """Return the family of the instance, such as "trn1". Raises: MachineError if it is unknown."""
        instance = _instance()
        if instance == _UNKNOWN:
            raise MachineError(f"{_INSTANCE} does not name the type of this instance")
        return instance.partition(".")[0]

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return all dtypes but float64, which is computed as float32."""
        return ("float32", "bfloat16", "float16")

    def effective_precision(self, dtype: str) -> str:
        """Return the dtype to which variables or an older compiler cast float32 operands."""
        if dtype != "float32":
            return dtype
        if any(os.environ.get(variable) == "1" for variable in _FLOAT32_AS_BFLOAT16):
            return "bfloat16"
        words = shlex.split(os.environ.get("NEURON_CC_FLAGS", "").replace("=", " "))
        flags = dict(pairwise(words))
        if flags.get("--auto-cast", _default_casts()) == "none":
            return dtype
        asked = flags.get("--auto-cast-type", "bf16")
        return _CAST_TYPES.get(asked, asked)

    def seed(self, seed: int) -> None:
        """Seed the generators of the host and of the core."""
        seed_generators(seed)
        self._model_functions().set_rng_state(seed, self.torch_device)

    def execution(self) -> AbstractContextManager[None]:
        """Return an empty context: tensors name their core."""
        return nullcontext()

    def synchronize(self) -> None:
        """Start the collected operations, and wait for them."""
        self.module().sync()
        self._model_functions().wait_device_ops()

    @staticmethod
    def _model_functions() -> ModuleType:
        return importlib.import_module("torch_xla.core.xla_model")


def _instance() -> str:
    try:
        return _INSTANCE.read_text(encoding="utf-8").strip()
    except OSError:
        return _UNKNOWN


def _default_casts() -> str:
    release = re.match(r"(\d+)\.(\d+)", version_of("neuronxcc"))
    is_older = release and tuple(map(int, release.groups())) < _FIRST_WITHOUT_CASTS
    return "matmult" if is_older else "none"
