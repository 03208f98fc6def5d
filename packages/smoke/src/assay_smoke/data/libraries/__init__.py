"""Code of installed libraries, in the protocols of users' code."""
