//! Blocks of the README and of the book, for the tests that apply them.

use std::{fs, path::Path};

use crate::sandbox::Sandbox;

/// The checkout.
pub const CHECKOUT: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the text of a page.
pub fn page(name: &str) -> String {
    fs::read_to_string(Path::new(CHECKOUT).join(name)).unwrap()
}

/// Returns the blocks of a page in this language, in order.
pub fn blocks(name: &str, language: &str) -> Vec<String> {
    let page = page(name);
    let parts: Vec<&str> = page.split("```").collect();
    assert!(parts.len() % 2 == 1, "{name} has a block without an end");
    let inside = parts.iter().skip(1).step_by(2);
    let blocks = inside.filter_map(|block| block.split_once('\n'));
    let wanted = blocks.filter(|(of, _)| *of == language);
    wanted.map(|(_, text)| text.to_owned()).collect()
}

/// Returns a sandbox with the first spec of a page, built by the fake worker, and with the checkout's torch beside it.
pub fn built(name: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    let spec = blocks(name, "toml").remove(0);
    sandbox.write("precast.toml", spec);
    sandbox.edit("model.py", "encoder.layer.0", "bert.encoder.layer.0");
    sandbox.edit("model.py", "encoder.layer.1", "bert.encoder.layer.1");
    fs::create_dir(sandbox.path(".venv")).unwrap();
    std::os::unix::fs::symlink(crate::sandbox::LIBTORCH, sandbox.path(".venv/libtorch")).unwrap();
    sandbox.ok(&["build", "-q"]);
    sandbox
}
