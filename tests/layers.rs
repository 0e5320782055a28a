//! The modules of each crate form layers, and no modules use each other in a circle.
//!
//! The first page of a crate (`lib.rs`) lists its modules under `## Layers`: a module uses modules of earlier lines
//! only. A module with many submodules, such as `cli`, can have such a list too. All other submodules of one module use
//! each other in one direction.
//!
//! | use of another module | seen |
//! |---|---|
//! | a path: in `use`, or with `crate`, `super`, `self` or a submodule | yes, as a use of the module that defines the item, through re-exports |
//! | a method that the other module has in an `impl` of a third module's type | by its name, if no other function of the crate has the name; the caller or a module that it uses must use the type's module |
//! | a method in the module of its type | not needed: the caller has the value from an item that it names, so the type is in a lower layer |
//! | a method of a trait | no |
//! | an item in the expansion of a macro | no; in its definition, yes |
//!
//! A submodule and its parent may use each other. The parent has the types of the folder, the submodules have parts of
//! their code, and other modules see one unit. So all modules may use items of `lib.rs`, such as `Store`. A module with
//! a list, other than `lib.rs`, is above its submodules, and they use nothing of it. Tests may use everything.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// A path in the code, by its parts.
type Parts = Vec<String>;

/// The modules of a crate by their paths, but those of tests. The path of the root is empty.
type Modules = BTreeMap<Parts, Module>;

/// A module that has a file.
struct Module {
    text: String,
    /// The text without comments and tests.
    code: String,
    /// The names that `use` brings into the module, with their paths.
    names: BTreeMap<String, Parts>,
    /// The paths that the module uses.
    paths: Vec<Parts>,
}

#[test]
fn modules_use_those_of_lower_layers_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = fs::read_dir(root.join("crates")).unwrap();
    let crates = crates.map(|entry| entry.unwrap().path());
    for folder in crates.chain([root.join("python"), root.to_owned()]) {
        let modules = read(&folder.join("src"));
        let listed = modules[&vec![]].text.contains("## Layers");
        let few = children(&modules, &[]).len() < 2;
        assert!(listed || few, "{}: no layers", folder.display());
        assert_eq!(wrong(&modules), [""; 0], "{}", folder.display());
    }
}

/// Returns the uses that are not allowed.
fn wrong(modules: &Modules) -> Vec<String> {
    let mut wrong = Vec::new();
    let uses = uses(modules);
    for (place, module) in modules {
        let (name, layers) = (place.join("::"), layers(&module.text));
        let listed: BTreeSet<&str> = layers.keys().map(String::as_str).collect();
        if !listed.is_empty() {
            for child in &listed ^ &children(modules, place) {
                wrong.push(format!("{name}: {child} is in no layer, or no module"));
            }
        }
        let mut edges = BTreeSet::new();
        for (user, used) in &uses {
            let Some(from) = child(place, user) else {
                continue;
            };
            match child(place, used) {
                Some(to) if from != to => drop(edges.insert((from, to))),
                None if used == place && !name.is_empty() && !listed.is_empty() => {
                    wrong.push(format!("{name}: {from} uses its parent"));
                }
                _ => {}
            }
        }
        for (from, to) in &edges {
            let lower = match (layers.get(*from), layers.get(*to)) {
                (Some(own), Some(other)) => other < own,
                _ => !reaches(&edges, to, from),
            };
            if !lower {
                wrong.push(format!("{name}: {from} uses {to}"));
            }
        }
    }
    wrong
}

#[test]
fn forbidden_uses_are_found() {
    let found = |files: &[(&str, &str)]| {
        let files = files.iter();
        let files = files.map(|(file, text)| (place(Path::new(file)), (*text).to_owned()));
        wrong(&modules(files.collect()))
    };
    let lib = "//! ## Layers\n//!\n//! ```text\n//! low\n//! high, top\n//! ```\n";
    let lib = ("lib.rs", &*format!("{lib}pub use low::Low;\n"));
    let low = ("low.rs", "pub struct Low;\n");
    let high = ("high.rs", "use super::{\n    Low as L,\n    top::T,\n};\n");
    let top = ("top.rs", "// use crate::high;\nuse crate::Low;\n");
    assert_eq!(found(&[lib, low, high, top]), [": high uses top"]);
    let missing = [": top is in no layer, or no module"];
    assert_eq!(found(&[lib, low, ("high.rs", "")]), missing);

    // A method in a higher module than its type.
    let call = "pub struct Low;\nfn f(low: &Low) { low.rise(1) }\n";
    let methods = "use super::Low;\n\nimpl Low {\n    pub fn rise(&self, by: u8) {}\n}\n";
    let files = [lib, ("low.rs", call), ("high.rs", methods), top];
    assert_eq!(found(&files), [": low uses high"]);
    let other = "pub struct Low;\nfn f(other: O) { other.rise() }\n";
    assert_eq!(found(&[lib, ("low.rs", other), files[2], top]), [""; 0]);

    // Submodules: a circle of three, one side of it through a re-export.
    let parent = ("m/mod.rs", "mod c;\npub use a::A;\nfn f() { c::g() }\n");
    let a = ("m/a.rs", "use super::c::g;\npub struct A;\n");
    let b = ("m/b.rs", "use crate::m::A;\n");
    let c = ("m/c.rs", "fn g() { super::b::h() }\n");
    let lib = ("lib.rs", "");
    let circle = ["m: a uses c", "m: b uses a", "m: c uses b"];
    assert_eq!(found(&[lib, parent, a, b, c]), circle);
    let tested = "use super::f;\n#[cfg(test)]\nmod tests {\n    use super::b;\n}\n";
    assert_eq!(found(&[lib, parent, a, b, ("m/c.rs", tested)]), [""; 0]);
    let parent = "//! ## Layers\n//! ```text\n//! c\n//! ```\nfn f() { c::g() }\n";
    let files = [lib, ("m/mod.rs", parent), ("m/c.rs", tested)];
    assert_eq!(found(&files), ["m: c uses its parent"]);
}

