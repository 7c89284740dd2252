"""What finished and running jobs, and files of them, tell: report, compare, estimate."""
