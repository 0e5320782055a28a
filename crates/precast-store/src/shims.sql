-- Version 3 of the index: the objects that a release needs beside its programs and weights, those of its shims.
CREATE TABLE release_objects (
    model  TEXT NOT NULL,
    seq    INTEGER NOT NULL,
    object BLOB NOT NULL,
    PRIMARY KEY (model, seq, object),
    FOREIGN KEY (model, seq) REFERENCES releases(model, seq) ON DELETE CASCADE
) WITHOUT ROWID, STRICT;
CREATE INDEX release_of_object ON release_objects(object);
