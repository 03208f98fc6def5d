"""How the weights of the micro models are made: `assay models build`."""
