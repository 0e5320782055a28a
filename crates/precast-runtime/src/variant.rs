//! The programs of one module that take the same inputs, and the table that picks one.

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};
use std::time::Instant;

use precast_store::{
    Device,
    record::{Calls, Program, Sizes, bounds_name},
};
use smallvec::SmallVec;

use super::{
    RuntimeError,
    dispatch::{Bucket, Route, Table},
    error::NoFit,
    ffi::{Handle, Handles, TensorRef, outside},
    layout::volume,
    loader::{Loader, Slot},
    options::Inputs,
    outputs::{Outputs, Rung, Served},
    pool::Wait,
    problem::Problem,
    program::{Ready, Sizes as Fill},
    stats::{ModuleStats, Seen},
    threads,
    validate::{Fit, Request, Signature},
};

/// How one call is to be answered.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub inputs: Inputs,
    pub wait: Wait,
}

pub(super) struct Variant {
    pub module: Arc<str>,
    pub signature: Signature,
    /// The names of its inputs, in order.
    pub names: Arc<[String]>,
    /// Those for one bucket, then those for every size within bounds: compiled ones, then eager ones.
    pub programs: Vec<Slot>,
    /// How many are for one bucket, and their sizes.
    buckets: usize,
    sizes: Arc<[Sizes]>,
    device: Device,
    loader: Arc<Loader>,
    routes: RwLock<Routes>,
    /// Whether some program is to be tried again.
    rests: AtomicBool,
    seen: Seen,
}

/// Which program answers a request; indices are into the variant's programs.
struct Routes {
    /// Buckets whose artifacts run, or that are eager by choice.
    first: Part,
    /// Buckets that eager answers because their artifacts do not load: asked after everything else that was compiled.
    last: Part,
}

struct Part {
    table: Table,
    programs: Vec<usize>,
}

impl Part {
    fn route(&self, request: &[i64]) -> Option<(usize, Rung)> {
        Some(match self.table.route(request)? {
            Route::Exact(at) => (self.programs[at], Rung::Exact),
            Route::Padded(at) => (self.programs[at], Rung::Padded),
        })
    }
}

