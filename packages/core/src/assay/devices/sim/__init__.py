"""A simulated accelerator: the host's processor with an accelerator's rounding and order of sums.

Everything in assay except performance can be tested on it. `assay.devices.sim.numerics` lists what
each variant computes, with error bounds.
"""

from assay.devices.sim.device import SimDevice

__all__ = ["SimDevice"]
