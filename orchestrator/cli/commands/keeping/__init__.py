"""Commands that back up and restore the store."""
