"""Stand-in of torch_neuronx, which registers its device with torch_xla."""
