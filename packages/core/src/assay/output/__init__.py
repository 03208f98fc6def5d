"""Where text leaves for a terminal, a log or a page. What others wrote is escaped on its way.

Nothing else in assay prints, opens a `rich` console or makes a `jinja2` environment for pages.
"""
