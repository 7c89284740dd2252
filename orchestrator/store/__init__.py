"""The store, in SQLite: the only package with SQL."""
