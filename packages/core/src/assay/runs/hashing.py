"""The environment of every process, in which equal names have equal hashes.

Sets of names are then walked in one order by all processes. transformers makes one rotary table for
each kind of layer in a set of them, and calls of a module are matched by their number.
"""

SAME_HASHES = {"PYTHONHASHSEED": "0"}
