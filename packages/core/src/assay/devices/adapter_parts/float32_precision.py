"""Which format float32 products are really made in: torch's settings, read alike by all versions.

torch 2.9 brought one setting for each backend, which also reflects the older ones; asking the
older ones after the newer were set raises an error there.
"""

from typing import Any

import torch

_FORMATS = {"tf32": "tf32", "bf16": "bfloat16"}
_OLDER_SETTINGS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


def float32_operand_format(matmul_settings: Any) -> str:  # noqa: ANN401 - a module of settings
    """The format that `matmul_settings`, as in `torch.backends.cuda.matmul`, allows for operands.

    Whether the hardware takes up the permission is the caller's question.
    """
    setting = getattr(matmul_settings, "fp32_precision", None)
    if setting is None:
        setting = _OLDER_SETTINGS[torch.get_float32_matmul_precision()]
    return _FORMATS.get(setting, "float32")
