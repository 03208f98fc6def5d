"""Output of text to a terminal, a log or a page, with foreign text escaped.

Only this package prints, opens a `rich` console or makes a `jinja2` environment for pages.
"""
