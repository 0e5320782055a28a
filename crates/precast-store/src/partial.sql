-- Version 2 of the index: a partial release is nobody's newest one.
ALTER TABLE releases ADD COLUMN partial INTEGER NOT NULL DEFAULT 0;
