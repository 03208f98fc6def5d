"""The zoo: a tiny model of an architecture passes, and its planted fault is found."""

import pytest

from packages.core.tests.zoo.__main__ import check_architecture
from packages.core.tests.zoo.architectures import list_architectures

pytestmark = pytest.mark.long


def test_a_clean_model_passes_and_its_fault_is_found() -> None:
    [qwen] = [one for one in list_architectures() if str(one).endswith("Qwen2ForCausalLM")]

    row = check_architecture(qwen, seed=0)

    assert (row.float32, row.bfloat16) == ("PASS", "PASS")
    assert row.planted
    assert row.found == row.planted
