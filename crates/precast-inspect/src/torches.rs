//! The versions of torch under which releases, programs and artifacts run.
//!
//! A program needs the torch that it was built with, or a newer one under which the gates of a release with the program
//! passed (`precast verify --host`). An older torch is refused. The runtime compares; this module reads the records.

use std::cmp::Ordering;

use precast_builder::plan::Reason;
use precast_store::{Digest, Store, StoreError, Target, record::Release, target::Torch};
use serde::Serialize;

/// The versions of torch that run a program or an artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Torches {
    /// Full version of the torch of the build; an older one is refused.
    pub least: String,
    /// Newer versions under which the gates of a release that has it passed, the oldest first.
    pub also: Vec<String>,
}

impl Torches {
    /// Returns the versions for a program or an artifact with this ID and target.
    pub fn of(store: &Store, id: &Digest, target: &Target) -> Result<Self, StoreError> {
        let mut also = Vec::new();
        for (model, seq) in store.releases().with(id)? {
            let release = store.releases().at(&model, seq).ok().flatten();
            let shims = release.into_iter().flat_map(|release| release.shims);
            let own = shims.filter(|shim| shim.arch == target.arch);
            also.extend(own.map(|shim| shim.torch));
        }
        also.retain(|torch| Torch::is_older(&target.torch, torch));
        also.sort_by(|a, b| order(a, b));
        also.dedup();
        Ok(Self {
            least: target.torch.clone(),
            also,
        })
    }
}

/// Compares versions by number, and equal ones, such as `2.11.0+cpu` and `2.11.0+cu130`, by their text.
fn order(a: &str, b: &str) -> Ordering {
    match (Torch::is_older(a, b), Torch::is_older(b, a)) {
        (true, _) => Ordering::Less,
        (_, true) => Ordering::Greater,
        _ => a.cmp(b),
    }
}

/// Returns the versions of torch that a release has shims for, in their order. Without shims it is the version of its
/// first program.
pub fn of_release(store: &Store, release: &Release) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for shim in &release.shims {
        if !all.contains(&shim.torch) {
            all.push(shim.torch.clone());
        }
    }
    if all.is_empty() {
        all.extend(built_with(store, release));
    }
    all
}

/// Returns the version of torch that a release was built with; none if its first program is unreadable.
fn built_with(store: &Store, release: &Release) -> Option<String> {
    let program = store.records().program(release.programs.first()?).ok()??;
    Some(program.target.torch)
}

/// Returns a hint how the newest release of a model may run under the torch of `target`, if a newer torch is the only
/// reason for a build.
pub fn hint(
    store: &Store,
    newest: Option<&Release>,
    target: &Target,
    reasons: &[Reason],
) -> Option<String> {
    let release = newest.filter(|_| is_newer_torch(reasons))?;
    let built = built_with(store, release)?;
    if !Torch::is_older(&built, &target.torch) {
        return None;
    }
    let (model, seq, torch) = (&release.model, release.seq, &target.torch);
    let passed = of_release(store, release).contains(torch);
    Some(if passed {
        format!(
            "release {seq} of `{model}` runs under torch {torch} without a build: its gates passed there"
        )
    } else {
        format!(
            "`precast verify --host {model}` may let release {seq} run under torch {torch}, without a build"
        )
    })
}

/// Returns whether the reasons are only a newer torch, and changes that come with its environment.
fn is_newer_torch(reasons: &[Reason]) -> bool {
    let newer = |reason: &Reason| match reason {
        Reason::TargetChanged { field, old, new } if field == "torch" => old
            .as_str()
            .zip(new.as_str())
            .is_some_and(|(old, new)| Torch::is_older(old, new)),
        _ => false,
    };
    let with_it = |reason: &Reason| match reason {
        Reason::TargetChanged { field, .. } => {
            matches!(field.as_str(), "torch" | "torch_git" | "cuda" | "cxx11_abi")
        }
        Reason::PackageChanged { .. }
        | Reason::PackageAdded { .. }
        | Reason::PackageRemoved { .. } => true,
        _ => false,
    };
    reasons.iter().any(newer) && reasons.iter().all(with_it)
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::{
        record::{Program, Shim},
        testing,
    };

    fn shim(store: &Store, torch: &str) -> Shim {
        Shim {
            arch: testing::target().arch,
            ..testing::shim(store, torch)
        }
    }

    fn put(store: &Store, program: &Program, torches: &[&str]) -> Release {
        let mut release = testing::release("m", None, &[program.id]);
        release.shims = torches.iter().map(|torch| shim(store, torch)).collect();
        store.releases().put(&release).unwrap().0
    }

    #[test]
    fn a_program_and_its_artifact_run_where_the_gates_of_a_release_passed() {
        let (_dir, store, artifact, program) = testing::filled();
        let also = |id: &Digest| Torches::of(&store, id, &program.target).unwrap().also;
        assert_eq!(also(&program.id), [""; 0], "no release has it");
        let old = put(&store, &program, &[]);
        assert_eq!(of_release(&store, &old), ["2.11.0"]);
        put(&store, &program, &["2.11.0", "2.15.0", "2.9.0"]);
        let mut last = put(&store, &program, &["2.11.0", "2.12.1", "2.15.0"]);
        for id in [program.id, artifact.id] {
            assert_eq!(also(&id), ["2.12.1", "2.15.0"]);
        }
        last.shims.push(shim(&store, "2.12.1"));
        assert_eq!(of_release(&store, &last), ["2.11.0", "2.12.1", "2.15.0"]);
        let mut other = program.target.clone();
        other.arch = "aarch64".into();
        let there = Torches::of(&store, &program.id, &other).unwrap();
        assert_eq!((there.least.as_str(), there.also), ("2.11.0", vec![]));
    }

    #[test]
    fn a_newer_torch_alone_has_a_hint() {
        let (_dir, store, _, program) = testing::filled();
        let release = put(&store, &program, &["2.11.0", "2.12.1"]);
        let target = |field: &str, old: &str, new: &str| Reason::TargetChanged {
            field: field.into(),
            old: old.into(),
            new: new.into(),
        };
        let newer = || target("torch", "2.11.0", "2.15.0");
        let package = || Reason::PackageAdded {
            name: "triton".into(),
            version: "4".into(),
        };
        let source = Reason::SourceChanged {
            path: "model.py".into(),
        };
        let under = |torch: &str, reasons: &[Reason]| {
            let torch = torch.to_owned();
            let target = Target {
                torch,
                ..testing::target()
            };
            hint(&store, Some(&release), &target, reasons)
        };
        let all = [newer(), target("cuda", "13.0", "13.2"), package()];
        insta::assert_snapshot!(under("2.15.0", &all).unwrap(), @"`precast verify --host m` may let release 1 run under torch 2.15.0, without a build");
        insta::assert_snapshot!(under("2.12.1", &[target("torch", "2.11.0", "2.12.1")]).unwrap(), @"release 1 of `m` runs under torch 2.12.1 without a build: its gates passed there");
        let isa = target("isa", "native", "x86-64-v3");
        for (torch, reasons) in [
            ("2.15.0", vec![]),
            ("2.15.0", vec![package()]),
            ("2.15.0", vec![newer(), source]),
            ("2.15.0", vec![newer(), isa]),
            ("2.10.0", vec![target("torch", "2.11.0", "2.10.0")]),
            // The newest release is for this torch already.
            ("2.11.0", vec![newer()]),
        ] {
            assert_eq!(under(torch, &reasons), None, "{torch} {reasons:?}");
        }
        assert_eq!(hint(&store, None, &program.target, &all), None);
    }
}
