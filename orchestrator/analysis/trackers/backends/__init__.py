"""One module for each tracker's library; ``port.py`` defines their common interface."""
