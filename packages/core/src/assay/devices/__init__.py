"""Devices: which ones this machine has, and one adapter for each kind.

A vendor needs one file: a class that implements the `assay.devices.base.Device` protocol,
registered under the entry-point group `assay.devices`.
"""
