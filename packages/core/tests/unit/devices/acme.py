"""An adapter of another package, for a made-up vendor."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from assay.devices.base import Detection, DeviceVendor, make_absent_error, make_variant_error

ACME = DeviceVendor(
    name="acme",
    title="Acme Rocket",
    distributed_backend="gloo",
    compile_backend="eager",
    runner_labels=("assay-acme",),
)
_PRODUCTS = ("Rocket 1", "Rocket 2")


class AcmeDevice:
    """Two rockets that compute on the host."""

    vendor = ACME
    torch_device = "cpu"

    def __init__(self, variant: str = "") -> None:
        indices = tuple(str(index) for index in range(len(_PRODUCTS)))
        if variant and not variant.isdecimal():
            raise make_variant_error("acme", variant, indices)
        if int(variant or 0) >= len(_PRODUCTS):
            raise make_absent_error(f"acme:{variant}", "there are 2", "acme:0, acme:1")
        self.name = f"acme:{variant}" if variant else "acme"
        self._index = int(variant or 0)

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        return (Detection(ACME, products=_PRODUCTS, variants=("0", "1")),)

    def count(self) -> int:
        return len(_PRODUCTS)

    def product(self) -> str:
        return _PRODUCTS[self._index]

    def architecture(self) -> str:
        return "acme-1"

    def supported_dtypes(self) -> tuple[str, ...]:
        return ("float32", "float16")

    def effective_precision(self, dtype: str) -> str:
        return dtype

    def seed(self, seed: int) -> None:
        from assay.devices.torch_backend import seed_generators

        seed_generators(seed)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        from assay.devices.torch_backend import deterministic_algorithms

        with deterministic_algorithms():
            yield

    def execution(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        return

    def reset_peak_memory(self) -> None:
        return

    def peak_memory_bytes(self) -> int:
        return 8 << 20

    def free_memory_bytes(self) -> int:
        return 1 << 30

    def versions(self) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__, "rocket": "1.0"}
