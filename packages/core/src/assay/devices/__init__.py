"""Devices: what this machine has, and how a run is made on each of them.

A vendor is one file: a class that keeps the `assay.devices.base.Device` protocol, registered
under the entry-point group `assay.devices`.
"""
