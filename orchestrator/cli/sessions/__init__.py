"""The terminal's half of a session beside a rank: sends the input, shows the output. Begin with ``terminal.py``."""
