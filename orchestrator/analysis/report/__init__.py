"""The parts of a report: text, a page, JSON, and charts. Begin with ``writing.py``."""
