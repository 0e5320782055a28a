//! `[module.state]`: the tensors that stay from call to call, and their values in a new session.

use std::collections::BTreeSet;

use precast_store::record::{Input, Sizes};

use super::{
    Dim, Module, Spec,
    inputs::{Inputs, shape_of},
    reader::{KeyValue, Reader, Span},
};

/// A state that the spec names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Name of an input, or a glob of FQNs of buffers.
    pub name: String,
    /// Size or dimension of each axis of a buffer; none for the buffer's own shape.
    pub shape: Option<Vec<Dim>>,
    /// The value in a new session.
    pub first: FirstValue,
}

/// The value of a state in a new session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstValue {
    /// Zero everywhere.
    Zeros,
    /// The buffer's own values, which are in the weight set.
    Own,
    /// An output of the module of this name, once the session has called it.
    Module(String),
}

/// A state at one bucket, as keys and the worker have it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SizedState {
    /// Name of an input, or a glob of FQNs of buffers.
    pub name: String,
    /// The value in a new session.
    pub first: SizedFirst,
    /// Size of each axis of a buffer; none for the buffer's own.
    pub shape: Option<Vec<i64>>,
    /// The bucketed dimension of each axis, if it has one.
    pub dims: Vec<Option<String>>,
}

/// The value of a state in a new session, as keys and the worker have it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SizedFirst {
    /// Zero everywhere.
    Zeros,
    /// The buffer's own values.
    Own,
    /// An output of a module.
    Module(Filler),
}

/// A module whose outputs are the first values of states, at its first bucket.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Filler {
    /// Name of the module in the spec.
    pub name: String,
    /// FQN of the submodule, empty for the model itself.
    pub path: String,
    /// Name of the method.
    pub method: String,
    /// In call order.
    pub inputs: Vec<Input>,
}

impl Module {
    /// Returns the states at one bucket. `modules` are those of the spec.
    pub fn sized_state(&self, sizes: &Sizes, modules: &[Module]) -> Vec<SizedState> {
        let first = |value: &FirstValue| match value {
            FirstValue::Zeros => SizedFirst::Zeros,
            FirstValue::Own => SizedFirst::Own,
            FirstValue::Module(name) => {
                let filler = modules.iter().find(|module| module.name == *name);
                filler.map_or(SizedFirst::Zeros, |module| {
                    SizedFirst::Module(module.filler())
                })
            }
        };
        let sized = |state: &StateSpec| SizedState {
            name: state.name.clone(),
            first: first(&state.first),
            shape: (state.shape.as_ref())
                .map(|shape| shape.iter().map(|dim| dim.size(sizes)).collect()),
            dims: state.shape.iter().flatten().map(Dim::name).collect(),
        };
        self.state.iter().map(sized).collect()
    }

    fn filler(&self) -> Filler {
        let sizes = self.buckets.first().cloned().unwrap_or_default();
        Filler {
            name: self.name.clone(),
            path: self.path.clone(),
            method: self.method.clone(),
            inputs: self.sized_inputs(&sizes).unwrap_or_default(),
        }
    }
}

impl Spec {
    /// Returns globs of the buffers that are states and begin with other values than their own, sorted: the weight set
    /// lacks them.
    pub fn unsaved(&self) -> Vec<String> {
        let mut globs = BTreeSet::new();
        for module in &self.modules {
            let is_input = |name: &String| {
                module
                    .inputs
                    .iter()
                    .flatten()
                    .any(|input| input.name == *name)
            };
            let states = module.state.iter();
            for state in
                states.filter(|state| state.first != FirstValue::Own && !is_input(&state.name))
            {
                globs.insert(state.name.clone());
                if !module.path.is_empty() {
                    globs.insert(format!("{}.{}", module.path, state.name));
                }
            }
        }
        globs.into_iter().collect()
    }
}

/// Names of first values that are no module.
const WORDS: [&str; 2] = ["zeros", "own"];

/// The states with the places of their axes, in the order of the file.
pub(super) type States = Vec<(StateSpec, Vec<Span>)>;

