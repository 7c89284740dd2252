-- The daemon's clock, one row: with it the next daemon knows how far the wall clock has stepped meanwhile.
CREATE TABLE clock (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    boot    TEXT NOT NULL,  -- the machine's boot from which `elapsed` counts
    elapsed REAL NOT NULL,  -- seconds
    at      REAL NOT NULL   -- the clock's time then
);
