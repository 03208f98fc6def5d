"""What `import assay` offers, and what it costs."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import assay
from assay.verdicts import Verdict


def test_everything_that_is_offered_is_there() -> None:
    assert all(getattr(assay, name) is not None for name in assay.__all__)
    assert assay.Verdict is Verdict
    assert assay.__version__ == version("assay-core")
    with pytest.raises(AttributeError, match="module 'assay' has no attribute 'chekc'"):
        _ = assay.chekc


def test_the_checks_can_be_had_without_torch() -> None:
    code = (
        "import sys, assay; assay.Verdict, assay.__version__, assay.check_generate,"
        " assay.check_train; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "False\n"
