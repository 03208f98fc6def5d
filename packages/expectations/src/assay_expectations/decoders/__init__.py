"""Whether decoders generate on a device as on the reference, over many shapes of inputs."""
