"""`orch top`: a live view of GPUs, jobs and processes. Needs the extra `top` (Textual)."""
