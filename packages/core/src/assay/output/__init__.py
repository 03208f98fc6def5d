"""Output of text to a terminal, a log or a page. Foreign text is escaped here.

No other package of assay prints, opens a `rich` console or makes a `jinja2` environment for pages.
"""
