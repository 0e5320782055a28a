//! The answer of a call: tensors, and the program that made them.

use std::{fmt, ops::Deref, sync::Arc};

use precast_store::{
    Device,
    record::{Program, Sizes},
};
use smallvec::SmallVec;

use super::{RuntimeError, Tensor, flags::Flags, validate::Request};

/// The rung of the ladder that answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// The bucket of exactly the request's sizes.
    Exact,
    /// A larger bucket, padded.
    Padded,
    /// An artifact for every size within bounds.
    Dynamic,
    /// The exported graph, without Python.
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

/// The program that answered a call, and how.
#[derive(Clone)]
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

    /// Returns the bucket that answered. A program for every size within bounds has none.
    pub fn bucket(&self) -> Option<&Sizes> {
        (self.program.dynamic.is_none()).then_some(&self.program.sizes)
    }

    /// Returns its rung of the ladder.
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

    /// Returns the sizes of the request.
    pub fn request(&self) -> Sizes {
        let names = self.program.sizes.keys().cloned();
        names.zip(self.request.iter().copied()).collect()
    }
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served")
            .field("module", &self.program.module)
            .field("program", &self.program.id.short())
            .field("bucket", &self.bucket())
            .field("rung", &self.rung)
            .field("graph", &self.graph)
            .field("device", &self.device)
            .field("request", &self.request())
            .finish()
    }
}

/// The outputs of one call, in the module's order. They belong to the caller.
///
/// On CUDA a call returns before the device has checked the values of inputs on the device. If one of them is
/// out of bounds, the outputs are invalid: [`Self::array`] fails, and so does [`Self::check`], for callers that take
/// the tensors.
#[derive(Debug)]
pub struct Outputs {
    pub(super) tensors: SmallVec<[Tensor; 4]>,
    /// The device's notes of the call's values.
    pub(super) flags: Option<Arc<Flags>>,
    pub(super) served: Served,
}

impl Outputs {
    /// Returns the program that answered the call, and how.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Waits for the device's check of the call's values, and fails with [`RuntimeError::BadInput`] for an input out of
    /// bounds and with [`RuntimeError::CheckFailed`] for an index that the program computed. Then discard the outputs;
    /// later calls work.
    ///
    /// It waits only on CUDA, for a program that computes indices or whose inputs have bounds and were on the device.
    /// [`Self::array`] does the same first. Callers that use the tensors themselves, or pass them on, call this, or
    /// learn of a bad value by a later call ([`RuntimeError::EarlierCall`]).
    pub fn check(&self) -> Result<(), RuntimeError> {
        let Some(flags) = &self.flags else {
            return Ok(());
        };
        flags.check()
    }

    /// Takes the device's notes of the call's values, for a caller that reads them later instead of [`Self::check`].
    pub fn take_notes(&mut self) -> Option<Notes> {
        let flags = self.flags.take()?;
        flags.claim();
        Some(Notes(flags))
    }

    /// Returns name and tensor of each output.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        let names = self.served.program.outputs.iter();
        names.map(|output| output.name.as_str()).zip(&self.tensors)
    }

    /// Returns the tensors. Call [`Self::check`] before.
    pub fn into_vec(self) -> Vec<Tensor> {
        self.tensors.into_vec()
    }
}

/// The device's notes of one call's values, for a caller that reads them later.
#[derive(Debug)]
pub struct Notes(Arc<Flags>);

impl Notes {
    /// Waits for the notes, and fails as [`Outputs::check`] does.
    pub fn check(&self) -> Result<(), RuntimeError> {
        self.0.check()
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
