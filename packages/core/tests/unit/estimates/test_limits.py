import re
from pathlib import Path

import pytest

from assay.errors import MachineError
from assay.estimates.limits import require_disk


def test_golden_beyond_the_allowed_disk_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as raised:
        require_disk("the golden", 3 * 10**9, tmp_path / "new" / "golden", 10**9, "less")

    assert "needs about 3.0 GB of disk, but --disk allows 1.0 GB. Use less" in str(raised.value)
    require_disk("the golden", 10**6, tmp_path, 10**9, "less")


def test_golden_beyond_the_free_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=re.escape(f"{tmp_path} has ")):
        require_disk("the golden", 10**18, tmp_path, None, "less")
