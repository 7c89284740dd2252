"""`orch bench --suite training`: compares the claims of a training system's documentation with measurements made here.

Must not measure by itself: ``bench/rounds.py`` does. ``claims.py`` has the claims, ``quantities.py`` the quantities that
they are about, ``report.py`` the text. Begin with ``training.py``.
"""
