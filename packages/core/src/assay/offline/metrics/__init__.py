"""Metrics of single pairs of tensors, published and custom, and the table that lists them."""
