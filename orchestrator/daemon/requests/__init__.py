"""What the API asks about jobs, one part per kind of request; ``daemon/service.py`` puts them together.

Each part takes the loop, the store and functions of others; none knows the cluster. Begin with ``submissions.py``.
"""
