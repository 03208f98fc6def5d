"""Traces behind URLs of fsspec: `writing` uploads a local spool, `reading` makes a local copy."""