/// Reads `[module.state]`. An input has its shape in `[module.inputs]`, and no value of its own.
pub(super) fn states<'t>(
    reader: &mut Reader<'t>,
    field: &KeyValue<'t>,
    inputs: Option<&Inputs>,
) -> Option<States> {
    let section = reader.table(field, "[module.state]")?;
    let mut states = Vec::new();
    for (name, place, field) in section.fields() {
        let state = one_state(reader, name, &field);
        let mut inputs = inputs.into_iter().flatten();
        let is_input = inputs.any(|(input, _)| input.name == name);
        let plain =
            |(state, _): &(StateSpec, _)| state.shape.is_none() && state.first != FirstValue::Own;
        if is_input && !state.as_ref().is_none_or(plain) {
            let message = format!("state `{name}` is an input, with its shape in [module.inputs]");
            let help = format!("write `{name} = \"zeros\"`, or the name of a module that fills it");
            reader.wrong_help(&place, message, help);
        }
        states.push(state);
    }
    states.into_iter().collect()
}

fn one_state<'t>(
    reader: &mut Reader<'t>,
    name: &str,
    field: &KeyValue<'t>,
) -> Option<(StateSpec, Vec<Span>)> {
    let name = name.to_owned();
    if let toml::de::DeValue::String(_) = field.value {
        let first = first_value(reader.string(field)?);
        let shape = None;
        return Some((StateSpec { name, shape, first }, vec![]));
    }
    let section = reader.table(field, &format!("state `{name}`"))?;
    reader.check_keys(&section, &["first", "shape"], &[]);
    let first = match section.field("first") {
        Some(field) => Some(first_value(reader.string(&field)?)),
        None => None,
    };
    let shape = match (&first, section.field("shape")) {
        (Some(_), None) => None,
        _ => reader.required(&section, "shape", "shape = [1, 8, \"context\", 64]"),
    };
    let (shape, places) = match shape {
        Some(field) => shape_of(reader, &field).map(|(shape, places)| (Some(shape), places))?,
        None if first.is_some() => (None, vec![]),
        None => return None,
    };
    let first = first.unwrap_or(FirstValue::Zeros);
    Some((StateSpec { name, shape, first }, places))
}

fn first_value(text: &str) -> FirstValue {
    match text {
        "zeros" => FirstValue::Zeros,
        "own" => FirstValue::Own,
        module => FirstValue::Module(module.to_owned()),
    }
}

/// Reports first values that no module of the spec can give. `item` is the entry of `module`.
pub(super) fn check_fillers<'t>(
    reader: &mut Reader<'t>,
    item: &KeyValue<'t>,
    module: &Module,
    modules: &[Module],
) -> Option<()> {
    let section = reader.table(item, "[[module]]")?;
    let section = reader.table(&section.field("state")?, "[module.state]")?;
    for (name, _, field) in section.fields() {
        let first = match field.value {
            toml::de::DeValue::String(_) => Some(field),
            _ => reader.table(&field, "state")?.field("first"),
        };
        let Some(first) = first else { continue };
        let filler = reader.string(&first)?;
        if WORDS.contains(&filler) {
            continue;
        }
        if let Some((message, help)) = cannot_fill(name, module, filler, modules) {
            reader.wrong_help(&first.place, message, help);
        }
    }
    Some(())
}

/// Returns why a module can't fill a state of `module`, and a remedy.
fn cannot_fill(
    state: &str,
    module: &Module,
    filler: &str,
    modules: &[Module],
) -> Option<(String, String)> {
    let Some(found) = modules.iter().find(|other| other.name == filler) else {
        let message = format!("unknown first value `{filler}`");
        let others = modules.iter().filter(|other| other.name != module.name);
        let known = WORDS.into_iter().chain(others.map(|other| &*other.name));
        let known: Vec<String> = known.map(|name| format!("`{name}`")).collect();
        return Some((message, format!("known: {}", known.join(", "))));
    };
    let problem = |problem: &str, help: &str| {
        let message = format!("module `{filler}` can't fill state `{state}`: {problem}");
        Some((message, help.to_owned()))
    };
    let sized = |dim: &Dim| dim.name().is_some();
    let own = module.state.iter().find(|one| one.name == state)?;
    let inputs = module.inputs.iter().flatten();
    let input = inputs.into_iter().find(|input| input.name == state);
    let shape = own.shape.as_deref().or(input.map(|input| &*input.shape));
    if found.name == module.name {
        problem("it has the state itself", "name another module")
    } else if found.inputs.is_none() {
        let help = "write its inputs: the build calls it for samples";
        problem("it has no [module.inputs]", help)
    } else if !found.state.is_empty() {
        let help = "its outputs are the first values; leave out its [module.state]";
        problem("it has states", help)
    } else if shape.is_some_and(|shape| shape.iter().any(sized)) {
        problem("the state has bucketed dimensions", "write its sizes")
    } else {
        None
    }
}
