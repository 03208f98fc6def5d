"""Stand-in of torch_xla.core.xla_model; `asked` has what was called."""

asked: list[str] = []


def mark_step() -> None:
    asked.append("mark_step")


def wait_device_ops() -> None:
    asked.append("wait")


def set_rng_state(seed: int, device: str) -> None:
    asked.append(f"seed {seed} {device}")
