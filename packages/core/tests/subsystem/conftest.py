from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def waiting_threads_sleep() -> Iterator[None]:
    """On a busy machine threads that spin for one another take minutes for seconds of work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield
