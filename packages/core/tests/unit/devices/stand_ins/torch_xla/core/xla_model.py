"""Stand-in of torch_xla.core.xla_model."""

from torch_xla import asked  # type: ignore[import-not-found] # beside it on the path


def wait_device_ops() -> None:
    asked.append("wait")


def set_rng_state(seed: int, device: str) -> None:
    asked.append(f"seed {seed} {device}")
