//! The programs of one module that take the same inputs, and the table that picks one.

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::time::Instant;

use smallvec::SmallVec;
use tch::Tensor;

use super::{
    Inputs, RuntimeError,
    dispatch::{Bucket, Route, Table},
    error::NoFit,
    ffi::{Handle, Meta, share},
    lane::Handles,
    outputs::{Outputs, Rung, Served},
    program::{Ready, Sizes as Fill},
    runtime::volume,
    stats::{ModuleStats, Seen},
    validate::{Fit, Request, Signature},
    weights::tch_device,
};
use crate::{
    Device,
    inspect::stats::Calls,
    record::{Padding, Program, Sizes},
};

/// After so many calls the table is made again with what was measured.
const REFINE: u64 = 4096;

pub(super) struct Variant {
    pub module: Arc<str>,
    pub signature: Signature,
    /// Those for one bucket, then those for every size within bounds: compiled ones, then eager ones.
    pub programs: Vec<Ready>,
    /// How many are for one bucket.
    buckets: usize,
    device: Device,
    table: RwLock<Table>,
    calls: AtomicU64,
    seen: Seen,
}

impl Variant {
    /// Groups one module's programs by the inputs they take and builds a table for each group.
    pub fn group(programs: Vec<Ready>) -> Result<Vec<Self>, RuntimeError> {
        let mut groups: Vec<(Signature, Vec<Ready>)> = Vec::new();
        for ready in programs {
            let program = &ready.plan.program;
            let dims: Vec<String> = program.sizes.keys().cloned().collect();
            let malformed = |reason| RuntimeError::Malformed {
                program: program.id,
                reason,
            };
            let signature = Signature::new(&program.inputs, &dims).map_err(malformed)?;
            match groups
                .iter_mut()
                .find(|(known, _)| known.agrees(&signature))
            {
                Some((_, programs)) => programs.push(ready),
                None => groups.push((signature, vec![ready])),
            }
        }
        Ok(groups
            .into_iter()
            .map(|(signature, programs)| Self::new(signature, programs))
            .collect())
    }

    fn new(signature: Signature, mut programs: Vec<Ready>) -> Self {
        programs.sort_by_key(|ready| (ready.plan.program.dynamic.is_some(), ready.is_eager()));
        let buckets = programs
            .iter()
            .filter(|ready| ready.plan.program.dynamic.is_none())
            .count();
        let (module, device) = (programs[0].plan.module.clone(), programs[0].plan.device);
        let table = RwLock::new(table(&programs[..buckets]));
        let (calls, seen) = (AtomicU64::new(0), Seen::default());
        Self {
            module,
            signature,
            programs,
            buckets,
            device,
            table,
            calls,
            seen,
        }
    }

    /// Checks inputs, picks a bucket, runs it.
    pub fn answer(&self, inputs: &[&Tensor], policy: Inputs) -> Result<Outputs, RuntimeError> {
        let mut request: Request = SmallVec::from_elem(0, self.signature.dims.len());
        let handles = self.check(inputs, policy, &mut request)?;
        if self.calls.fetch_add(1, Relaxed) % REFINE == REFINE - 1 {
            self.refine();
        }
        let choice = self.choose(&request);
        self.seen.add(&request, choice);
        let (index, rung) = choice.ok_or_else(|| self.no_bucket(&request))?;
        let ready = &self.programs[index];
        let sizes = match ready.plan.program.dynamic.is_some() {
            true => Fill::Dynamic(&request),
            false if ready.plan.program.sizes.values().eq(&request) => Fill::Exact,
            false => Fill::Padded(&request),
        };
        let begin = (self.device == Device::Cpu).then(Instant::now);
        let result = ready.run(handles, sizes);
        let took = begin.map(|begin| begin.elapsed());
        match (&result, sizes) {
            (Err(_), _) => ready.counters.failed(),
            (Ok(_), Fill::Exact | Fill::Dynamic(_)) => ready.counters.whole(took),
            (Ok(_), Fill::Padded(_)) => {
                let asked = product(request.iter().copied());
                let computed = product(ready.plan.program.sizes.values().copied());
                ready.counters.padded(took, asked, computed);
            }
        }
        let (program, graph) = (ready.plan.program.clone(), ready.is_graph());
        let served = Served {
            program,
            rung,
            graph,
            device: self.device,
            request,
        };
        Ok(Outputs {
            tensors: result?,
            served,
        })
    }

    /// Returns the program for a request, and the rung it stands on: exact, covering, dynamic, then what only eager
    /// runs.
    fn choose(&self, request: &[i64]) -> Option<(usize, Rung)> {
        let route = self
            .table
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .route(request);
        let (index, rung) = match route {
            Some(Route::Exact(index)) => (index, Rung::Exact),
            Some(Route::Padded(index)) => (index, Rung::Padded),
            None => {
                let mut rest = self.programs.iter().enumerate().skip(self.buckets);
                let (index, _) = rest.find(|(_, ready)| ready.within(request))?;
                (index, Rung::Dynamic)
            }
        };
        Some((
            index,
            if self.programs[index].is_eager() {
                Rung::Eager
            } else {
                rung
            },
        ))
    }

    fn check(
        &self,
        inputs: &[&Tensor],
        policy: Inputs,
        request: &mut Request,
    ) -> Result<Handles, RuntimeError> {
        let mut handles = Handles::new();
        for (i, (tensor, spec)) in inputs.iter().zip(&self.signature.inputs).enumerate() {
            let meta = Meta::of(tensor);
            let bad = |problem| RuntimeError::BadInput {
                module: self.module.clone(),
                input: spec.name.clone(),
                problem,
            };
            handles.push(
                match self
                    .signature
                    .check(i, &meta, self.device, request)
                    .map_err(bad)?
                {
                    Fit::AsIs => share(tensor),
                    Fit::NeedsCopy if policy == Inputs::AsGiven => {
                        return Err(bad(spec.misfit(&meta, self.device)));
                    }
                    Fit::NeedsCopy => self.copied(i, tensor)?,
                },
            );
        }
        Ok(handles)
    }

