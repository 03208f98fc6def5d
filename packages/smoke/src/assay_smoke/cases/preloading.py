"""Modules that the fork server of the worlds imports once for all ranks."""

from assay_smoke.cases.settings import is_deepspeed
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.rules import HOST

EVERY_CASE = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by all decoders
    "assay_smoke.cases.worlds",
    "assay_smoke.cases.reading",
)


def preload_for(case: Case, trainer: str, device: str) -> tuple[str, ...]:
    """Return the modules to preload. device: as in a RUN.

    Libraries that may open a device are preloaded only for the host: a fork cannot use a device that its
    parent opened.
    """
    modules = [*EVERY_CASE]
    if device == HOST and "compile" in case.features:
        modules.append("torch._inductor.compile_fx")
    if device == HOST and is_deepspeed(trainer):
        modules.append("assay_smoke.cases.preloaded_deepspeed")
    return tuple(modules)
