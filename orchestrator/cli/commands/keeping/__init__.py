"""Commands that keep the record: copies of it, and the way back."""
