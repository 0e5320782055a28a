//! Compares the captured graphs of two programs: whether a changed source changed the computation.

use std::fmt;

use serde::Serialize;

use precast_store::{Digest, Store, StoreError, record::Program};

/// The change of a graph from one program to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Graph {
    /// Both call the same artifacts.
    Same,
    /// It is the same, compiled for another target or with other options.
    Recompiled,
    /// These steps of the second program have a different graph, or none in the first.
    Changed {
        /// Names of the steps, in the order of the run.
        steps: Vec<String>,
    },
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.write_str("the captured graph is the same, and so are its artifacts"),
            Self::Recompiled => f.write_str("the captured graph is the same, compiled otherwise"),
            Self::Changed { steps } => {
                let names: Vec<&str> = steps.iter().map(String::as_str).collect();
                let names: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
                match &names[..] {
                    [] => f.write_str("the captured graph changed"),
                    names => write!(f, "the captured graph changed: {}", names.join(", ")),
                }
            }
        }
    }
}

/// Compares the graphs of two programs, each in its store. Returns none if a graph is not known.
pub fn graph(
    (old_store, old): (&Store, &Program),
    (new_store, new): (&Store, &Program),
) -> Result<Option<Graph>, StoreError> {
    if old.steps.is_empty() || new.steps.is_empty() {
        let graph = |program: &Program| program.eager.as_ref().map(|eager| eager.artifact);
        let same = old.steps.len() == new.steps.len() && graph(old).is_some();
        return Ok((same && graph(old) == graph(new)).then_some(Graph::Same));
    }
    let artifacts = |program: &Program| -> Vec<(String, Digest)> {
        let steps = program.steps.iter();
        steps
            .map(|step| (step.name.clone(), step.artifact))
            .collect()
    };
    if artifacts(old) == artifacts(new) {
        return Ok(Some(Graph::Same));
    }
    let (Some(old), Some(new)) = (graphs(old_store, old)?, graphs(new_store, new)?) else {
        return Ok(None);
    };
    if old == new {
        return Ok(Some(Graph::Recompiled));
    }
    let other = new.into_iter().filter(|step| !old.contains(step));
    let mut steps: Vec<String> = other.map(|(name, _)| name).collect();
    steps.dedup();
    Ok(Some(Graph::Changed { steps }))
}

/// Returns the name of each step and the digest of its graph; none if a record or a digest is missing.
fn graphs(store: &Store, program: &Program) -> Result<Option<Vec<(String, Digest)>>, StoreError> {
    let mut found = Vec::new();
    for step in &program.steps {
        let artifact = store.records().artifact(&step.artifact)?;
        let Some(graph) = artifact.and_then(|artifact| artifact.graph) else {
            return Ok(None);
        };
        found.push((step.name.clone(), graph));
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::testing;

    #[test]
    fn a_graph_is_the_same_or_compiled_otherwise_or_another_one() {
        let (_dir, store) = testing::store();
        let program = |artifact: &str, graph: Option<&[u8]>| {
            let mut made = testing::artifact(&store, artifact);
            made.graph = graph.map(|graph| store.objects().put_bytes(graph).unwrap());
            testing::program("m", 8, &[store.records().put_artifact(&made).unwrap().id])
        };
        let one = program("a", Some(b"one"));
        let again = program("b", Some(b"one"));
        let two = program("c", Some(b"two"));
        let unknown = program("d", None);
        let comparison = |old, new| graph((&store, old), (&store, new)).unwrap();
        assert_eq!(comparison(&one, &one), Some(Graph::Same));
        assert_eq!(comparison(&one, &again), Some(Graph::Recompiled));
        let steps = vec!["s".to_owned()];
        assert_eq!(comparison(&one, &two), Some(Graph::Changed { steps }));
        assert_eq!(comparison(&one, &unknown), None);
        let eager = testing::program("m", 8, &[]);
        assert_eq!(comparison(&one, &eager), None);
    }
}
