"""What machines are made of: containers, pods, scale sets, units; all from their entries."""

from assay_runners.rendering.files import find_outdated, render_fleet, write_rendered

__all__ = ["find_outdated", "render_fleet", "write_rendered"]
