"""The store as rows of SQLite: schema and migrations, named statements, reads and writes on one connection.

No thread and no lock here: ``store/sqlite.py`` has them. Begin with ``work.py`` and ``queries.py``; the SQL is in ``queries.sql``.
"""
