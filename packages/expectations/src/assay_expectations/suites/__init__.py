"""Test suites for devices: `pytest --pyargs assay_expectations.suites`."""
