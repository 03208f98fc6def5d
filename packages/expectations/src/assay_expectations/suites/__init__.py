"""Suites of tests that people run on their devices: `pytest --pyargs assay_expectations.suites`."""
