//! The programs of a module of kind `step`: the step itself or its two halves, and the loss alone.

use std::collections::BTreeSet;

use precast_store::{
    Digest,
    record::{Program, Train, TrainPart},
};

use crate::{Model, RuntimeError};

/// The programs of one such module of a model.
pub struct Steps<'m> {
    pub model: &'m Model,
    /// The module, as the spec names it.
    pub module: String,
    /// Its step, or the half with the gradients.
    pub train: Train,
}

impl<'m> Steps<'m> {
    /// Finds the programs of a module. Fails with [`RuntimeError::NoStep`] for one of another kind.
    pub fn find(model: &'m Model, module: &str) -> Result<Self, RuntimeError> {
        let Some(train) = step_of(model, module) else {
            let halves = format!(".{}", TrainPart::Gradients.name());
            let known = model.modules().into_iter().filter_map(|name| {
                let name = name.strip_suffix(&halves).unwrap_or(name);
                step_of(model, name).map(|_| name.to_owned())
            });
            return Err(RuntimeError::NoStep {
                module: module.to_owned(),
                known: known.collect(),
            });
        };
        Ok(Self {
            model,
            module: module.to_owned(),
            train: train.clone(),
        })
    }

    /// Returns the name of a part in the model.
    pub fn name_of(&self, part: TrainPart) -> String {
        name_of(&self.module, part)
    }

    /// Returns a program of a part.
    pub fn program(&self, part: TrainPart) -> Option<&'m Program> {
        program_of(self.model, &self.module, part)
    }

    /// Returns one program of each part.
    pub fn programs(&self) -> Vec<&'m Program> {
        let parts = [
            TrainPart::Step,
            TrainPart::Gradients,
            TrainPart::Update,
            TrainPart::Eval,
        ];
        parts
            .iter()
            .filter_map(|part| self.program(*part))
            .collect()
    }

    /// Returns the names of the states of a part.
    pub fn states_of(&self, part: TrainPart) -> Vec<String> {
        let states = self.program(part).into_iter();
        let states = states.flat_map(|program| &program.states);
        states.map(|state| state.name.clone()).collect()
    }

    /// Returns whether a program has this state.
    pub fn has_state(&self, name: &str) -> bool {
        let mut programs = self.programs().into_iter();
        programs.any(|program| program.states.iter().any(|state| state.name == name))
    }

    /// Returns the names of the weights that the programs read beside the states.
    pub fn weights(&self) -> BTreeSet<&'m str> {
        let programs = self.programs().into_iter();
        let read = programs.flat_map(|program| {
            let bound = program.steps.iter().flat_map(|step| step.binding.values());
            let eager = program.eager.iter().flat_map(|eager| &eager.weights);
            bound.chain(eager).map(String::as_str)
        });
        read.collect()
    }

    /// Returns a digest of the programs of all parts.
    pub fn digest(&self) -> Digest {
        let programs = self.programs();
        let ids = programs.iter().map(|program| program.id.to_string());
        let all: Vec<String> = ids.collect();
        Digest::of(all.join(" ").as_bytes())
    }
}

fn step_of<'m>(model: &'m Model, module: &str) -> Option<&'m Train> {
    let program = |part| program_of(model, module, part);
    let step = program(TrainPart::Step).or_else(|| program(TrainPart::Gradients));
    step.and_then(|program| program.train.as_ref())
}

fn name_of(module: &str, part: TrainPart) -> String {
    match part {
        TrainPart::Step => module.to_owned(),
        part => format!("{module}.{}", part.name()),
    }
}

fn program_of<'m>(model: &'m Model, module: &str, part: TrainPart) -> Option<&'m Program> {
    let is = |program: &&Program| {
        let train = program.train.as_ref();
        train.is_some_and(|train| train.part == part)
    };
    model.programs(&name_of(module, part)).into_iter().find(is)
}
