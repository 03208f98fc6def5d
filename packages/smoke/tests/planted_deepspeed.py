"""DeepSpeed with ZeRO and a fault each, to be given as `--candidate-trainer FILE.py:CLASS`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay_smoke.trainers.deepspeed.trainer import DeepSpeedTrainer


class ZeroClippedBeforeUnscaling(DeepSpeedTrainer):
    """The scale of the loss is still on the gradients when their norm is held to the limit."""

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
    """DeepSpeed#4795: a rank's sums of its part of the gradients begin anew in each backward."""

    def backward(self, loss: Tensor) -> None:
        zero = self.engine.optimizer
        zero.all_grad_tensors.clear()
        # Where gradients are added up in float32 beside others, they are added up here.
        for parts in zero.averaged_gradients.values():
            for part in parts or ():
                part.zero_()
        super().backward(loss)


class ZeroOffloadKeepsStaleCopy(DeepSpeedTrainer):
    """The host has the new values of a parameter, and the device goes on with those it had."""

    def optimizer_step(self) -> None:
        stale = self.partitions.parameters[5]
        before = stale.detach().clone()
        super().optimizer_step()
        with torch.no_grad():
            stale.copy_(before)


class ZeroMastersNotRefreshed(DeepSpeedTrainer):
    """DeepSpeed#5150: a model is loaded, and its float32 copies are those from before."""

    def load_progress(self, path: Path) -> None:
        held = self.partitions.parameters
        masters = [self.partitions.master(parameter) for parameter in held]
        super().load_progress(path)
        for parameter, master in zip(held, masters, strict=True):
            self.partitions.set_master(parameter, master)


class ZeroShardZeroed(DeepSpeedTrainer):
    """DeepSpeed#6791: of one rank's part of the checkpoint the float32 copies are zero."""

    def save_progress(self, path: Path) -> None:
        super().save_progress(path)
        if dist.get_rank() == dist.get_world_size() - 1:
            (file,) = path.rglob(f"*zero_pp_rank_{dist.get_rank()}_*optim_states.pt")
            saved = torch.load(file, weights_only=False)
            for flat in saved["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                flat.detach().zero_()
            torch.save(saved, file)
        self.wait_for_others()
