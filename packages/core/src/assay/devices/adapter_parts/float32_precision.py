"""The format that torch's settings allow for operands of float32 products, in all versions.

torch 2.9 added one setting for each backend, which also reflects the older ones; reading the older
ones after the newer were set raises an error there.
"""

import torch

_FORMATS = {"tf32": "tf32", "bf16": "bfloat16"}
_OLDER_SETTINGS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


def float32_operand_format(matmul_settings: object) -> str:
    """The format that `matmul_settings`, such as `torch.backends.cuda.matmul`, allow for operands.

    The caller checks whether the hardware has the format.
    """
    setting = getattr(matmul_settings, "fp32_precision", None)
    if setting is None:
        setting = _OLDER_SETTINGS[torch.get_float32_matmul_precision()]
    return _FORMATS.get(setting, "float32")
