"""Modules that the fork server of the worlds imports once for all ranks."""

from assay_smoke.cases.settings import is_deepspeed
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.rules import HOST

EVERY_CASE = f"{__name__}.every_case"


def preload_for(case: Case, trainer: str, device: str) -> tuple[str, ...]:
    """Return the modules to preload. device: as in a RUN.

    Libraries that may open a device are preloaded only for the host: a fork cannot use a device that its
    parent opened.
    """
    modules = [EVERY_CASE]
    if device == HOST and "compile" in case.features:
        modules.append(f"{__name__}.compiler")
    if device == HOST and is_deepspeed(trainer):
        modules.append(f"{__name__}.deepspeed_on_host")
    return tuple(modules)
