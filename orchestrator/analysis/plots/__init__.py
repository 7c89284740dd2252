"""Pictures of runs. matplotlib is imported only here, and only when a picture is drawn. Begin with ``style.py``."""
