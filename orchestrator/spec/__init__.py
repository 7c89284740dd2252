"""job.yaml and settings: text from outside becomes typed values, or every error at once."""
