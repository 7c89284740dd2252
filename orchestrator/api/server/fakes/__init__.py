"""Parts of the service in memory that `testing.py` puts together. Nothing here is imported by the daemon."""
