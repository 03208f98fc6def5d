"""What a planted published bug is: where it is planted, and what is right to say of it."""

from dataclasses import dataclass
from pathlib import Path

from assay.launch import parse_mesh
from assay.models.sources import RemoteCode
from assay.sites import Phase
from assay.training.reports import TrainOptions
from assay.verdicts import Diagnosis

HERE = Path(__file__).parent
BOTH = ("float32", "bfloat16")
FLOAT32 = ("float32",)


@dataclass(frozen=True)
class Training:
    """How a model with a bug of training is trained; a setup function needs none of it.

    mesh: as `--mesh` takes it; empty for a single process.
    features: such as `recompute`; `lora` is one.
    """

    mesh: str = ""
    features: tuple[str, ...] = ()
    micro_batches: int = 2
    learning_rate: float = 1e-3

    def options(self, model: str, remote_code: RemoteCode) -> TrainOptions:
        """Of both sides of the check."""
        return TrainOptions(
            model=model,
            lora="lora" in self.features,
            micro_batches=self.micro_batches,
            learning_rate=self.learning_rate,
            remote_code=remote_code,
        )

    @property
    def axes(self) -> dict[str, int]:
        """The mesh by axis."""
        return parse_mesh(self.mesh) if self.mesh else {}


@dataclass(frozen=True)
class Planted:
    """A bug of `bugs.toml` as it is planted here, and its control.

    plant, control: FILE:NAME below `plants`, or `training_plants` where it is trained; of
        trainers a class, of setups a function. The control is the same code without the bug.
    model: a recipe or one of `models.py`.
    module: where the error is made; None where it is no single module.
    diagnoses: those that are right; most often one.
    dtypes: in which the bug exists; what rounds to bfloat16 is none in bfloat16.
    training: None where the model generates.
    """

    bug: str
    plant: str
    control: str
    model: str
    phase: Phase
    module: str | None
    diagnoses: tuple[Diagnosis, ...]
    dtypes: tuple[str, ...] = BOTH
    training: Training | None = None

    @property
    def remote_code(self) -> RemoteCode:
        """Whether code that comes with the model runs."""
        return "trust" if self.model.startswith("own code") else "refuse"

    def reference_of(self, plant: str) -> str:
        """FILE.py:NAME, as the command line takes it."""
        file, _, name = plant.partition(":")
        folder = "plants" if self.training is None else "training_plants"
        return f"{HERE / folder / file}.py:{name}"
