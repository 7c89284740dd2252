"""The terminal's half of a session beside a rank: what is typed goes there, what comes back is shown. Begin at ``terminal.py``."""
