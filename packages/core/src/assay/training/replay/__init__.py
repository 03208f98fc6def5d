"""Observes training steps from outside, and replays them from the reference's values."""
