"""The formats by `quantization_config.quant_method` of a model's config.json."""

from assay.errors import UsageError
from assay.foreign_text import shorten
from assay.models.quantization.formats import bitsandbytes, fp8
from assay.models.quantization.formats.compressed_tensors import COMPRESSED_TENSORS
from assay.models.quantization.formats.packed_int32 import AWQ, GPTQ
from assay.models.quantization.formats.protocol import Format
from assay.models.quantization.stored import StoredWeights

_FORMATS: dict[str, tuple[Format, ...]] = {
    "awq": (AWQ,),
    "bitsandbytes": (bitsandbytes.FOUR_BITS, bitsandbytes.INT8),
    "compressed-tensors": (COMPRESSED_TENSORS,),
    "fbgemm_fp8": (fp8.ROWS,),
    "fp8": (fp8.BLOCKS,),
    "gptq": (GPTQ,),
}


def has_known_format(stored: StoredWeights) -> bool:
    """Return True if `formats_of` knows the quantization method."""
    return str(stored.quantization.get("quant_method")) in _FORMATS


def formats_of(stored: StoredWeights) -> tuple[Format, ...]:
    """Return the formats in which weights may be stored; none if they are not quantized.

    Raises: UsageError for a method that is not known.
    """
    method = stored.quantization.get("quant_method")
    if not stored.quantization:
        return ()
    if not has_known_format(stored):
        raise UsageError(
            f"{stored.origin}: the quantization method {shorten(method)} cannot be read;"
            f" known methods: {', '.join(_FORMATS)}"
        )
    return _FORMATS[str(method)]
