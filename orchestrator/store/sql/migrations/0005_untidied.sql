-- Jobs that ended and whose secrets, pages and snapshots may still lie on the daemon's machine; written with the end.
CREATE TABLE untidied (
    job INTEGER PRIMARY KEY REFERENCES jobs (sequence) ON DELETE CASCADE
);

-- Earlier versions tidied once and kept no account of it: all that ended is looked at again.
INSERT INTO untidied (job) SELECT sequence FROM jobs WHERE ended_at IS NOT NULL;
