"""What a report consists of: text, a page, JSON, and the pictures beside them. Begin with ``writing.py``."""
