-- Every statement of the store. One name, one sentence, one statement.

-- name: insert_job
-- Accept a job.
INSERT INTO jobs (sequence, id, version, name, user, uid, idempotency_key, state, submitted_at, ended_at, record,
                  matrix, matrix_name)
VALUES (:sequence, :id, :version, :name, :user, :uid, :idempotency_key, :state, :submitted_at, :ended_at, :record,
        :matrix, :matrix_name);

-- name: update_job
-- Replace a job's record, if it is still at the version that was read.
UPDATE jobs SET version = :version, state = :state, ended_at = :ended_at, record = :record
WHERE id = :id AND version = :read_version;

-- name: insert_event
-- Write down what happened.
INSERT INTO events (job, number, kind, at, cause, body) VALUES (?, ?, ?, ?, ?, ?);

-- name: count_finished
-- One more job ended.
INSERT INTO finished (queue, state, failure_class, count) VALUES (?, ?, ?, 1)
ON CONFLICT (queue, state, failure_class) DO UPDATE SET count = count + 1;

-- name: last_sequence
-- The place of the newest arrival, pruned ones included.
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'jobs';

-- name: job_by_id
-- One job.
SELECT id, version, record FROM jobs WHERE id = ?;

-- name: job_by_key
-- The job that an idempotency key stands for.
SELECT id, version, record FROM jobs WHERE uid = ? AND idempotency_key = ? AND idempotency_key <> '';

-- name: newest_by_name
-- A user's newest job of a name.
SELECT id, version, record FROM jobs WHERE name = ? AND uid = ? ORDER BY sequence DESC LIMIT 1;

-- name: count_by_name
-- How many jobs of a user bear a name.
SELECT count(*) FROM jobs WHERE name = ? AND uid = ?;

-- name: uids_by_name
-- The users with a job of a name.
SELECT DISTINCT uid FROM jobs WHERE name = ?;

-- name: uids_by_matrix_name
-- The users with a matrix of a name.
SELECT DISTINCT uid FROM jobs WHERE matrix_name = ?;

-- name: uid_of_user
-- The user of a name, as of the newest job.
SELECT uid FROM jobs WHERE user = ? ORDER BY sequence DESC LIMIT 1;

-- name: ids_by_prefix
-- Ids from a prefix up to an end that no id with the prefix reaches.
SELECT id FROM jobs WHERE id >= ? AND id < ? ORDER BY id LIMIT 20;

-- name: jobs_of_matrix
-- The jobs of a matrix, reruns included, in order of arrival.
SELECT id, version, record FROM jobs WHERE matrix = ? ORDER BY sequence;

-- name: newest_of_matrix_name
-- The newest job of a user's matrices of a name.
SELECT sequence, matrix, user FROM jobs WHERE matrix_name = ? AND uid = ? ORDER BY sequence DESC LIMIT 1;

-- name: newest_place_by_name
-- The place of a user's newest job of a name.
SELECT sequence, id, user FROM jobs WHERE name = ? AND uid = ? ORDER BY sequence DESC LIMIT 1;

-- name: matrices_by_prefix
-- Matrices whose ids lie between a prefix and an end that no id with the prefix reaches.
SELECT DISTINCT matrix FROM jobs WHERE matrix >= ? AND matrix < ? ORDER BY matrix LIMIT 20;

-- name: live_jobs
-- Every job that is not terminal, in order of arrival.
SELECT id, version, record FROM jobs WHERE ended_at IS NULL ORDER BY sequence;

-- name: first_since
-- The earliest place among jobs submitted since a time; the plus sign keeps SQLite from walking the places instead.
SELECT min(+sequence) FROM jobs WHERE submitted_at >= ?;

-- name: select_jobs
-- Jobs in a range of places, newest first.
SELECT sequence, id, version, record FROM jobs
WHERE sequence >= :first AND sequence < :before AND submitted_at >= :since
ORDER BY sequence DESC LIMIT :limit;

-- name: select_jobs_of_user
-- The same for one user, through its index.
SELECT sequence, id, version, record FROM jobs
WHERE user = :user AND sequence >= :first AND sequence < :before AND submitted_at >= :since
ORDER BY sequence DESC LIMIT :limit;

-- name: select_jobs_in_state
-- The same for one state and perhaps one user, through the state's index.
SELECT sequence, id, version, record FROM jobs
WHERE state = :state AND sequence >= :first AND sequence < :before AND submitted_at >= :since
  AND (:user IS NULL OR user = :user)
