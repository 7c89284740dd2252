-- Changes of queues by `orch queue set`, in their order: the queue as JSON as it is from then on, who changed it, and when.
CREATE TABLE queue_changes (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    body TEXT NOT NULL,
    changed_by TEXT NOT NULL,
    changed_at REAL NOT NULL
);
