//! `precast check`: finds problems in the modules of a spec, in a worker. It compiles nothing and uses no store.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use precast_store::record::{Sizes, form_name};
use serde::{Deserialize, Serialize};

use super::{
    BuildError, Launcher,
    checkpoint::Checkpoint,
    model::{in_spec, open_model},
    names::Names,
    protocol::{Checked, ModuleRequest, Opened, Request, Sampled},
    tasks::inputs_request,
    worker::{self, Worker},
};
use crate::{
    plan::{self, forms},
    spec::{CommandLine, Module, Overrides, Spec},
};

/// Maximum time for one module.
const LIMIT: Duration = Duration::from_secs(1800);

/// The arguments of a check.
pub struct CheckOptions<'a> {
    /// The spec with the modules to check.
    pub spec: &'a Spec,
    /// Starts the Python workers.
    pub launcher: Launcher,
    /// Parent of its private folder, which is removed at the end.
    pub scratch: PathBuf,
    /// Checks every submodule too.
    pub all: bool,
    /// Find the reasons for which torch.compile would compile again.
    pub recompiles: bool,
    /// Compute the minimum cost of each bucket.
    pub cost: bool,
    /// Set from outside to end it early.
    pub cancel: Arc<AtomicBool>,
}

/// The findings in one module.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CheckedModule {
    /// The module's title in the spec, or the submodule's name.
    pub module: String,
    /// Its place in the spec; none for a submodule that the spec does not name.
    #[serde(skip)]
    pub index: Option<usize>,
    /// FQN of the submodule, empty for the model itself.
    pub path: String,
    /// Whether a build needs it: the spec names it, and it may not be left out (`fullgraph = false`).
    pub needed: bool,
    /// The bucket of the check.
    pub bucket: String,
    /// Number of its buckets.
    pub buckets: usize,
    /// The worker's findings.
    #[serde(flatten)]
    pub checked: Checked,
}

/// Checks every module of a spec, in its order. `note` receives each warning about the model, `begin` the name of each
/// module before its check.
pub fn check(
    options: &CheckOptions<'_>,
    note: &dyn Fn(&str),
    begin: &dyn Fn(&str),
) -> Result<Vec<CheckedModule>, BuildError> {
    let CheckOptions {
        launcher,
        scratch,
        cancel,
        ..
    } = options;
    let work = |worker: &mut Worker| check_all(options, worker, note, begin);
    let names = Names::of(options.spec, &CommandLine::default());
    worker::with_single_worker(launcher, scratch, "check", names, cancel, work)
        .map_err(|error| in_spec(options.spec, error))
}

fn check_all(
    options: &CheckOptions<'_>,
    worker: &mut Worker,
    note: &dyn Fn(&str),
    begin: &dyn Fn(&str),
) -> Result<Vec<CheckedModule>, BuildError> {
    let spec = options.spec;
    let file = spec
        .model
        .weights
        .file()
        .map(Checkpoint::open)
        .transpose()?;
    let files = file.as_ref().map_or(&[][..], Checkpoint::files);
    let opened = open_model(spec, &CommandLine::default(), files, worker)?;
    opened.notes.iter().for_each(|text| note(text));
    let mut found = Vec::new();
    for (index, module) in spec.modules.iter().enumerate() {
        let title = spec.title(index);
        begin(&title);
        found.push(one(options, module, title, Some(index), &opened, worker)?);
    }
    if options.all {
        for module in submodules(spec, &opened) {
            begin(&module.name);
            let title = module.name.clone();
            match one(options, &module, title, None, &opened, worker) {
                Ok(checked) => found.push(checked),
                // The model does not call it on its sample inputs, or not with tensors.
                Err(BuildError::Worker(error)) if error.code == "bad_input" => {
                    found.push(not_called(&module, error.message));
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

/// Returns a module for each submodule that the spec does not name.
fn submodules(spec: &Spec, opened: &Opened) -> Vec<Module> {
    let sizes = spec.modules.iter().find(|module| module.path.is_empty());
    let buckets = sizes.map_or_else(|| vec![Sizes::new()], |module| module.buckets.clone());
    let named = |path: &String| spec.modules.iter().any(|module| module.path == *path);
    let paths = opened
        .modules
        .keys()
        .filter(|path| !path.is_empty() && !named(path));
    let module = |path: &String| Module {
        name: path.clone(),
        path: path.clone(),
        method: "forward".to_owned(),
        inputs: None,
        state: vec![],
        buckets: buckets.clone(),
        regions: vec![],
        compile: Overrides::default(),
        gate: Default::default(),
        padding: Default::default(),
        train: None,
        pair: None,
    };
    paths.map(module).collect()
}

fn not_called(module: &Module, why: String) -> CheckedModule {
    CheckedModule {
        module: module.name.clone(),
        index: None,
        path: module.path.clone(),
        needed: false,
        bucket: String::new(),
        buckets: module.buckets.len(),
        checked: Checked {
            unknown: vec![why],
            ..Checked::default()
        },
    }
}

fn one(
    options: &CheckOptions<'_>,
    module: &Module,
    title: String,
    index: Option<usize>,
    opened: &Opened,
    worker: &mut Worker,
) -> Result<CheckedModule, BuildError> {
    let spec = options.spec;
    let declared = plan::declared(module, &opened.declared)?;
    let settings = spec
        .settings(module, &declared, &Overrides::default())
        .compile;
    let sizes = module.buckets.first().cloned().unwrap_or_default();
    let (inputs, structure) = match module.sized_inputs(&sizes) {
        Some(inputs) => (inputs, None),
        None => {
            let request = inputs_request(spec, module, &sizes);
            let sampled: Sampled = worker.call(&request, LIMIT, &mut |_| {})?;
            (sampled.inputs, Some(sampled.structure))
        }
    };
    let asked = forms(module, &settings)
        .into_iter()
        .find_map(|form| form.dynamic.filter(|_| form.compiled));
    let compiled = plan::left_to_eager(module, &settings).is_none();
    let request = Request::Check {
        module: ModuleRequest {
            name: module.name.clone(),
            path: module.path.clone(),
            method: module.method.clone(),
            inputs,
            state: module.sized_state(&sizes, &spec.modules),
            compiled,
            regions: if compiled {
                module.regions.clone()
            } else {
                vec![]
            },
            passes: settings.passes.clone(),
            dynamic: asked.map(|dims| dims.into_iter().collect::<BTreeMap<_, _>>()),
            structure,
            padding: module.padding,
            train: module.train.clone(),
            pair: module.pair.clone(),
        },
        sizes: sizes.clone(),
        buckets: module.buckets.clone(),
        samples: spec.model.samples.clone(),
        recompiles: options.recompiles,
        cost: options.cost,
    };
    let checked = worker.call(&request, LIMIT, &mut |_| {})?;
    Ok(CheckedModule {
        module: title,
        index,
        path: module.path.clone(),
        needed: index.is_some() && settings.fullgraph,
        bucket: form_name(&sizes, None, true),
        buckets: module.buckets.len(),
        checked,
    })
}
