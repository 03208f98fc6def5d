"""A simulated accelerator: the host's processor made to round and reorder like one.

Everything but speed can be tried on it. `assay.devices.sim.numerics` says what each variant
computes and how far it may be from the exact result.
"""

from assay.devices.sim.device import SimDevice

__all__ = ["SimDevice"]
