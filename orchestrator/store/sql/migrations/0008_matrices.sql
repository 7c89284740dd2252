-- The matrix that a job is one combination of: its id, and its name.
ALTER TABLE jobs ADD COLUMN matrix TEXT;
ALTER TABLE jobs ADD COLUMN matrix_name TEXT;

CREATE INDEX jobs_by_matrix ON jobs (matrix, sequence) WHERE matrix IS NOT NULL;
CREATE INDEX jobs_by_matrix_name ON jobs (matrix_name, uid, sequence) WHERE matrix_name IS NOT NULL;
