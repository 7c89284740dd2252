"""structlog set-up; the daemon's own collectors."""
