"""Commands that open a session beside a rank of a running job."""
