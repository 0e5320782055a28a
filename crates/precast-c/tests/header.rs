//! `include/precast.h` is the header of the sources.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{fs, path::Path};

use cbindgen::{Builder, Config};

/// The sources in the order of the header.
const SOURCES: [&str; 8] = [
    "error", "tensors", "options", "runtime", "describe", "model", "outputs", "session",
];

/// After a change of a function, `UPDATE_HEADER=1 cargo test -p precast-c --test header` writes the header again.
#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut builder = Builder::new().with_config(config);
    for name in SOURCES {
        builder = builder.with_src(folder.join("src").join(name).with_extension("rs"));
    }
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let file = folder.join("include/precast.h");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        fs::write(&file, &made).unwrap();
    }
    assert_eq!(fs::read_to_string(&file).unwrap_or_default(), made);
}
