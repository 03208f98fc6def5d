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
# The names of their devices in torch.
_DEVICES = {
    "nvidia": "cuda",
    "amd": "cuda",
    "intel": "xpu",
    "gaudi": "hpu",
    "spyre": "spyre",
    "trainium": "xla",
    "ascend": "npu",
    "apple": "mps",
}
_VENDORS = {other: vendor for vendor, others in _ALSO_CALLED.items() for other in others}


def find_vendor_name(name: str) -> str:
    """Return the vendor that is also called `name`; otherwise `name`."""
    return _VENDORS.get(name, name)


def suggest_device(name: str) -> str:
    """Say which device to write instead of another name of its vendor; "" if no vendor has the name."""
    vendor = find_vendor_name(name)
    device = _DEVICES.get(vendor)
    return f"write {device}, the name in torch for devices of {vendor}" if device else ""
