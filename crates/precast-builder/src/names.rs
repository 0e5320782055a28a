//! The callables that a spec names, as `module:callable`. A worker refuses misspelt ones before it imports torch.

use std::{collections::BTreeSet, path::Path};

use crate::spec::{CommandLine, Spec};

/// The callables of a spec, and its folder.
pub(super) struct Names<'a> {
    pub root: &'a Path,
    pub names: Vec<String>,
}

impl<'a> Names<'a> {
    /// For work without a model.
    pub fn none() -> Self {
        let root = Path::new("");
        let names = vec![];
        Self { root, names }
    }

    pub fn of(spec: &'a Spec, command_line: &CommandLine) -> Self {
        let mut names = further(spec, command_line);
        names.insert(0, spec.model.entry.clone());
        let root = &spec.root;
        Self { root, names }
    }
}

/// Returns every callable that captures use in addition to the entry: graph passes, and the source of sample inputs.
pub(super) fn further(spec: &Spec, command_line: &CommandLine) -> Vec<String> {
    let modules = spec.modules.iter().map(|module| &module.compile);
    let layers = modules.chain([&spec.compile]).chain(command_line.layers());
    let passes = layers.flat_map(|layer| layer.passes.iter().flatten());
    let trained = spec
        .modules
        .iter()
        .filter_map(|module| module.train.as_ref());
    let optimizers = trained.filter_map(|train| train.callable().map(str::to_owned));
    passes
        .chain(&spec.model.samples)
        .cloned()
        .chain(optimizers)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}
