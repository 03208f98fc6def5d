"""Write tensors in the layout of msit's dumps of Ascend Transformer Boost models."""

from pathlib import Path

from torch import Tensor

FLOAT32 = 0


def write_tensor(file: Path, value: Tensor) -> None:
    """Write one float32 tensor as a `.bin` file."""
    data = value.float().contiguous().numpy().tobytes()
    lines = (
        "$Version=1.0",
        "$Object.Count=1",
        f"$Object.Length={len(data)}",
        "format=2",
        f"dtype={FLOAT32}",
        f"dims={','.join(map(str, value.shape))}",
        f"$Object.data=0,{len(data)}",
        "$End=1",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(f"{line}\n" for line in lines).encode() + data)


def write_operation(
    token: Path, operation: str, inputs: list[Tensor], outputs: list[Tensor]
) -> None:
    """Write what an operation got and returned. operation: such as "1_Layer/0_LinearOperation"."""
    for number, value in enumerate(inputs):
        write_tensor(token / operation / "before" / f"intensor{number}.bin", value)
    for number, value in enumerate(outputs):
        write_tensor(token / operation / "after" / f"outtensor{number}.bin", value)
