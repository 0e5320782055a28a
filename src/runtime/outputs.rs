//! What a call answers: tensors, and what made them.

use std::{ops::Deref, sync::Arc};

use smallvec::SmallVec;
use tch::Tensor;

use super::validate::Request;
use crate::{
    Device,
    record::{Program, Sizes},
};

/// Which rung of the ladder answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// The bucket of exactly the request's sizes.
    Exact,
    /// A larger bucket, padded.
    Padded,
    /// An artifact for every size within bounds.
    Dynamic,
    /// The exported graph, by libtorch's interpreter.
    Eager,
}

impl Rung {
    /// Returns the rung's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Padded => "padded",
            Self::Dynamic => "dynamic",
            Self::Eager => "eager",
        }
    }
}

/// What answered a call.
#[derive(Clone, Debug)]
pub struct Served {
    pub(super) program: Arc<Program>,
    pub(super) rung: Rung,
    pub(super) graph: bool,
    pub(super) device: Device,
    pub(super) request: Request,
}

impl Served {
    /// Returns the program that ran.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the sizes it was compiled for. Those of a dynamic program are the samples' it was captured with.
    pub fn bucket(&self) -> &Sizes {
        &self.program.sizes
    }

    /// Returns the rung of the ladder it stands on.
    pub fn rung(&self) -> Rung {
        self.rung
    }

    /// Returns whether it ran as one CUDA graph.
    pub fn graph(&self) -> bool {
        self.graph
    }

    /// Returns the device it ran on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the sizes that were asked for.
    pub fn request(&self) -> Sizes {
        let names = self.program.sizes.keys().cloned();
        names.zip(self.request.iter().copied()).collect()
    }
}

/// The outputs of one call, in the module's order. They belong to the caller.
#[derive(Debug)]
pub struct Outputs {
    pub(super) tensors: SmallVec<[Tensor; 4]>,
    pub(super) served: Served,
}

impl Outputs {
    /// Returns what answered the call.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Returns name and tensor of each output.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let names = self.served.program.outputs.iter();
        names.map(|output| output.name.as_str()).zip(&self.tensors)
    }

    /// Returns the tensors.
    pub fn into_vec(self) -> Vec<Tensor> {
        self.tensors.into_vec()
    }
}

impl Deref for Outputs {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.tensors
    }
}

impl IntoIterator for Outputs {
    type Item = Tensor;
    type IntoIter = smallvec::IntoIter<[Tensor; 4]>;

    fn into_iter(self) -> Self::IntoIter {
        self.tensors.into_iter()
    }
}
