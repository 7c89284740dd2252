"""What each released version has left on disks and sends over sockets, kept for ever, and that this version reads it.

``python -m tests.released VERSION`` writes that of this version into a folder of its own; a release adds one, and changes none.
Stores of earlier versions are in ``tests/unit/store``.
"""