    /// Makes the table again, with costs as they were measured.
    pub fn refine(&self) {
        let made = table(&self.programs[..self.buckets]);
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = made;
    }

    /// Returns the program of exactly these sizes.
    pub fn exactly(&self, sizes: &Sizes) -> Option<&Ready> {
        self.programs.iter().find(|ready| {
            ready.plan.program.dynamic.is_none() && ready.plan.program.sizes == *sizes
        })
    }

    pub fn names(&self) -> Vec<String> {
        self.signature
            .inputs
            .iter()
            .map(|spec| spec.name.to_string())
            .collect()
    }

    pub fn stats(&self) -> ModuleStats {
        let row = |ready: &Ready| {
            ready
                .counters
                .row(&ready.plan.program.sizes, ready.runner())
        };
        ModuleStats {
            module: self.module.to_string(),
            device: self.device.to_string(),
            buckets: self.programs.iter().map(row).collect(),
        }
    }

    /// Returns what was asked for and what answered, for [`crate::inspect::stats`].
    pub fn counts(&self) -> Vec<Calls> {
        let buckets: Vec<&Sizes> = self
            .programs
            .iter()
            .map(|ready| &ready.plan.program.sizes)
            .collect();
        self.seen.rows(&self.module, &self.signature.dims, &buckets)
    }

    fn sizes(&self, request: &[i64]) -> Sizes {
        self.signature
            .dims
            .iter()
            .cloned()
            .zip(request.iter().copied())
            .collect()
    }

    fn copied(&self, input: usize, tensor: &Tensor) -> Result<Handle, RuntimeError> {
        let text = |error: tch::TchError| RuntimeError::Tensor {
            module: self.module.clone(),
            message: error.to_string(),
        };
        let strides = self.signature.inputs[input].strides(&tensor.size());
        let options = (tensor.kind(), tch_device(self.device));
        let mut copy = Tensor::f_empty_strided(tensor.size(), strides, options).map_err(text)?;
        copy.f_copy_(tensor).map_err(text)?;
        Ok(copy.into())
    }

    fn no_bucket(&self, request: &[i64]) -> RuntimeError {
        let nearest = self
            .table
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .nearest(request);
        RuntimeError::NoBucket {
            module: self.module.clone(),
            request: self.sizes(request),
            known: self.programs[..self.buckets]
                .iter()
                .map(|ready| ready.plan.program.sizes.clone())
                .collect(),
            nearest: nearest.map(|(bucket, _)| self.programs[bucket].plan.program.sizes.clone()),
            why: match nearest {
                Some((_, true)) => NoFit::PaddingRefused,
                _ => NoFit::TooLarge,
            },
        }
    }
}

fn table(programs: &[Ready]) -> Table {
    let costs = costs(programs);
    let bucket = |(ready, cost): (&Ready, f64)| {
        let program = &ready.plan.program;
        let sizes = program.sizes.values().copied().collect();
        Bucket {
            sizes,
            paddable: program.padding == Padding::Allowed,
            cost,
        }
    };
    Table::new(programs.iter().zip(costs).map(bucket).collect())
}

/// Returns what a call of each program costs.
///
/// What this process measured counts first. For programs it has not measured, the receipts of the gate's runs are
/// scaled to it, or, where a receipt is missing, the number of input elements is. A bucket never costs more than one
/// that covers it: a measurement that says otherwise is noise, and would send requests to the larger one.
fn costs(programs: &[Ready]) -> Vec<f64> {
    let receipts: Option<Vec<f64>> = programs
        .iter()
        .map(|ready| receipt(&ready.plan.program))
        .collect();
    let base = receipts.unwrap_or_else(|| {
        programs
            .iter()
            .map(|ready| volume(&ready.plan.program) as f64)
            .collect()
    });
    let measured: Vec<Option<f64>> = programs
        .iter()
        .map(|ready| ready.counters.measured())
        .collect();
    let ratios: Vec<f64> = measured
        .iter()
        .zip(&base)
        .filter_map(|(m, b)| m.map(|m| m / b.max(f64::MIN_POSITIVE)))
        .collect();
    let scale = match ratios.is_empty() {
        true => 1.0,
        false => ratios.iter().sum::<f64>() / ratios.len() as f64,
    };
    let raw: Vec<f64> = measured
        .iter()
        .zip(&base)
        .map(|(m, b)| m.unwrap_or(b * scale))
        .collect();
    let covers = |a: &Sizes, b: &Sizes| a.values().zip(b.values()).all(|(a, b)| a >= b);
    let cheapest = |small: &Ready| {
        let sizes = &small.plan.program.sizes;
        let covering = programs
            .iter()
            .zip(&raw)
            .filter(|(large, _)| covers(&large.plan.program.sizes, sizes));
        covering
            .map(|(_, &cost)| cost)
            .fold(f64::INFINITY, f64::min)
    };
    programs.iter().map(cheapest).collect()
}

fn product(sizes: impl Iterator<Item = i64>) -> u64 {
    sizes.fold(1, |n, size| {
        n.saturating_mul(u64::try_from(size).unwrap_or(0))
    })
}

/// Returns the seconds a run took in the gate.
fn receipt(program: &Program) -> Option<f64> {
    let seconds = program
        .receipt
        .get("gate")?
        .get("seconds_per_run")?
        .as_f64()?;
    (seconds.is_finite() && seconds > 0.0).then_some(seconds)
}
