"""Commands that analyse finished and running jobs, and their files: report, compare, estimate."""
