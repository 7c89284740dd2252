"""The peers' side: what their users would write."""
