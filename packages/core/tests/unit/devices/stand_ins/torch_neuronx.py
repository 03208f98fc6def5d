"""Stand-in of torch_neuronx, which registers its device with torch_xla."""

from situation import act  # type: ignore[import-not-found] # beside it on the path

act("torch_neuronx")
