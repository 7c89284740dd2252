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
    record          TEXT    NOT NULL,
    matrix          TEXT,                               -- the matrix that the job is one combination of: its id,
    matrix_name     TEXT                                -- and its name
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
CREATE INDEX jobs_by_matrix ON jobs (matrix, sequence) WHERE matrix IS NOT NULL;
CREATE INDEX jobs_by_matrix_name ON jobs (matrix_name, uid, sequence) WHERE matrix_name IS NOT NULL;

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

-- How many jobs ended, by queue, state and failure class ('' for none): a total that pruning does not lower.
CREATE TABLE finished (
    queue         TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    failure_class TEXT    NOT NULL,
    count         INTEGER NOT NULL,
    PRIMARY KEY (queue, state, failure_class)
) WITHOUT ROWID;

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

-- What is held against a node or a GPU, as JSON: strikes, why it is avoided, who has cordoned it. No row: nothing.
CREATE TABLE places (
    kind TEXT NOT NULL,  -- node or gpu
    name TEXT NOT NULL,  -- a node's id, a GPU's UUID
    body TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;

-- Jobs that ended and whose secrets, pages and snapshots may still lie on the daemon's machine; written with the end.
CREATE TABLE untidied (
    job INTEGER PRIMARY KEY REFERENCES jobs (sequence) ON DELETE CASCADE
);

-- Changes of queues by `orch queue set`, in their order: the queue as JSON as it is from then on, who changed it, and when.
CREATE TABLE queue_changes (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    body TEXT NOT NULL,
    changed_by TEXT NOT NULL,
    changed_at REAL NOT NULL
);

-- The daemon's clock, one row: with it the next daemon knows how far the wall clock has stepped meanwhile.
CREATE TABLE clock (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    boot    TEXT NOT NULL,  -- the machine's boot from which `elapsed` counts
    elapsed REAL NOT NULL,  -- seconds
    at      REAL NOT NULL   -- the clock's time then
);
