-- How many jobs ended, by queue, state and failure class ('' for none): a total that pruning does not lower.
CREATE TABLE finished (
    queue         TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    failure_class TEXT    NOT NULL,
    count         INTEGER NOT NULL,
    PRIMARY KEY (queue, state, failure_class)
) WITHOUT ROWID;

-- Jobs that ended before there were totals.
INSERT INTO finished (queue, state, failure_class, count)
SELECT
    json_extract(record, '$.spec.queue'),
    state,
    coalesce(json_extract(record, '$.failure.failure_class'), ''),
    count(*)
FROM jobs
WHERE ended_at IS NOT NULL
GROUP BY 1, 2, 3;
