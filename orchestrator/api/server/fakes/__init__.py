"""Parts of the in-memory service that `testing.py` combines. The daemon imports none of them."""
