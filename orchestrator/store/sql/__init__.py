"""The record as rows of SQLite: schema and migrations, named statements, what is asked and written on one connection.

No thread and no lock here: ``store/sqlite.py`` has them. Begin with ``work.py`` and ``queries.py``; the SQL is in ``queries.sql``.
"""
