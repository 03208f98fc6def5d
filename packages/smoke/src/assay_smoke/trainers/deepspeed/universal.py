"""DeepSpeed's universal checkpoints: saved on some number of ranks, loaded on any other."""

import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from assay.training.protocol import TrainingPlan
from assay.training.trainers.reference import GENERATORS, TRAINER_STATE
from assay_smoke.trainers.deepspeed.trainer import DeepSpeedTrainer

# Where DeepSpeed writes which of several checkpoints is the latest one.
_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"


def convert_to_universal(checkpoint: Path) -> None:
    """Add a universal checkpoint beside the one that DeepSpeed's `save_checkpoint` wrote.

    Called in one process, whatever number of ranks wrote it.
    """
    from deepspeed.checkpoint import ds_to_universal

    tag = (checkpoint / _LATEST).read_text(encoding="utf-8")
    arguments = Namespace(
        input_folder=str(checkpoint / tag),
        output_folder=str(checkpoint / f"{tag}-universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # of Megatron's, which others do not write
    )
    with redirect_stdout(sys.stderr):
        ds_to_universal.main(arguments)


class UniversalTrainer(DeepSpeedTrainer):
    """ZeRO-2 that resumes from a universal checkpoint, which may be of another number of ranks."""

    def configure(self, plan: TrainingPlan, num_elements: int) -> dict[str, Any]:
        """As without; checkpoints are read as universal ones."""
        config = super().configure(plan, num_elements)
        return config | {"checkpoint": {"load_universal": True}}

    def load(self, folder: Path) -> None:
        """Convert what was saved, once, and go on from that.

        A rank that there was not before draws from the generators of its seed.
        """
        checkpoint = folder / TRAINER_STATE
        if self.rank == 0 and not (checkpoint / _LATEST_UNIVERSAL).is_file():
            convert_to_universal(checkpoint)
        self.wait_for_others()
        if (folder / f"{GENERATORS}-{self.rank}.json").is_file():
            super().load(folder)
        else:
            self.load_progress(checkpoint)
