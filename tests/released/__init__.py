"""Files and messages of each released version, which are kept for ever; the tests check that this version reads them.

``python -m tests.released VERSION`` writes those of this version into a new folder; a release adds one, and changes none.
Stores of earlier versions are in ``tests/unit/store``.
"""
