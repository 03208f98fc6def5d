import subprocess
import sys

import pytest
import torch

from assay.dtypes import FORMATS, float_format
from assay.errors import UsageError

TORCH_NAMES = sorted(FORMATS.keys() - {"tf32"})


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_formats_agree_with_torch_finfo(name: str) -> None:
    info = torch.finfo(getattr(torch, name))
    format_ = float_format(name)

    assert format_.unit_roundoff == info.eps / 2
    assert format_.largest == info.max
    assert format_.smallest == info.smallest_normal * info.eps


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16() -> None:
    tf32 = float_format("tf32")

    assert tf32.unit_roundoff == 2.0**-11
    # 10 explicit fraction bits, largest exponent 127.
    assert tf32.largest == (1 + 1023 / 1024) * 2.0**127


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name != "float64"])
def test_unit_roundoff_is_the_error_of_rounding_a_tie(name: str) -> None:
    unit = float_format(name).unit_roundoff
    halfway = torch.tensor(1 + unit, dtype=torch.float64)

    rounded = halfway.to(getattr(torch, name)).double()

    assert float(rounded - halfway) == -unit


def test_unknown_format_names_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'float12'; known: float64, float32, tf32"):
        float_format("float12")


def test_formats_need_no_torch() -> None:
    code = "import sys, assay.dtypes, assay.sites, assay.verdicts; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
