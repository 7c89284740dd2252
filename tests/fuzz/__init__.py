"""Fuzzing of every reader of bytes that a rank, a user or the network can write: ``python -m tests.fuzz``.

A reader (``reader.py``) takes any bytes and raises only where there is a defect. ``inputs.py`` makes bytes for Hypothesis,
``guided.py`` runs atheris to find new paths, ``corpus/`` keeps each input that was a defect. ``test_readers.py`` is the short form.
"""
