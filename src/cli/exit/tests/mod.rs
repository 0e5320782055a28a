//! Every error of every stage, with its exit code and hint.

mod build;
mod look;
mod run;
mod store;

use std::{collections::BTreeSet, path::PathBuf};

use super::*;

fn io(kind: ErrorKind) -> io::Error {
    kind.into()
}

fn path() -> PathBuf {
    "a/path".into()
}

/// Returns the names of the variants of an error enum, as its source has them.
fn variants(source: &str, of: &str) -> BTreeSet<String> {
    let start = source.find(&format!("pub enum {of} {{")).unwrap();
    let body = &source[start..];
    let body = &body[..body.find("\n}").unwrap()];
    let names = body.lines().filter_map(|line| {
        let name = line.strip_prefix("    ")?;
        let end = name
            .find(|c: char| !c.is_ascii_alphanumeric())
            .unwrap_or(name.len());
        name.starts_with(|c: char| c.is_ascii_uppercase())
            .then(|| name[..end].to_owned())
    });
    names.collect()
}

/// Returns the name of the variant that a value is.
fn variant(error: &dyn std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    let end = text
        .find(|c: char| !c.is_ascii_alphanumeric())
        .unwrap_or(text.len());
    text[..end].to_owned()
}

/// Holds that no variant of the enum was forgotten, and returns the samples as the command line gets them.
fn whole<E: std::error::Error + Send + Sync + 'static>(
    samples: Vec<E>,
    source: &str,
    name: &str,
) -> Vec<Error> {
    let sampled: BTreeSet<String> = samples.iter().map(|error| variant(error)).collect();
    assert_eq!(
        sampled,
        variants(source, name),
        "{name}: samples on the left, variants on the right"
    );
    samples.into_iter().map(Error::new).collect()
}

fn report(errors: Vec<Error>) -> String {
    let mut lines = String::new();
    for error in errors {
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
fn every_error_of_the_build_says_what_to_do() {
    let plan = whole(
        build::plan_errors(),
        include_str!("../../../../crates/precast-builder/src/plan/mod.rs"),
        "PlanError",
    );
    let build = whole(
        build::build_errors(),
        include_str!("../../../../crates/precast-builder/src/error.rs"),
        "BuildError",
    );
    insta::assert_snapshot!("plan", report(plan));
    insta::assert_snapshot!("build", report(build));
}

#[test]
fn every_error_of_the_store_says_what_to_do() {
    let store = whole(
        store::store_errors(),
        include_str!("../../../../crates/precast-store/src/error.rs"),
        "StoreError",
    );
    insta::assert_snapshot!("store", report(store));
}

#[test]
fn every_error_of_a_look_says_what_to_do() {
    insta::assert_snapshot!("inspect", report(look::inspect_errors()));
    let sampled: BTreeSet<String> = look::inspect_errors()
        .iter()
        .map(|e| variant(&**e))
        .collect();
    let external = variants(
        include_str!("../../../../crates/precast-inspect/src/external/mod.rs"),
        "ExternalError",
    );
    let counts = variants(
        include_str!("../../../../crates/precast-inspect/src/stats.rs"),
        "CountsError",
    );
    let libraries = variants(
        include_str!("../../../../crates/precast-inspect/src/libraries.rs"),
        "LibraryError",
    );
    let all = [external, counts, libraries].into_iter().flatten();
    assert_eq!(sampled, all.collect());
}

#[test]
fn every_error_of_a_run_says_what_to_do() {
    insta::assert_snapshot!("runtime", report(run::runtime_errors()));
    let sampled: BTreeSet<String> = run::runtime_errors()
        .iter()
        .map(|e| variant(&**e))
        .collect();
    let runtime = variants(
        include_str!("../../../../crates/precast-runtime/src/error.rs"),
        "RuntimeError",
    );
    let tensors = variants(
        include_str!("../../../../crates/precast-runtime/src/tensors.rs"),
        "TensorFileError",
    );
    assert_eq!(sampled, runtime.union(&tensors).cloned().collect());
    let inputs = variants(
        include_str!("../../../../crates/precast-runtime/src/problem.rs"),
        "Problem",
    );
    let sampled = run::runtime_errors()
        .into_iter()
        .filter_map(|error| match error.downcast() {
            Ok(RuntimeError::BadInput { problem, .. }) => Some(variant(&problem)),
            _ => None,
        });
    assert_eq!(sampled.collect::<BTreeSet<_>>(), inputs);
}

#[test]
fn every_error_of_a_spec_says_what_to_do() {
    for error in whole(
        build::spec_errors(),
        include_str!("../../../../crates/precast-builder/src/spec/error.rs"),
        "SpecError",
    ) {
        let error = error.downcast::<SpecError>().unwrap();
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
