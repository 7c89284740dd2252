"""HTTP application and its client."""
