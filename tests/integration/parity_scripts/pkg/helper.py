"""Module that is imported relatively."""

import sys

WHO = "helper"


def child(queue):
    """Report the names of this module and of `__main__`, and the arguments, in a spawned process."""
    queue.put([__name__, sys.modules["__main__"].__name__, sys.argv[2:]])
