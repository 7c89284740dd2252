"""Charts of runs. matplotlib is imported only here, and only when a chart is drawn. Begin with ``style.py``."""