#[test]
fn the_names_at_the_root_of_the_runtime_are_few_and_on_a_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let lib = fs::read_to_string(root.join("crates/precast-runtime/src/lib.rs")).unwrap();
    let names = names(&lib);
    assert!(
        (10..=27).contains(&names.len()),
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

/// Returns the layer of each module, as its line in the essay.
fn layers(text: &str) -> BTreeMap<String, usize> {
    let block = text.split("//! ## Layers").nth(1).unwrap_or_default();
    let block = block.split("//! ```").nth(1).unwrap_or_default();
    let mut layers = BTreeMap::new();
    for (at, line) in block.lines().skip(1).enumerate() {
        for module in line.trim_start_matches("//!").trim().split(", ") {
            layers.insert(module.to_owned(), at);
        }
    }
    layers
}

/// Reads the modules of a crate.
fn read(source: &Path) -> Modules {
    let mut files = BTreeMap::new();
    for entry in walkdir::WalkDir::new(source) {
        let file = entry.unwrap().into_path();
        let place = place(file.strip_prefix(source).unwrap());
        let left_out = |part: &String| ["main", "tests", "testing"].contains(&&**part);
        if file.extension().is_some_and(|e| e == "rs") && !place.iter().any(left_out) {
            files.insert(place, fs::read_to_string(&file).unwrap());
        }
    }
    modules(files)
}

/// Returns the module that a file holds.
fn place(file: &Path) -> Parts {
    let file = file.with_extension("");
    let parts = file.iter().map(|part| part.to_str().unwrap().to_owned());
    let mut parts: Parts = parts.collect();
    parts.pop_if(|last| last == "mod" || last == "lib");
    parts
}

/// Parses the modules of a crate from the texts of their files.
fn modules(files: BTreeMap<Parts, String>) -> Modules {
    let places: BTreeSet<Parts> = files.keys().cloned().collect();
    let parse = |(place, text): (Parts, String)| {
        let code = code(&text);
        let (names, paths) = paths(&code, &place, &places);
        let module = Module {
            text,
            code,
            names,
            paths,
        };
        (place, module)
    };
    files.into_iter().map(parse).collect()
}

/// Returns the text of a file without comments and tests.
fn code(text: &str) -> String {
    let (mut code, mut test) = (String::new(), false);
    for line in text.lines() {
        test |= line == "#[cfg(test)]";
        if !test && !line.trim_start().starts_with("//") {
            code += line;
            code.push('\n');
        }
        // The last line of an item is not indented.
        test &= line.starts_with(' ') || line != "}" && !line.ends_with(';');
    }
    code
}

/// Returns the names of a module's submodules.
fn children<'a>(modules: &'a Modules, place: &[String]) -> BTreeSet<&'a str> {
    let others = modules.keys();
    others.filter_map(|other| child(place, other)).collect()
}

/// Returns the submodule of `place` that contains a module.
fn child<'a>(place: &[String], module: &'a [String]) -> Option<&'a str> {
    module.strip_prefix(place)?.first().map(String::as_str)
}

/// Returns the pairs of modules of which the first uses the second.
fn uses(modules: &Modules) -> BTreeSet<(Parts, Parts)> {
    let mut uses = BTreeSet::new();
    for (user, module) in modules {
        let used = module.paths.iter().map(|path| resolve(modules, path));
        uses.extend(used.map(|used| (user.clone(), used)));
    }
    uses.retain(|(user, used)| user != used);
    // The root re-exports items of all modules.
    let mut by_path = uses.clone();
    by_path.retain(|(user, _)| !user.is_empty());
    for (place, module) in modules {
        for (owner, name, more) in methods(module) {
            let owner = resolve(modules, owner);
            let start = format!("fn {name}");
            let of_name = |module: &Module| {
                let found = module.code.split(&start).skip(1);
                found.filter(|rest| rest.starts_with(['(', '<'])).count()
            };
            if owner == *place || modules.values().map(of_name).sum::<usize>() > 1 {
                continue;
            }
            for (user, module) in modules.iter().filter(|(user, _)| *user != place) {
                let call = format!(".{name}(");
                let mut calls = module.code.split(&call).skip(1);
                let called = calls.any(|given| given.starts_with(')') != more);
                if called && reaches(&by_path, user, &owner) {
                    uses.insert((user.clone(), place.clone()));
                }
            }
        }
    }
    uses
}

