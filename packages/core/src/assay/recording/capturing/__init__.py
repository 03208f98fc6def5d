"""The parts of a running capture: choosing passes, copying tensors, writing in the background."""
