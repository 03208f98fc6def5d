"""What the fork server of the worlds imports once, so that no rank of a case has to."""

from assay_smoke.cases.settings import is_deepspeed
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.vendors import HOST

EVERY_CASE = f"{__name__}.every_case"


def preload_for(case: Case, trainer: str, device: str) -> tuple[str, ...]:
    """The modules to preload; `device`: as in a RUN.

    A library that may open a device where it finds one is left to the ranks everywhere but on the
    host: a fork cannot use what was opened before it.
    """
    modules = [EVERY_CASE]
    if device == HOST and "compile" in case.features:
        modules.append(f"{__name__}.compiler")
    if device == HOST and is_deepspeed(trainer):
        modules.append(f"{__name__}.deepspeed_on_host")
    return tuple(modules)
