"""The durable record: SQLite; the only place with SQL."""
