-- Web hooks that are still to be told of a transition; written with the transition, gone when told or given up.
CREATE TABLE notices (
    number   INTEGER PRIMARY KEY AUTOINCREMENT,  -- names the delivery to the receiver; never used twice
    job      TEXT    NOT NULL,
    url      TEXT    NOT NULL,
    body     TEXT    NOT NULL,                   -- JSON, as it is sent
    made_at  REAL    NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at  REAL    NOT NULL
);

CREATE INDEX notices_due ON notices (next_at);
