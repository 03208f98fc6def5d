"""The three global random generators that data loading uses."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """States of the generators of torch, numpy and random, as in a checkpoint."""

    torch: Any
    numpy: Any
    python: Any

    @classmethod
    def current(cls) -> "GeneratorStates":
        """Take the current states."""
        import numpy as np
        import torch

        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002

    def restore(self) -> None:
        """Restore these states."""
        import numpy as np
        import torch

        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)


def seed_generators(seed: int) -> None:
    """Seed all three, as a training script does at its start."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
