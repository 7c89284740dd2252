"""Reports of jobs that have ended, written by processes of their own."""
