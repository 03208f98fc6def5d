"""A simulated accelerator: the host's processor, rounding and reordering sums like one.

All of assay but performance can be tested on it. `assay.devices.sim.numerics` lists what each
variant computes, with error bounds.
"""

from assay.devices.sim.device import SimDevice

__all__ = ["SimDevice"]
