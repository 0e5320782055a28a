//! The reasons why a program or an artifact was built: the differences between its key and that of its predecessor.

use std::{
    collections::BTreeSet,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use precast_builder::{
    plan::{History, Place, Reason, bystanders, names, reasons},
    spec::Spec,
};
use precast_store::{
    Digest, Filter, Store, StoreError,
    record::{Artifact, Program, Tried},
};
use serde::Serialize;

use crate::{
    graph::{self, Graph},
    torches,
};

/// The reasons for one program or artifact.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Why {
    /// `encode batch=8 seq=128`, and for an artifact the step that it was first built for.
    pub name: String,
    /// Its key, or its digest for an object.
    pub id: Digest,
    /// Time of the build, in seconds since 1970, if its record has it.
    pub built: Option<i64>,
    /// Its predecessor, if there is one.
    pub before: Option<Digest>,
    /// The option sets it was compiled with, if there were several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tuned: Vec<Tried>,
    /// Most telling first. An artifact of another step or of another bucket may differ in much.
    pub reasons: Vec<Reason>,
    /// An alternative to a build, if a newer torch is the only reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The change of the program's captured graph, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph: Option<Graph>,
}

/// Returns the reasons why `program` was built.
pub fn program(store: &Store, program: &Program) -> Result<Why, StoreError> {
    let siblings = History::new(store, &program.model)?.siblings(program)?;
    let module = if siblings.is_empty() {
        program.module.clone()
    } else {
        program.title()
    };
    let before = before(store, program, siblings)?;
    let graph = match &before {
        Some(old) => graph::graph((store, old), (store, program))?,
        None => None,
    };
    let reasons = match &before {
        Some(old) => reasons(&old.request, &program.request),
        None => vec![Reason::NeverBuilt],
    };
    let newest = store.releases().get(&program.model, None)?;
    Ok(Why {
        graph,
        name: format!("{module} {}", program.bucket()),
        id: program.id,
        built: program.provenance.created,
        hint: torches::hint(store, newest.as_ref(), &program.target, &reasons),
        reasons,
        before: before.map(|old| old.id),
        tuned: program.receipt.tried().to_vec(),
    })
}

/// Returns the reasons why `artifact` was built: its differences from the predecessor in the same step of the oldest
/// program that calls it.
pub fn artifact(store: &Store, artifact: &Artifact) -> Result<Option<Why>, StoreError> {
    let Some((caller, step)) = first_caller(store, &artifact.id)? else {
        return Ok(None);
    };
    let place = |program: &Program| {
        let bucket = program.bucket();
        match step.as_str() {
            "" => format!("{} {bucket}", program.module),
            step => format!("step `{step}` of {} {bucket}", program.module),
        }
    };
    let siblings = History::new(store, &caller.model)?.siblings(&caller)?;
    let old = match before(store, &caller, siblings)? {
        Some(old) => old.steps.into_iter().find(|old| old.name == step),
        None => None,
    };
    let old = match old {
        Some(step) => store.records().artifact(&step.artifact)?,
        None => None,
    };
    Ok(Some(Why {
        graph: None,
        hint: None,
        name: place(&caller),
        id: artifact.id,
        built: artifact.provenance.created,
        reasons: match &old {
            Some(old) => reasons(&old.key, &artifact.key),
            None => vec![Reason::NeverBuilt],
        },
        before: old.map(|old| old.id),
        tuned: vec![],
    }))
}

/// Returns up to `limit` files that changed after the newest program of `module` was built and that are no sources.
pub fn without_effect(
    spec: &Spec,
    store: &Store,
    module: &str,
    limit: usize,
) -> Result<Vec<Reason>, StoreError> {
    let filter = Filter {
        model: Some(spec.model.name.clone()),
        module: Some(module.to_owned()),
        ..Filter::default()
    };
    let mut newest = None;
    for row in store.records().programs(filter) {
        newest = newest.max(u64::try_from(row?.created).ok());
    }
    let (Some(newest), Some(release)) = (newest, store.releases().get(&spec.model.name, None)?)
    else {
        return Ok(Vec::new());
    };
    // Time stamps are whole seconds: a file of the same second may be older than the program.
    let since = UNIX_EPOCH + Duration::from_secs(newest + 1);
    // The store's path below the root, if it is inside.
    let inside = |root: &Path, store: &Path| {
        let (root_now, store_now) = (root.canonicalize().ok()?, store.canonicalize().ok()?);
        Some(root.join(store_now.strip_prefix(root_now).ok()?))
    };
    let skip = inside(&spec.root, store.path());
    let skip: Vec<&Path> = skip.as_deref().into_iter().collect();
    let files = bystanders(&spec.root, &release.entry, since, &skip, limit);
    Ok((files.into_iter())
        .map(|path| Reason::NotASource { path })
        .collect())
}

fn before(
    store: &Store,
    program: &Program,
    siblings: Vec<BTreeSet<String>>,
) -> Result<Option<Program>, StoreError> {
    let mut history = History::new(store, &program.model)?;
    let place = Place {
        module: &program.module,
        bucket: &program.bucket(),
        device: &program.target.device.to_string(),
        inputs: Some(names(program)),
        siblings,
    };
    let id = history.previous(&place, Some(&program.id))?;
    match id {
        Some(id) => store.records().program(&id),
        None => Ok(None),
    }
}

/// Returns the oldest program that calls an artifact, and the name of its first step that does.
fn first_caller(store: &Store, artifact: &Digest) -> Result<Option<(Program, String)>, StoreError> {
    let Some(program) = store.records().first_caller(artifact)? else {
        return Ok(None);
    };
    Ok(store.records().program(&program)?.and_then(|program| {
        let step = program.steps.iter().find(|step| step.artifact == *artifact);
        let name = step.map(|step| step.name.clone())?;
        Some((program, name))
    }))
}

#[cfg(test)]
mod tests {
    use precast_store::testing;

    #[test]
    fn an_artifact_that_no_program_uses_has_no_reasons() {
        let (_dir, store) = testing::store();
        let alone = testing::artifact(&store, "alone");
        assert_eq!(super::artifact(&store, &alone).unwrap(), None);
    }
}
