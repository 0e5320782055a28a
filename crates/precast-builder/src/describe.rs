//! `precast init`: finds the modules and inputs of a model, in a worker. It compiles nothing and uses no store.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use precast_store::target::DeviceKind;

use super::{
    BuildError, Launcher,
    names::Names,
    protocol::{AskedInput, Described, Opened, Request},
    worker,
};

/// Maximum time for the creation and the description of the model.
const LIMIT: Duration = Duration::from_secs(1800);

/// The arguments of a description.
pub struct DescribeOptions {
    /// Starts the Python worker.
    pub launcher: Launcher,
    /// Parent of its private folder, which is removed at the end.
    pub scratch: PathBuf,
    /// The folder of the spec to be.
    pub root: PathBuf,
    /// `module:callable`.
    pub entry: String,
    /// The device of the model.
    pub device: DeviceKind,
    /// `module:callable` that gives sample inputs.
    pub samples: Option<String>,
    /// The inputs, if there is no such callable.
    pub inputs: Vec<AskedInput>,
    /// Set from outside to end it early.
    pub cancel: Arc<AtomicBool>,
}

/// Returns the opened model, and its modules and inputs for a new spec.
pub fn describe(options: &DescribeOptions) -> Result<(Opened, Described), BuildError> {
    let open = Request::Open {
        root: options.root.clone(),
        entry: options.entry.clone(),
        device: options.device.to_string(),
        also: options.samples.iter().cloned().collect(),
        weights: vec![],
        weights_name: None,
        unused_weights: vec![],
        context: None,
        unsaved: vec![],
    };
    let request = Request::Describe {
        samples: options.samples.clone(),
        inputs: options.inputs.clone(),
    };
    let DescribeOptions {
        launcher,
        scratch,
        cancel,
        ..
    } = options;
    let given = options.samples.iter().chain([&options.entry]);
    let names = Names {
        root: &options.root,
        names: given.cloned().collect(),
    };
    worker::with_single_worker(launcher, scratch, "init", names, cancel, |worker| {
        let opened = worker.call(&open, LIMIT, &mut |_| {})?;
        Ok((opened, worker.call(&request, LIMIT, &mut |_| {})?))
    })
}