impl Variant {
    /// Groups one module's programs by the inputs they take and builds a table for each group.
    pub fn group(slots: Vec<Slot>, loader: &Arc<Loader>) -> Result<Vec<Self>, RuntimeError> {
        let mut groups: Vec<(Signature, Vec<Slot>)> = Vec::new();
        for slot in slots {
            let program = &slot.program;
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
                Some((_, programs)) => programs.push(slot),
                None => groups.push((signature, vec![slot])),
            }
        }
        Ok(groups
            .into_iter()
            .map(|(signature, programs)| Self::new(signature, programs, loader))
            .collect())
    }

    fn new(signature: Signature, mut programs: Vec<Slot>, loader: &Arc<Loader>) -> Self {
        programs.sort_by_key(|slot| {
            (
                slot.program.dynamic.is_some(),
                slot.program.steps.is_empty(),
            )
        });
        let buckets = programs
            .iter()
            .filter(|slot| slot.program.dynamic.is_none())
            .count();
        let sizes = programs[..buckets]
            .iter()
            .map(|slot| slot.program.sizes.clone());
        let inputs = signature.inputs.iter();
        let (sizes, names) = (
            sizes.collect(),
            inputs.map(|spec| spec.name.to_string()).collect(),
        );
        let module = programs[0].program.module.as_str().into();
        let routes = RwLock::new(routes(&programs[..buckets]));
        Self {
            module,
            signature,
            names,
            programs,
            buckets,
            sizes,
            device: loader.device,
            loader: loader.clone(),
            routes,
            rests: AtomicBool::new(false),
            seen: Seen::default(),
        }
    }

    /// Checks inputs, picks a bucket, runs it.
    pub fn answer(&self, inputs: &[TensorRef<'_>], call: Call) -> Result<Outputs, RuntimeError> {
        let span = tracing::trace_span!(
            "run",
            module = &*self.module,
            device = %self.device,
            bucket = tracing::field::Empty,
            rung = tracing::field::Empty,
        );
        let _span = span.enter();
        let mut request: Request = SmallVec::from_elem(0, self.signature.dims.len());
        let (mut handles, copies) = self.check(inputs, call.inputs, &mut request)?;
        let (slot, ready, rung) = self.pick(&request, call.wait)?;
        if !span.is_disabled() {
            span.record("bucket", slot.program.bucket());
            span.record("rung", rung.name());
        }
        threads::find(self.device)?;
        // After the sizes, which bound how much there is to look at.
        self.check_values(&handles, &ready.plan.program)?;
        // Not before something answers requests of these sizes: a view of a few bytes can be larger than any memory.
        for input in copies {
            handles[input] = self.copied(input, &handles[input])?;
        }
        let sizes = match ready.plan.program.dynamic.is_some() {
            true => Fill::Dynamic(&request),
            false if ready.plan.program.sizes.values().eq(&request) => Fill::Exact,
            false => Fill::Padded(&request),
        };
        let timed = self.device == Device::Cpu && slot.counters.due();
        let begin = timed.then(Instant::now);
        let result = ready.run(handles, sizes, call.wait);
        let took = begin.map(|begin| begin.elapsed());
        match (&result, sizes) {
            (Err(_), _) => slot.counters.failed(),
            (Ok(_), Fill::Exact | Fill::Dynamic(_)) => slot.counters.whole(took),
            (Ok(_), Fill::Padded(_)) => {
                let asked = product(request.iter().copied());
                let computed = product(ready.plan.program.sizes.values().copied());
                slot.counters.padded(took, asked, computed);
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
        let (tensors, flags) = result?;
        Ok(Outputs {
            tensors,
            flags,
            served,
        })
    }

    /// Returns what answers a request, loading it if need be. A program that does not load is passed over: the ladder
    /// has another.
    fn pick(&self, request: &Request, wait: Wait) -> Result<(&Slot, &Ready, Rung), RuntimeError> {
        if self.rests.load(Relaxed) {
            self.wake();
        }
        loop {
            let choice = self.choose(request);
            let Some((index, rung)) = choice else {
                self.seen.add(request, None);
                return Err(self.no_bucket(request));
            };
            let slot = &self.programs[index];
            if let Some(ready) = slot.ready() {
                self.seen.add(request, choice);
                return Ok((slot, ready, rung));
            }
            // Each turn settles one program or lets it rest, so this ends.
            slot.load_in(&self.loader, wait)?;
            self.reroute();
        }
    }

    /// Tries programs again that have rested. Only one caller does: others go on with what there is.
    fn wake(&self) {
        let mut tried = false;
        for slot in self.programs.iter().filter(|slot| slot.rested()) {
            tried = true;
            if let Err(error) = slot.load_in(&self.loader, Wait::no()) {
                tracing::debug!(program = %slot.program.id.short(), %error, "a program rests on");
            }
        }
        if tried {
            self.reroute();
        }
    }

    /// Returns the program for a request, and the rung it stands on: exact, covering, dynamic, then eager.
    fn choose(&self, request: &[i64]) -> Option<(usize, Rung)> {
        let dynamic = |eager: bool| {
            let rest = self.programs.iter().enumerate().skip(self.buckets);
            rest.filter(|(_, slot)| !slot.lost() && slot.is_eager() == eager)
                .find(|(_, slot)| within(&slot.program, request))
                .map(|(index, _)| (index, Rung::Dynamic))
        };
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let found = routes
            .first
            .route(request)
            .or_else(|| dynamic(false))
            .or_else(|| routes.last.route(request))
            .or_else(|| dynamic(true));
        let (index, rung) = found?;
        match self.programs[index].is_eager() {
            true => Some((index, Rung::Eager)),
            false => Some((index, rung)),
        }
    }

    /// Returns the inputs, and which of them have to be copied before a kernel may read them.
    fn check(
        &self,
        inputs: &[TensorRef<'_>],
        policy: Inputs,
        request: &mut Request,
    ) -> Result<(Handles, SmallVec<[usize; 8]>), RuntimeError> {
        let (mut handles, mut copies) = (Handles::new(), SmallVec::new());
        for (i, (tensor, spec)) in inputs.iter().zip(&self.signature.inputs).enumerate() {
            // Checked and used are one and the same: nobody can change it in between.
            let handle = tensor.own();
            let meta = handle.meta();
            let bad = |problem| RuntimeError::BadInput {
                module: self.module.clone(),
                input: spec.name.clone(),
                problem,
            };
            let fit = self.signature.check(i, &meta, self.device, request);
            match fit.map_err(bad)? {
                Fit::AsIs => {}
                Fit::NeedsCopy if policy == Inputs::AsGiven => {
                    return Err(bad(spec.misfit(&meta, self.device)));
                }
                Fit::NeedsCopy => copies.push(i),
            }
            handles.push(handle);
        }
        Ok((handles, copies))
    }

    /// Refuses inputs in host memory with values that the program does not take, wherever the program runs.
    fn check_values(&self, inputs: &Handles, program: &Program) -> Result<(), RuntimeError> {
        for (given, input) in inputs.iter().zip(&program.inputs) {
            if let Some(bounds) = input.bounds
                && let Some(found) = outside(&given.meta(), bounds)
            {
                return Err(RuntimeError::BadInput {
                    module: self.module.clone(),
                    input: input.name.as_str().into(),
                    problem: Problem::Value {
                        position: Some(found.position),
                        value: Some(found.value),
                        bounds,
                    },
                });
            }
        }
        Ok(())
    }

    /// Makes the routes again from the programs that are loaded.
    pub fn reroute(&self) {
        let made = routes(&self.programs[..self.buckets]);
        *self.routes.write().unwrap_or_else(PoisonError::into_inner) = made;
        self.rests
            .store(self.programs.iter().any(Slot::rests), Relaxed);
    }

    /// Returns the program of exactly these sizes.
    pub fn exactly(&self, sizes: &Sizes) -> Option<&Ready> {
        let exact = |slot: &&Slot| slot.program.dynamic.is_none() && slot.program.sizes == *sizes;
        self.programs.iter().find(exact)?.ready()
    }

    pub fn stats(&self) -> ModuleStats {
        let row = |slot: &Slot| {
            let runner = match slot.ready() {
                Some(ready) => ready.runner(),
                None if slot.lost() => "none",
                None => "not loaded",
            };
            slot.counters.row(&slot.program.sizes, runner)
        };
        ModuleStats {
            module: self.module.to_string(),
            device: self.device.to_string(),
            buckets: self.programs.iter().map(row).collect(),
        }
    }

    /// Returns what was asked for and what answered, for `precast stats`.
    pub fn counts(&self) -> Vec<Calls> {
        let programs = self.programs.iter().map(|slot| &slot.program);
        let buckets: Vec<Option<&Sizes>> = programs
            .map(|program| program.dynamic.is_none().then_some(&program.sizes))
            .collect();
        self.seen.rows(&self.module, &self.signature.dims, &buckets)
    }

    fn named(&self, request: &[i64]) -> Sizes {
        self.signature
            .dims
            .iter()
            .cloned()
            .zip(request.iter().copied())
            .collect()
    }

    fn copied(&self, input: usize, given: &Handle) -> Result<Handle, RuntimeError> {
        // Also where it goes to another device: what is not contiguous is made so here.
        threads::find(Device::Cpu)?;
        let meta = given.meta();
        let strides = self.signature.inputs[input].strides(meta.sizes());
        // It was checked: it has the dtype that the module takes.
        let dtype = meta.dtype().ok_or_else(|| meta.dtype_name().into());
        let copy = dtype.and_then(|dtype| {
            let copy = Handle::empty(meta.sizes(), &strides, dtype, self.device)?;
            copy.copy_from(given).map(|()| copy)
        });
        copy.map_err(|message| RuntimeError::Tensor {
            module: self.module.clone(),
            message,
        })
    }

    /// Returns the sizes that dynamic and eager programs answer, in words.
    fn free(&self) -> Box<[String]> {
        let slots = self.programs[self.buckets..].iter();
        slots
            .filter(|slot| !slot.lost())
            .filter_map(|slot| {
                let program = &slot.program;
                let sizes = bounds_name(program.dynamic.as_ref()?, &program.sizes);
                Some(format!("{} for {sizes}", program.bucket()))
            })
            .collect()
    }

    fn no_bucket(&self, request: &[i64]) -> RuntimeError {
        let lost = |slot: &&Slot| slot.lost() && answers(&slot.program, request);
        if let Some(slot) = self.programs.iter().find(lost)
            && let Some(cause) = self.loader.lost(&slot.program.id)
        {
            return RuntimeError::NothingLeft {
                module: self.module.clone(),
                request: self.named(request),
                cause,
            };
        }
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let first = &routes.first;
        let nearest = first.table.nearest(request);
        RuntimeError::NoBucket {
            module: self.module.clone(),
            request: self.named(request),
            known: self.sizes.clone(),
            free: self.free(),
            nearest: nearest.map(|(at, _)| self.programs[first.programs[at]].program.sizes.clone()),
            why: match nearest {
                Some((_, true)) => NoFit::PaddingRefused,
                _ => NoFit::TooLarge,
            },
        }
    }
}

fn routes(programs: &[Slot]) -> Routes {
    let part = |wanted: &dyn Fn(&Slot) -> bool| {
        let live = programs.iter().enumerate();
        let live = live.filter(|(_, slot)| !slot.lost() && wanted(slot));
        let (indices, slots): (Vec<usize>, Vec<&Slot>) = live.unzip();
        let bucket = |(slot, cost): (&&Slot, f64)| bucket(&slot.program, cost);
        Part {
            table: Table::new(slots.iter().zip(costs(&slots)).map(bucket).collect()),
            programs: indices,
        }
    };
    Routes {
        first: part(&|slot| !slot.substituted()),
        last: part(&Slot::substituted),
    }
}

/// Returns the cost of a call of each program, all in one unit: the seconds that the build's gate measured, or the number
/// of input elements where one of them has none.
fn costs(slots: &[&Slot]) -> Vec<f64> {
    let receipts = slots
        .iter()
        .map(|slot| slot.program.seconds(slot.is_eager()));
    let costs = receipts.collect::<Option<Vec<f64>>>();
    let volumes = || slots.iter().map(|slot| volume(&slot.program) as f64);
    let costs = costs.unwrap_or_else(|| volumes().collect());
    let sizes: Vec<&Sizes> = slots.iter().map(|slot| &slot.program.sizes).collect();
    at_most_covering(&sizes, &costs)
}

/// Returns costs where no bucket's is above that of one that covers it: a measurement that says otherwise is noise, and
/// would send requests to the larger bucket.
fn at_most_covering(sizes: &[&Sizes], costs: &[f64]) -> Vec<f64> {
    let covers = |a: &Sizes, b: &Sizes| a.values().zip(b.values()).all(|(a, b)| a >= b);
    let cheapest = |small: &&Sizes| {
        let pairs = sizes.iter().zip(costs);
        let covering = pairs.filter(|(large, _)| covers(large, small));
        covering
            .map(|(_, &cost)| cost)
            .fold(f64::INFINITY, f64::min)
    };
    sizes.iter().map(cheapest).collect()
}

/// Returns whether a program answers requests of these sizes once it is loaded.
fn answers(program: &Program, request: &[i64]) -> bool {
    match program.dynamic.is_some() {
        true => within(program, request),
        false => bucket(program, 0.0).takes(request),
    }
}

fn bucket(program: &Program, cost: f64) -> Bucket {
    let dims = program.sizes.keys();
    Bucket {
        sizes: program.sizes.values().copied().collect(),
        padded: dims.map(|dim| program.padding.allows(dim)).collect(),
        cost,
    }
}

/// Returns whether a dynamic program runs at these sizes, in the order of its dimensions.
fn within(program: &Program, request: &[i64]) -> bool {
    let Some(dynamic) = &program.dynamic else {
        return false;
    };
    program
        .sizes
        .iter()
        .zip(request)
        .all(|((dim, &sample), size)| match dynamic.get(dim) {
            Some(bounds) => (bounds.min..=bounds.max).contains(size),
            None => sample == *size,
        })
}

fn product(sizes: impl Iterator<Item = i64>) -> u64 {
    sizes.fold(1, |n, size| {
        n.saturating_mul(u64::try_from(size).unwrap_or(0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_never_costs_more_than_one_that_covers_it() {
        let size = |n: i64| Sizes::from([("n".to_owned(), n)]);
        let (small, large) = (size(1), size(8));
        let costs = |costs| at_most_covering(&[&small, &large], costs);
        assert_eq!(costs(&[9e-3, 4e-3]), [4e-3, 4e-3]);
        assert_eq!(costs(&[1e-3, 4e-3]), [1e-3, 4e-3]);
    }
}