ORDER BY sequence DESC LIMIT :limit;

-- name: events_of
-- What happened to a job after a number, oldest first.
SELECT number, kind, at, cause, body FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?;

-- name: sequence_of
-- A job's place, by its id.
SELECT sequence FROM jobs WHERE id = ?;

-- name: count_states
-- Jobs by state.
SELECT state, count(*) FROM jobs GROUP BY state;

-- name: finished_counts
-- Totals of jobs that ended.
SELECT queue, state, failure_class, count FROM finished ORDER BY queue, state, failure_class;

-- name: ended_before
-- Terminal jobs that ended before a time but those of a JSON list of ids, the oldest first.
SELECT sequence, id FROM jobs
WHERE ended_at IS NOT NULL AND ended_at < ? AND id NOT IN (SELECT value FROM json_each(?))
ORDER BY ended_at, sequence LIMIT ?;

-- name: delete_job
-- Forget a terminal job; its events go with it.
DELETE FROM jobs WHERE sequence = ? AND ended_at IS NOT NULL;

-- name: records_after
-- Every record, page by page, to find damaged ones.
SELECT sequence, id, version, record FROM jobs WHERE sequence > ? ORDER BY sequence LIMIT ?;

-- name: archives
-- Every job's archive, as its record has it; NULL where the record is damaged.
SELECT id, CASE WHEN json_valid(record) THEN json_extract(record, '$.submission.snapshot') END FROM jobs;

-- name: all_jobs
-- Every row, for verification.
SELECT sequence, id, version, name, user, uid, idempotency_key, state, submitted_at, ended_at, record,
       matrix, matrix_name
FROM jobs WHERE sequence > ? ORDER BY sequence LIMIT ?;

-- name: insert_notice
-- A web hook is to be told of a transition.
INSERT INTO notices (job, url, body, made_at, next_at) VALUES (?, ?, ?, ?, ?);

-- name: due_notices
-- What is to be told by now, the longest waiting first: so many of each receiver, the URL up to its path.
SELECT number, job, url, body, made_at, attempts FROM (
    SELECT *, row_number() OVER (
        PARTITION BY substr(url, 1, instr(substr(url || '/', 9), '/') + 7) ORDER BY next_at, number
    ) AS place FROM notices WHERE next_at <= ?
) WHERE place <= ? ORDER BY next_at, number;

-- name: next_notice
-- When the next one becomes due.
SELECT min(next_at) FROM notices WHERE next_at > ?;

-- name: delete_notice
-- It was told, or given up.
DELETE FROM notices WHERE number = ?;

-- name: delay_notice
-- It could not be told: again later.
UPDATE notices SET attempts = attempts + 1, next_at = ? WHERE number = ?;

-- name: move_notices
-- The daemon's clock has moved, and what is due by it.
UPDATE notices SET next_at = next_at + ?;

-- name: clock
-- The newest reading of the daemon's clock.
SELECT boot, elapsed, at FROM clock;

-- name: put_clock
-- A newer one.
INSERT INTO clock (one, boot, elapsed, at) VALUES (1, ?, ?, ?)
ON CONFLICT (one) DO UPDATE SET boot = excluded.boot, elapsed = excluded.elapsed, at = excluded.at;

-- name: all_places
-- What is held against nodes and GPUs.
SELECT kind, name, body FROM places ORDER BY kind, name;

-- name: put_place
-- What is held against one from now on.
INSERT INTO places (kind, name, body) VALUES (?, ?, ?)
ON CONFLICT (kind, name) DO UPDATE SET body = excluded.body;

-- name: delete_place
-- It is trusted again.
DELETE FROM places WHERE kind = ? AND name = ?;

-- name: all_queue_changes
-- Changes of queues, the oldest first.
SELECT name, body, changed_by, changed_at FROM queue_changes ORDER BY number;

-- name: insert_queue_change
-- A queue is so from now on.
INSERT INTO queue_changes (name, body, changed_by, changed_at) VALUES (?, ?, ?, ?);

-- name: insert_untidied
-- What a job left behind is to be removed.
INSERT OR IGNORE INTO untidied (job) VALUES (?);

-- name: all_untidied
-- Jobs that ended and were not tidied, in order of arrival.
SELECT jobs.id FROM untidied JOIN jobs ON jobs.sequence = untidied.job ORDER BY untidied.job;

-- name: delete_untidied
-- Nothing of it is left.
DELETE FROM untidied WHERE job = (SELECT sequence FROM jobs WHERE id = ?);
