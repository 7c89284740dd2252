"""The store as rows of SQLite: `requests.py` reads and writes them, `schema.py` opens, checks and migrates the file."""
