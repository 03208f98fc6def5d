"""What each vendor's machines are made of: files below `runners/`, rendered from the entries."""

from assay_runners.rendering.files import render_fleet, values_schema
from assay_runners.rendering.writing import find_outdated, write_rendered

__all__ = ["find_outdated", "render_fleet", "values_schema", "write_rendered"]
