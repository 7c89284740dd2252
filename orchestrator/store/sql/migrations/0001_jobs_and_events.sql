-- Jobs as the fold of their events. `record` is the whole job as JSON; the other columns repeat what is searched for.
CREATE TABLE jobs (
    sequence        INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of arrival; never used twice, pruned or not
    id              TEXT    NOT NULL UNIQUE,
    version         INTEGER NOT NULL,                   -- number of the last event; compare-and-swap
    name            TEXT    NOT NULL,
    user            TEXT    NOT NULL,
    uid             INTEGER NOT NULL,
    idempotency_key TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    submitted_at    REAL    NOT NULL,                   -- seconds since the epoch, as every time here
    ended_at        REAL,                               -- set exactly when the state is terminal
    record          TEXT    NOT NULL
);

-- A lost reply never submits twice.
CREATE UNIQUE INDEX jobs_by_key ON jobs (uid, idempotency_key) WHERE idempotency_key <> '';

-- The live jobs, however many have finished.
CREATE INDEX jobs_live ON jobs (sequence) WHERE ended_at IS NULL;

-- What `orch prune` looks through.
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;

-- The newest jobs of a name and a user, of a user, in a state, since a time.
CREATE INDEX jobs_by_name ON jobs (name, uid, sequence);
CREATE INDEX jobs_by_user ON jobs (user, sequence);
CREATE INDEX jobs_by_state ON jobs (state, sequence);
CREATE INDEX jobs_by_time ON jobs (submitted_at, sequence);

-- Everything that happened to a job; number 1 is its submission. Rows of one job lie together.
CREATE TABLE events (
    job    INTEGER NOT NULL REFERENCES jobs (sequence) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    kind   TEXT    NOT NULL,
    at     REAL    NOT NULL,
    cause  TEXT    NOT NULL,
    body   TEXT    NOT NULL,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
