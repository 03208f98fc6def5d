"""The files below `runners/` that describe each vendor's machines, rendered from the entries."""

from assay_runners.rendering.files import render_fleet
from assay_runners.rendering.writing import find_outdated, write_rendered

__all__ = ["find_outdated", "render_fleet", "write_rendered"]
