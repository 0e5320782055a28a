//! The modules of each crate form layers: the first page of the crate (`lib.rs`) lists them under `## Layers`, and a
//! module uses modules of earlier lines only.
//!
//! Items of `lib.rs` itself, such as `Store`, may be used by all modules; tests may use everything.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// A path in the code, by its parts.
type Parts = Vec<String>;

#[test]
fn modules_use_those_of_lower_layers_only() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    let mut wrong = Vec::new();
    for entry in fs::read_dir(crates).unwrap() {
        let source = entry.unwrap().path().join("src");
        let lib = fs::read_to_string(source.join("lib.rs")).unwrap();
        let name = source.display();
        let layers = layers(&lib);
        let (modules, exported) = modules(&lib);
        for module in &modules {
            if !layers.contains_key(module) {
                wrong.push(format!("{name}: `{module}` is in no layer of lib.rs"));
            }
        }
        for module in layers.keys().filter(|module| !modules.contains(*module)) {
            wrong.push(format!("{name}: there is no module `{module}`"));
        }
        for file in files(&source) {
            let place = place(file.strip_prefix(&source).unwrap());
            let Some(user) = place.first().filter(|user| layers.contains_key(*user)) else {
                continue;
            };
            for path in paths(&fs::read_to_string(&file).unwrap(), &place) {
                let used = exported.get(&path[0]).unwrap_or(&path[0]);
                let (Some(own), Some(other)) = (layers.get(user), layers.get(used)) else {
                    continue;
                };
                if used != user && other >= own {
                    wrong.push(format!(
                        "{name}: `{user}` uses `{used}`, in {}",
                        file.display()
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_names_at_the_root_of_the_runtime_are_few_and_on_a_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let lib = fs::read_to_string(root.join("crates/precast-runtime/src/lib.rs")).unwrap();
    let names = names(&lib);
    assert!(
        (10..=25).contains(&names.len()),
        "{}: {names:?}",
        names.len()
    );
    let page = fs::read_to_string(root.join("docs/src/reference/library.md")).unwrap();
    let spans: BTreeSet<&str> = page.split('`').skip(1).step_by(2).collect();
    let missing = names.iter().filter(|name| !spans.contains(name.as_str()));
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
}

/// Returns the public names at the root of a crate, but hidden ones.
fn names(lib: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let shown = lib.replace("#[doc(hidden)]\npub ", "");
    for item in shown.split("\npub ").skip(1) {
        match item.strip_prefix("use ") {
            Some(tree) => {
                let paths = expand(tree.split(';').next().unwrap());
                names.extend(paths.iter().map(|path| path.last().unwrap().clone()));
            }
            None => {
                let name = item.split_whitespace().nth(1).unwrap();
                names.insert(name.trim_end_matches(';').to_owned());
            }
        }
    }
    names
}

#[test]
fn public_names_are_found() {
    let lib = "mod a;\npub mod b;\n/// Text.\npub mod c {\n    pub use crate::a::X;\n}\n#[doc(hidden)]\npub mod d {\n}\n\
               pub use a::{\n    Y,\n    W,\n};\npub use store::V;\n";
    let found: Vec<_> = names(lib).into_iter().collect();
    assert_eq!(found, ["V", "W", "Y", "b", "c"]);
}

#[test]
fn used_paths_are_found() {
    let code = "use super::{\n    gc::{Plan, Reason},\n    now,\n};\nuse crate::record::*;\n// crate::comment\n\
                fn f() { super::rows::g(); }\n#[cfg(test)]\nmod tests {\n    use crate::testing;\n}\n";
    let found = paths(code, &["sweep".to_owned()]);
    let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
    assert_eq!(
        found,
        ["gc::Plan", "gc::Reason", "now", "record::*", "rows::g"]
    );
    let layers = layers("//! ## Layers\n//!\n//! ```text\n//! a, b\n//! c, d\n//! ```\n");
    assert_eq!((layers["b"], layers["d"]), (0, 1));
}

/// Returns the layer of each module, as its line in the essay.
fn layers(lib: &str) -> BTreeMap<String, usize> {
    let block = lib.split("//! ## Layers").nth(1).unwrap_or_default();
    let block = block.split("//! ```").nth(1).unwrap_or_default();
    let mut layers = BTreeMap::new();
    for (at, line) in block.lines().skip(1).enumerate() {
        let line = line.trim_start_matches("//!").trim();
        for module in line.split(", ") {
            layers.insert(module.to_owned(), at);
        }
    }
    layers
}

/// Returns the modules of a crate but those of tests, and which of them has each name that `lib.rs` exports.
fn modules(lib: &str) -> (BTreeSet<String>, BTreeMap<String, String>) {
    let declared = |line: &str| {
        let (_, name) = line.trim_end().strip_suffix(';')?.rsplit_once("mod ")?;
        (!line.starts_with("//") && name != "testing").then(|| name.to_owned())
    };
    let modules: BTreeSet<String> = lib.lines().filter_map(declared).collect();
    let mut exported = BTreeMap::new();
    for statement in lib.split("pub use ").skip(1) {
        for mut path in expand(statement.split(';').next().unwrap()) {
            path.retain(|part| part != "self" && part != "crate");
            if path.len() > 1 && modules.contains(&path[0]) {
                exported.insert(path.last().unwrap().clone(), path[0].clone());
            }
        }
    }
    (modules, exported)
}

/// Returns the Rust files of a crate but those of tests.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let all = walkdir::WalkDir::new(folder).sort_by_file_name();
    let all = all.into_iter().map(|entry| entry.unwrap().into_path());
    let tests = |path: &Path| path.components().any(|part| part.as_os_str() == "tests");
    all.filter(|path| path.extension().is_some_and(|e| e == "rs"))
        .filter(|path| !path.ends_with("tests.rs") && !tests(path.strip_prefix(folder).unwrap()))
        .collect()
}

/// Returns the module that a file holds.
fn place(file: &Path) -> Parts {
    let mut parts: Parts = file
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    parts.pop_if(|last| last == "mod");
    parts
}

/// Returns the paths from the crate's root that a file names: in `use`, and where it says `crate::` or `super::`.
fn paths(code: &str, place: &[String]) -> Vec<Parts> {
    let code = code.split("#[cfg(test)]\nmod ").next().unwrap();
    let code: Vec<&str> = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let rest = &code[at..];
            // A tree of a `use` ends with its statement, another path with its last name.
            let end = match code[..at].ends_with("use ") {
                true => rest.find(';'),
                false => rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')),
            };
            found.extend(
                expand(&rest[..end.unwrap_or(rest.len())])
                    .into_iter()
                    .map(|path| (at, path)),
            );
        }
    }
    found.sort();
    let absolute = |(_, path): (usize, Parts)| {
        let mut at = place.to_vec();
        let names = path.into_iter().skip_while(|part| match part.as_str() {
            "crate" => {
                at.clear();
                true
            }
            "super" => {
                at.pop();
                true
            }
            "self" => true,
            _ => false,
        });
        let names: Parts = names.collect();
        at.extend(names);
        (!at.is_empty()).then_some(at)
    };
    found.into_iter().filter_map(absolute).collect()
}

/// Returns the paths of a tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn expand(tree: &str) -> Vec<Parts> {
    let (before, inner) = match tree.split_once('{') {
        Some((before, inner)) => (before, Some(inner.rsplit_once('}').unwrap().0)),
        None => (tree, None),
    };
    let name = |part: &str| {
        part.split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let before: Parts = before
        .split("::")
        .map(name)
        .filter(|part| !part.is_empty())
        .collect();
    let Some(inner) = inner else {
        return vec![before];
    };
    let (mut depth, mut from, mut trees) = (0, 0, Vec::new());
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                trees.push(&inner[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    trees.push(&inner[from..]);
    let trees = trees.into_iter().filter(|tree| !tree.trim().is_empty());
    trees
        .flat_map(expand)
        .map(|rest| [before.clone(), rest].concat())
        .collect()
}
