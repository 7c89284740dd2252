"""job.yaml and settings: converts text from outside to typed values, or reports every error at once."""
