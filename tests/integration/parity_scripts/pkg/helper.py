"""Imported relatively."""

import sys

WHO = "helper"


def child(queue):
    """Runs in a spawned process: what `__main__` is there, and which arguments it has."""
    queue.put([__name__, sys.modules["__main__"].__name__, sys.argv[2:]])
