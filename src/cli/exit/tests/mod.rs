//! Every error of every stage, with its exit code and hint.

mod all;
mod given;

use std::{collections::BTreeSet, fmt::Debug, fs, path::Path};

use super::*;

fn io(kind: ErrorKind) -> io::Error {
    kind.into()
}

/// Returns the name that a text begins with.
fn name(text: &str) -> String {
    let name = text.chars().take_while(char::is_ascii_alphanumeric);
    name.collect()
}

/// Holds that no variant of an enum was forgotten, by the source of the enum.
fn complete<E: Debug>(samples: &[E], file: &str, of: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("crates")
        .join(file);
    let source = fs::read_to_string(file).unwrap();
    let (_, body) = source.split_once(&format!("pub enum {of} {{")).unwrap();
    let (body, _) = body.split_once("\n}").unwrap();
    let items = body.lines().filter_map(|line| line.strip_prefix("    "));
    let items = items.filter(|item| item.starts_with(|c: char| c.is_ascii_uppercase()));
    let sampled = samples.iter().map(|error| name(&format!("{error:?}")));
    let (sampled, variants): (BTreeSet<_>, BTreeSet<_>) =
        (sampled.collect(), items.map(name).collect());
    assert_eq!(
        sampled, variants,
        "{of}: samples on the left, variants on the right"
    );
}

/// Returns the exit code, the text and the hint of each error of an enum, of which no variant was forgotten.
fn report<E: std::error::Error + Send + Sync + 'static>(
    samples: Vec<E>,
    file: &str,
    of: &str,
) -> String {
    complete(&samples, file, of);
    let mut lines = String::new();
    for error in samples.into_iter().map(Error::new) {
        let (code, hint) = classify(&error);
        assert!(
            !hint.is_empty() && !hint.ends_with('.') && !hint.contains('\n'),
            "{error}: {hint}"
        );
        // The command, Python and C print it too.
        assert!(!hint.replace("torch::", "").contains("::"), "{hint}");
        lines += &format!("{code} {error}\n    {hint}\n");
    }
    lines
}

#[test]
fn every_error_says_what_to_do() {
    let plan = report(
        all::plan_errors(),
        "precast-builder/src/plan/mod.rs",
        "PlanError",
    );
    insta::assert_snapshot!("plan", plan);
    let build = report(
        all::build_errors(),
        "precast-builder/src/error.rs",
        "BuildError",
    );
    insta::assert_snapshot!("build", build);
    let store = report(
        all::store_errors(),
        "precast-store/src/error.rs",
        "StoreError",
    );
    insta::assert_snapshot!("store", store);
    let external = report(
        all::external_errors(),
        "precast-inspect/src/external/mod.rs",
        "ExternalError",
    );
    let libraries = report(
        all::library_errors(),
        "precast-inspect/src/libraries.rs",
        "LibraryError",
    );
    let counts = report(
        all::counts_errors(),
        "precast-inspect/src/stats.rs",
        "CountsError",
    );
    insta::assert_snapshot!("inspect", [external, libraries, counts].concat());
    complete(
        &all::problems(),
        "precast-runtime/src/problem.rs",
        "Problem",
    );
    let runtime = report(
        all::runtime_errors(),
        "precast-runtime/src/error.rs",
        "RuntimeError",
    );
    let files = report(
        all::tensor_file_errors(),
        "precast-runtime/src/tensors.rs",
        "TensorFileError",
    );
    insta::assert_snapshot!("runtime", runtime + &files);
}

#[test]
fn every_error_of_a_spec_says_what_to_do() {
    let errors = all::spec_errors();
    complete(&errors, "precast-builder/src/spec/error.rs", "SpecError");
    for error in errors {
        assert!(error.render().contains("= help: "), "{}", error.render());
    }
}

#[test]
fn what_the_operating_system_refuses_says_what_to_do() {
    use anyhow::Context as _;
    for kind in [
        ErrorKind::NotFound,
        ErrorKind::PermissionDenied,
        ErrorKind::Other,
    ] {
        let error = Err::<(), _>(io(kind))
            .context("can't read `x`")
            .unwrap_err();
        let (code, hint) = classify(&error);
        assert_eq!(code, USAGE);
        assert!(!hint.is_empty());
    }
    assert_eq!(classify(&Error::msg("no such thing")).0, BUG);
}

#[test]
fn a_panic_is_a_bug() {
    assert_eq!(guarded(|| MISSING), MISSING);
    assert_eq!(guarded(|| panic!("a test of panics")), BUG);
}
