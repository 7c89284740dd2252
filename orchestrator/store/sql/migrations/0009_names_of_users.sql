-- A name means a user's own newest job or matrix.
DROP INDEX jobs_by_name;
CREATE INDEX jobs_by_name ON jobs (name, uid, sequence);
DROP INDEX jobs_by_matrix_name;
CREATE INDEX jobs_by_matrix_name ON jobs (matrix_name, uid, sequence) WHERE matrix_name IS NOT NULL;
