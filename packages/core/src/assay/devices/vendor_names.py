"""Other names of vendors, which people write in labels of pull requests and in options."""

_ALSO_CALLED = {
    "nvidia": ("cuda", "gpu", "h100", "h200", "a100"),
    "amd": ("rocm", "hip", "mi300", "mi300x"),
    "intel": ("xpu",),
    "gaudi": ("hpu", "habana"),
    "spyre": ("aiu", "ibm"),
    "trainium": ("neuron", "trn", "aws"),
    "ascend": ("npu", "huawei"),
    "apple": ("mps", "mac"),
}
_VENDORS = {other: vendor for vendor, others in _ALSO_CALLED.items() for other in others}


def find_vendor_name(name: str) -> str:
    """Return the vendor that is also called `name`; otherwise `name`."""
    return _VENDORS.get(name, name)
