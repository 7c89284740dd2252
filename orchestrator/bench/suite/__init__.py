"""`orch bench --suite training`: what a training system's documentation claims, each claim beside what is measured here.

Must not measure by itself: ``bench/rounds.py`` does. ``claims.py`` has the claims, ``quantities.py`` what they are about,
``report.py`` the text. Begin with ``training.py``.
"""