/// Returns the module that defines the item of a path.
fn resolve(modules: &Modules, path: &[String]) -> Parts {
    let mut at = Parts::new();
    let mut rest: Parts = path.iter().rev().cloned().collect();
    // Modules that import one name from each other would have no end.
    for _ in 0..30 {
        let Some(name) = rest.pop() else { break };
        at.push(name);
        if modules.contains_key(&at) {
            continue;
        }
        let name = at.pop().unwrap();
        let Some(path) = modules[&at].names.get(&name) else {
            break;
        };
        rest.extend(path.iter().rev().cloned());
        at.clear();
    }
    at
}

/// Returns whether edges lead from one module to another.
fn reaches<T: Ord>(edges: &BTreeSet<(T, T)>, from: &T, to: &T) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        if seen.insert(at) {
            let own = edges.iter().filter(|(user, _)| user == at);
            next.extend(own.map(|(_, used)| used));
        }
    }
    seen.contains(to)
}

/// Returns the public methods that a module has for types that it imports: the type's path, the name, and whether the
/// method has an argument besides `self`.
fn methods(module: &Module) -> Vec<(&Parts, &str, bool)> {
    let mut methods = Vec::new();
    for block in module.code.split("\nimpl").skip(1) {
        let (head, body) = block.split_once('{').unwrap();
        let generic = head.starts_with('<');
        let name = if generic {
            head.split_once("> ").unwrap().1
        } else {
            head
        };
        let name = name.trim().split(['<', ' ']).next().unwrap();
        let owner = module.names.get(name);
        let Some(owner) = owner.filter(|_| !head.contains(" for ")) else {
            continue;
        };
        let body = body.split("\n}").next().unwrap();
        for item in body.split("    pub").skip(1) {
            let item = item.split_once("fn ").unwrap_or_default().1;
            let (name, rest) = item.split_once(['(', '<']).unwrap_or_default();
            let given = rest.split(')').next().unwrap();
            if given.contains("self") {
                methods.push((owner, name, given.contains(',')));
            }
        }
    }
    methods
}

/// Returns the names that `use` brings into a module, and all paths that the module has.
fn paths(
    code: &str,
    place: &[String],
    places: &BTreeSet<Parts>,
) -> (BTreeMap<String, Parts>, Vec<Parts>) {
    let (mut names, mut paths) = (BTreeMap::new(), Vec::new());
    let ident = |c: char| c.is_alphanumeric() || c == '_';
    for (at, _) in code.match_indices("::") {
        let start = code[..at]
            .rfind(|c| !ident(c))
            .map_or(0, |before| before + 1);
        let before = &code[..start];
        if start == at || before.ends_with("::") || before.ends_with("pub(in ") {
            continue;
        }
        // A tree of a `use` ends with its statement, another path with its last name.
        let imports = before.ends_with("use ");
        let end = match imports {
            true => code[at..].find(';'),
            false => code[at..].find(|c| !ident(c) && c != ':'),
        };
        for mut path in expand(&code[start..at + end.unwrap()]) {
            let last = path.pop().unwrap();
            let (name, alias) = last.split_once(" as ").unwrap_or((&last, &last));
            path.push(name.trim().to_owned());
            let Some(path) = absolute(&path, place, places) else {
                continue;
            };
            if imports {
                let alias = if alias == "self" {
                    path.last().unwrap()
                } else {
                    alias
                };
                names.insert(alias.trim().to_owned(), path.clone());
            }
            paths.push(path);
        }
    }
    (names, paths)
}

/// Returns a path from the crate's root. None for a path into another crate, and for the root itself.
fn absolute(path: &[String], place: &[String], places: &BTreeSet<Parts>) -> Option<Parts> {
    let own = [place, &path[..1]].concat();
    let mut at = match &*path[0] {
        "crate" => Parts::new(),
        "super" | "self" => place.to_vec(),
        _ if places.contains(&own) => place.to_vec(),
        _ => return None,
    };
    for part in path {
        match &**part {
            "crate" | "self" => {}
            "super" => drop(at.pop()),
            _ => at.push(part.clone()),
        }
    }
    (!at.is_empty()).then_some(at)
}

/// Returns the paths of a tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn expand(tree: &str) -> Vec<Parts> {
    let (before, inner) = tree.split_once('{').unwrap_or((tree, ""));
    let before = before.split("::").map(str::trim);
    let before: Parts = before
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect();
    let Some((inner, _)) = inner.rsplit_once('}') else {
        return vec![before];
    };
    let mut depth = 0;
    let trees = inner.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    let trees = trees.filter(|tree| !tree.trim().is_empty());
    let rest = trees.flat_map(expand);
    rest.map(|rest| [before.clone(), rest].concat()).collect()
}
