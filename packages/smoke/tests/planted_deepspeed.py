"""DeepSpeed trainers with one fault each, for `--candidate-trainer FILE.py:CLASS`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay_smoke.trainers.deepspeed.partitions import master
from assay_smoke.trainers.deepspeed.trainer import DeepSpeedTrainer


class ZeroClippedBeforeUnscaling(DeepSpeedTrainer):
    """Clips gradients that still have the loss scale."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        view = super().build_optimizer(model)
        zero = self.engine.optimizer

        def clip_and_unscale(groups: list[Any], norm: Tensor) -> None:
            clip = torch.clamp(torch.as_tensor(norm) / zero.clip_grad, min=1.0)
            for group in groups:
                for part in group if isinstance(group, list) else [group]:
                    part.data.mul_(1 / (clip * zero.loss_scale))

        zero.unscale_and_clip_grads = clip_and_unscale
        return view


class ZeroOnlyLastMicroBatch(DeepSpeedTrainer):
    """DeepSpeed#4795: each backward restarts a rank's sums of gradients."""

    def backward(self, loss: Tensor) -> None:
        zero = self.engine.optimizer
        zero.all_grad_tensors.clear()
        # Float32 sums of mixed precision.
        for parts in zero.averaged_gradients.values():
            for part in parts or ():
                part.zero_()
        super().backward(loss)


class ZeroOffloadKeepsStaleCopy(DeepSpeedTrainer):
    """Keeps the old values of a parameter on the device, although the host has new ones."""

    def optimizer_step(self) -> None:
        stale = self.partitions.parameters[5]
        before = stale.detach().clone()
        super().optimizer_step()
        with torch.no_grad():
            stale.copy_(before)


class ZeroMastersNotRefreshed(DeepSpeedTrainer):
    """DeepSpeed#5150: a loaded model keeps the old float32 copies."""

    def load_progress(self, path: Path) -> None:
        held = self.partitions.parameters
        old = [self.partitions.read(parameter, master) for parameter in held]
        super().load_progress(path)
        for parameter, value in zip(held, old, strict=True):
            self.partitions.write(parameter, value, master)


class ZeroShardZeroed(DeepSpeedTrainer):
    """DeepSpeed#6791: one rank's float32 copies in the checkpoint are zero."""

    def save_progress(self, path: Path) -> None:
        super().save_progress(path)
        if dist.get_rank() == dist.get_world_size() - 1:
            (file,) = path.rglob(f"*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
            saved = torch.load(file, weights_only=False)
            for flat in saved["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                flat.detach().zero_()
            torch.save(saved, file)
        self.wait_for_others()
