-- What is held against a node or a GPU, as JSON: strikes, why it is avoided, who has cordoned it. No row: nothing.
CREATE TABLE places (
    kind TEXT NOT NULL,  -- node or gpu
    name TEXT NOT NULL,  -- a node's id, a GPU's UUID
    body TEXT NOT NULL,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
