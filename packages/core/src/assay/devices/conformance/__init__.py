"""Tests that an adapter implements the device protocol.

Run as `pytest --pyargs assay.devices.conformance --assay-device npu/bfloat16`.
"""
