-- The tables of the index. Every `sum` is a check sum over all columns before it, every `links` one over the references of
-- the row in the table that follows.
CREATE TABLE objects (
    digest  BLOB PRIMARY KEY,
    size    INTEGER NOT NULL,            -- bytes of content
    stored  INTEGER NOT NULL,            -- bytes of the file
    created INTEGER NOT NULL,            -- seconds since 1970
    sum     INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

CREATE TABLE artifacts (
    id      BLOB PRIMARY KEY,
    seal    BLOB NOT NULL,               -- of the record's file
    size    INTEGER NOT NULL,            -- bytes of the shared object
    target  TEXT NOT NULL,
    device  TEXT NOT NULL,
    created INTEGER NOT NULL,
    links   INTEGER NOT NULL,
    sum     INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

CREATE TABLE artifact_objects (
    artifact BLOB NOT NULL REFERENCES artifacts(id) ON DELETE CASCADE,
    object   BLOB NOT NULL,
    PRIMARY KEY (artifact, object)
) WITHOUT ROWID, STRICT;
CREATE INDEX artifact_of_object ON artifact_objects(object);

CREATE TABLE programs (
    id      BLOB PRIMARY KEY,
    seal    BLOB NOT NULL,
    model   TEXT NOT NULL,
    module  TEXT NOT NULL,
    bucket  TEXT NOT NULL,
    target  TEXT NOT NULL,
    device  TEXT NOT NULL,
    steps   INTEGER NOT NULL,
    created INTEGER NOT NULL,
    links   INTEGER NOT NULL,
    sum     INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX program_by_name ON programs(model, module, bucket, id);

CREATE TABLE program_artifacts (
    program  BLOB NOT NULL REFERENCES programs(id) ON DELETE CASCADE,
    artifact BLOB NOT NULL,
    PRIMARY KEY (program, artifact)
) WITHOUT ROWID, STRICT;
CREATE INDEX program_of_artifact ON program_artifacts(artifact);

CREATE TABLE releases (
    model   TEXT NOT NULL,
    seq     INTEGER NOT NULL,
    name    TEXT,
    seal    BLOB NOT NULL,
    weights BLOB,
    created INTEGER NOT NULL,
    partial INTEGER NOT NULL,            -- 1 for a release that is never the newest one
    links   INTEGER NOT NULL,
    sum     INTEGER NOT NULL,
    PRIMARY KEY (model, seq)
) WITHOUT ROWID, STRICT;

CREATE TABLE release_programs (
    model   TEXT NOT NULL,
    seq     INTEGER NOT NULL,
    program BLOB NOT NULL,
    PRIMARY KEY (model, seq, program),
    FOREIGN KEY (model, seq) REFERENCES releases(model, seq) ON DELETE CASCADE
) WITHOUT ROWID, STRICT;
CREATE INDEX release_of_program ON release_programs(program);

-- The objects of a release's shims.
CREATE TABLE release_objects (
    model  TEXT NOT NULL,
    seq    INTEGER NOT NULL,
    object BLOB NOT NULL,
    PRIMARY KEY (model, seq, object),
    FOREIGN KEY (model, seq) REFERENCES releases(model, seq) ON DELETE CASCADE
) WITHOUT ROWID, STRICT;
CREATE INDEX release_of_object ON release_objects(object);

CREATE TABLE failures (
    id      BLOB PRIMARY KEY,
    seal    BLOB NOT NULL,
    log     BLOB,
    created INTEGER NOT NULL,
    sum     INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

-- When a thing was last used. History, not truth: it is lost with the index.
CREATE TABLE uses (
    id  BLOB PRIMARY KEY,
    at  INTEGER NOT NULL,
    sum INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

-- What gc has decided to delete, until its bytes are gone.
CREATE TABLE marked (
    kind TEXT NOT NULL,
    id   BLOB NOT NULL,
    PRIMARY KEY (kind, id)
) WITHOUT ROWID, STRICT;
