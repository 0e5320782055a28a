//! The programs of one module that take the same inputs, and the table that picks one.

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};
use std::time::Instant;

use precast_store::{
    Device,
    record::{self, Calls, Input, Sizes, bounds_name},
};
use smallvec::SmallVec;

use super::{
    RuntimeError,
    dispatch::{Bucket, Route, Table},
    error::NoFit,
    ffi::{Handle, Handles, TensorRef, outside},
    layout::volume,
    loaded::{Loaded, Sizes as Fill},
    loader::Loader,
    options::Inputs,
    outputs::{Outputs, Rung, Served},
    pool::Wait,
    program::Program,
    states::States,
    stats::{ModuleStats, Seen},
    threads,
    validate::{Fit, Request, Signature},
};

/// The checked inputs of one call.
pub(super) struct Checked {
    handles: Handles,
    /// Those that have to be copied before a kernel may read them.
    copies: SmallVec<[usize; 8]>,
    request: Request,
}

pub(super) struct Variant {
    pub module: Arc<str>,
    pub signature: Signature,
    /// The names of its inputs, in order.
    pub names: Arc<[String]>,
    /// Programs of one bucket, then programs for every size within bounds: compiled ones, then eager ones.
    pub programs: Vec<Program>,
    /// Number of programs for one bucket, and their sizes.
    buckets: usize,
    sizes: Arc<[Sizes]>,
    device: Device,
    loader: Arc<Loader>,
    routes: RwLock<Routes>,
    /// Whether the load of some program must be tried again.
    rests: AtomicBool,
    seen: Seen,
    /// Whether its programs have states, so that only sessions run them.
    keeps_states: bool,
}

/// The tables that choose a program for a request.
struct Routes {
    /// Buckets whose artifacts run, or that are eager by choice.
    first: Table,
    /// Buckets that eager answers because their artifacts do not load. They are tried after all other compiled
    /// programs.
    last: Table,
}

impl Variant {
    /// Groups one module's programs by the inputs they take and builds a table for each group.
    pub fn group(programs: Vec<Program>, loader: &Arc<Loader>) -> Result<Vec<Self>, RuntimeError> {
        let mut groups: Vec<(Signature, Vec<Program>)> = Vec::new();
        for program in programs {
            let record = &program.record;
            let dims: Vec<String> = record.sizes.keys().cloned().collect();
            let malformed = |reason| RuntimeError::Malformed {
                program: record.id,
                reason,
            };
            let signature = Signature::new(&record.inputs, &dims).map_err(malformed)?;
            match groups
                .iter_mut()
                .find(|(known, _)| known.agrees(&signature))
            {
                Some((_, programs)) => programs.push(program),
                None => groups.push((signature, vec![program])),
            }
        }
        Ok(groups
            .into_iter()
            .map(|(signature, programs)| Self::new(signature, programs, loader))
            .collect())
    }

    fn new(signature: Signature, mut programs: Vec<Program>, loader: &Arc<Loader>) -> Self {
        programs.sort_by_key(|p| (p.record.dynamic.is_some(), p.record.steps.is_empty()));
        let fixed = programs.iter().filter(|p| p.record.dynamic.is_none());
        let buckets = fixed.count();
        let sizes = programs[..buckets].iter().map(|p| p.record.sizes.clone());
        let inputs = signature.inputs.iter();
        let (sizes, names) = (
            sizes.collect(),
            inputs.map(|spec| spec.name.to_string()).collect(),
        );
        let module = programs[0].record.module.as_str().into();
        let keeps_states = programs.iter().any(|p| !p.record.states.is_empty());
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
            keeps_states,
        }
    }

    /// Picks a bucket for checked inputs, and runs it.
    pub fn answer(
        &self,
        inputs: Checked,
        wait: Wait,
        states: Option<&mut States>,
    ) -> Result<Outputs, RuntimeError> {
        let span = tracing::trace_span!(
            "run",
            module = &*self.module,
            device = %self.device,
            bucket = tracing::field::Empty,
            rung = tracing::field::Empty,
        );
        let _span = span.enter();
        let Checked {
            mut handles,
            copies,
            mut request,
        } = inputs;
        let states = if self.keeps_states {
            Some(self.states(states, &handles, &mut request)?)
        } else {
            None
        };
        let (index, loaded, rung) = self.pick(&request, wait)?;
        self.seen.add(&request, Some((index, rung)));
        let program = &self.programs[index];
        if !span.is_disabled() {
            span.record("bucket", program.record.bucket());
            span.record("rung", rung.name());
        }
        threads::find(self.device)?;
        // After the sizes, which limit the number of values to check.
        loaded.plan.check_values(&handles)?;
        // Not before something answers requests of these sizes: a view of a few bytes can be larger than any memory.
        for input in copies {
            handles[input] = self.copied(input, &handles[input])?;
        }
        let record = &loaded.plan.program;
        let sizes = if record.dynamic.is_some() {
            Fill::Dynamic(&request)
        } else if record.sizes.values().eq(&request) {
            Fill::Exact
        } else {
            Fill::Padded(&request)
        };
        let counters = &program.counters;
        let timed = self.device == Device::Cpu && counters.due();
        let begin = timed.then(Instant::now);
        let result = match states {
            None => loaded.serve(handles, sizes, wait),
            Some(states) => states.serve(loaded, handles, sizes),
        };
        let took = begin.map(|begin| begin.elapsed());
        match (&result, sizes) {
            (Err(_), _) => counters.failed(),
            (Ok(_), Fill::Exact | Fill::Dynamic(_)) => counters.whole(took),
            (Ok(_), Fill::Padded(_)) => {
                let asked = product(request.iter().copied());
                let computed = product(record.sizes.values().copied());
                counters.padded(took, asked, computed);
            }
        }
        let (program, graph) = (record.clone(), loaded.is_graph());
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
            flags: flags.map(Arc::new),
            served,
        })
    }

    /// Fails if a call of a session would refuse checked inputs, after calls of the modules `before`. Changes no state.
    pub fn check_call(
        &self,
        inputs: Checked,
        wait: Wait,
        states: &mut States,
        before: &[&str],
    ) -> Result<(), RuntimeError> {
        let (handles, mut request) = (inputs.handles, inputs.request);
        if self.keeps_states {
            self.states(Some(states), &handles, &mut request)?;
        }
        let (_, loaded, _) = self.pick(&request, wait)?;
        loaded.plan.check_values(&handles)?;
        states.readable(&loaded.plan.program, before)
    }

    /// Fails if the module has states.
    pub fn without_session(&self) -> Result<(), RuntimeError> {
        if self.keeps_states {
            let module = self.module.clone();
            return Err(RuntimeError::NeedsSession { module });
        }
        Ok(())
    }

    /// Returns the states that a call of a module with states runs on. Sizes that no input shows are those of the session,
    /// or larger ones that its positions need.
    fn states<'s>(
        &self,
        states: Option<&'s mut States>,
        inputs: &Handles,
        request: &mut Request,
    ) -> Result<&'s mut States, RuntimeError> {
        let Some(states) = states else {
            let module = self.module.clone();
            return Err(RuntimeError::NeedsSession { module });
        };
        states.usable()?;
        for (dim, size) in self.signature.dims.iter().zip(request) {
            let own = states.size(dim);
            if !self.signature.shows(dim) {
                *size = self.size_for(dim, own.unwrap_or(0), inputs);
            } else if let Some(own) = own.filter(|own| own != size) {
                return Err(RuntimeError::State {
                    state: dim.clone(),
                    problem: format!("it is {own} in this session, and {size} in the call"),
                });
            }
        }
        Ok(states)
    }

    /// Returns the smallest size of a dimension, from `least` on, that allows the values of all inputs within it; the
    /// largest size if no size does.
    fn size_for(&self, dim: &str, least: i64, inputs: &Handles) -> i64 {
        let specs = &self.programs[0].record.inputs;
        let within = |spec: &&Input| spec.within.as_deref() == Some(dim);
        let allows = |size: i64| {
            let pairs = specs.iter().zip(inputs);
            let mut pairs = pairs.filter(|(spec, _)| within(spec));
            pairs.all(|(_, given)| outside(&given.meta(), [i64::MIN, size]).is_none())
        };
        // A program for many sizes has one size in a dimension of its states.
        let records = self.programs.iter().map(|program| &program.record);
        let fixed = |record: &&Arc<record::Program>| {
            let dynamic = record.dynamic.as_ref();
            dynamic.is_none_or(|dynamic| !dynamic.contains_key(dim))
        };
        let sizes = records
            .filter(fixed)
            .filter_map(|record| record.sizes.get(dim).copied());
        let enough = sizes.clone().filter(|&size| size >= least && allows(size));
        enough.min().or(sizes.max()).unwrap_or(least)
    }

    /// Returns the number of the program for a request and its rung of the ladder: exact, covering, dynamic, then eager.
    /// Loads it if necessary. Skips a program that does not load.
    fn pick(&self, request: &Request, wait: Wait) -> Result<(usize, &Loaded, Rung), RuntimeError> {
        if self.rests.load(Relaxed) {
            self.wake();
        }
        let bucket = |table: &Table| match table.route(request)? {
            Route::Exact(index) => Some((index, Rung::Exact)),
            Route::Padded(index) => Some((index, Rung::Padded)),
        };
        let dynamic = |eager: bool| {
            let rest = self.programs.iter().enumerate().skip(self.buckets);
            rest.filter(|(_, program)| !program.lost() && program.is_eager() == eager)
                .find(|(_, program)| within(&program.record, request))
                .map(|(index, _)| (index, Rung::Dynamic))
        };
        loop {
            let found = {
                let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
                let found = bucket(&routes.first).or_else(|| dynamic(false));
                let found = found.or_else(|| bucket(&routes.last));
                found.or_else(|| dynamic(true))
            };
            let Some((index, rung)) = found else {
                self.seen.add(request, None);
                return Err(self.no_bucket(request));
            };
            let program = &self.programs[index];
            if let Some(loaded) = program.loaded() {
                let rung = if loaded.is_eager() { Rung::Eager } else { rung };
                return Ok((index, loaded, rung));
            }
            // Each round settles one program or lets it rest, so this ends.
            program.load_in(&self.loader, wait)?;
            self.reroute();
        }
    }

    /// Loads programs again whose pause is over. Only one caller does; others go on with the present programs.
    fn wake(&self) {
        let mut tried = false;
        for program in self.programs.iter().filter(|program| program.rested()) {
            tried = true;
            if let Err(error) = program.load_in(&self.loader, Wait::no()) {
                let program = program.record.id.short();
                tracing::debug!(%program, %error, "a program rests on");
            }
        }
        if tried {
            self.reroute();
        }
    }

    /// Checks inputs. The caller's own handles are not needed after it.
    pub fn check(&self, inputs: &[TensorRef<'_>], policy: Inputs) -> Result<Checked, RuntimeError> {
        let mut request: Request = SmallVec::from_elem(0, self.signature.dims.len());
        let (mut handles, mut copies) = (Handles::new(), SmallVec::new());
        for (i, (tensor, spec)) in inputs.iter().zip(&self.signature.inputs).enumerate() {
            // The same handle is checked and used: no other thread can change it in between.
            let handle = tensor.own();
            let meta = handle.meta();
            let bad = |problem| RuntimeError::BadInput {
                module: self.module.clone(),
                input: spec.name.clone(),
                problem,
            };
            let fit = spec.check(&meta, self.device, &self.signature.dims, &mut request);
            match fit.map_err(bad)? {
                Fit::AsIs => {}
                Fit::NeedsCopy if policy == Inputs::AsGiven => {
                    return Err(bad(spec.misfit(&meta, self.device)));
                }
                Fit::NeedsCopy => copies.push(i),
            }
            handles.push(handle);
        }
        Ok(Checked {
            handles,
            copies,
            request,
        })
    }

    /// Rebuilds the routes from the loaded programs.
    pub fn reroute(&self) {
        let routes = routes(&self.programs[..self.buckets]);
        *self.routes.write().unwrap_or_else(PoisonError::into_inner) = routes;
        self.rests
            .store(self.programs.iter().any(Program::rests), Relaxed);
    }

    /// Returns whether there is a program of exactly these sizes.
    pub fn has(&self, sizes: &Sizes) -> bool {
        self.sizes.contains(sizes)
    }

    /// Returns the program of exactly these sizes, loaded if need be.
    pub fn exactly(&self, sizes: &Sizes) -> Result<&Loaded, RuntimeError> {
        let mut programs = self.programs[..self.buckets].iter();
        let program = programs.find(|program| program.record.sizes == *sizes);
        if let Some(program) = program.filter(|program| program.loaded().is_none()) {
            program.load(&self.loader)?;
            self.reroute();
        }
        program.and_then(Program::loaded).ok_or_else(|| {
            let request: Request = sizes.values().copied().collect();
            self.no_bucket(&request)
        })
    }

    /// Loads all its programs.
    pub fn load(&self) -> Result<(), RuntimeError> {
        let mut programs = self.programs.iter();
        programs.try_for_each(|program| program.load(&self.loader))?;
        self.reroute();
        Ok(())
    }

    pub fn stats(&self) -> ModuleStats {
        let row = |program: &Program| {
            let runner = match program.loaded() {
                Some(loaded) => loaded.kind(),
                None if program.lost() => "none",
                None => "not loaded",
            };
            program.counters.row(&program.record.sizes, runner)
        };
        ModuleStats {
            module: self.module.to_string(),
            device: self.device.to_string(),
            buckets: self.programs.iter().map(row).collect(),
        }
    }

    /// Returns the requests and the programs that answered them, for `precast stats`.
    pub fn counts(&self) -> Vec<Calls> {
        let records = self.programs.iter().map(|program| &program.record);
        let buckets: Vec<Option<&Sizes>> = records
            .map(|record| record.dynamic.is_none().then_some(&record.sizes))
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
        // Also for a copy to another device: it is first made contiguous on the CPU.
        threads::find(Device::Cpu)?;
        let meta = given.meta();
        let strides = self.signature.inputs[input].strides(meta.sizes());
        // A checked input has a dtype that the module accepts.
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

    /// Returns the sizes that dynamic and eager programs answer, as text.
    fn free(&self) -> Box<[String]> {
        let programs = self.programs[self.buckets..].iter();
        programs
            .filter(|program| !program.lost())
            .filter_map(|program| {
                let record = &program.record;
                let sizes = bounds_name(record.dynamic.as_ref()?, &record.sizes);
                Some(format!("{} for {sizes}", record.bucket()))
            })
            .collect()
    }

    fn no_bucket(&self, request: &[i64]) -> RuntimeError {
        let lost = |program: &&Program| program.lost() && answers(&program.record, request);
        if let Some(program) = self.programs.iter().find(lost)
            && let Some(cause) = self.loader.lost(&program.record.id)
        {
            return RuntimeError::NothingLeft {
                module: self.module.clone(),
                request: self.named(request),
                cause,
            };
        }
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let nearest = routes.first.nearest(request);
        RuntimeError::NoBucket {
            module: self.module.clone(),
            request: self.named(request),
            known: self.sizes.clone(),
            free: self.free(),
            nearest: nearest.map(|(at, _)| self.programs[at].record.sizes.clone()),
            why: match nearest {
                Some((_, true)) => NoFit::PaddingRefused,
                _ => NoFit::TooLarge,
            },
        }
    }
}

fn routes(programs: &[Program]) -> Routes {
    let part = |wanted: &dyn Fn(&Program) -> bool| {
        let live = programs.iter().enumerate();
        let live = live.filter(|(_, program)| !program.lost() && wanted(program));
        let (indices, programs): (Vec<usize>, Vec<&Program>) = live.unzip();
        let costs = costs(&programs);
        let rows = indices.into_iter().zip(programs).zip(costs);
        Table::new(
            rows.map(|((at, p), cost)| bucket(at, &p.record, cost))
                .collect(),
        )
    };
    Routes {
        first: part(&|program| !program.substituted()),
        last: part(&Program::substituted),
    }
}

/// Returns the cost of a call of each program, all in one unit: the seconds that the build's gate measured, or the
/// number of input elements if one of the programs has no measurement.
fn costs(programs: &[&Program]) -> Vec<f64> {
    let seconds = |p: &&Program| p.record.seconds(p.is_eager());
    let costs = programs.iter().map(seconds).collect::<Option<Vec<f64>>>();
    let volumes = || programs.iter().map(|p| volume(&p.record) as f64);
    let costs = costs.unwrap_or_else(|| volumes().collect());
    let sizes: Vec<&Sizes> = programs.iter().map(|p| &p.record.sizes).collect();
    monotonic_costs(&sizes, &costs)
}

/// Returns costs in which no bucket is more expensive than a bucket that covers it: a measurement of the opposite is
/// noise, and would send requests to the larger bucket.
fn monotonic_costs(sizes: &[&Sizes], costs: &[f64]) -> Vec<f64> {
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
fn answers(program: &record::Program, request: &[i64]) -> bool {
    if program.dynamic.is_some() {
        within(program, request)
    } else {
        bucket(0, program, 0.0).takes(request)
    }
}

fn bucket(number: usize, program: &record::Program, cost: f64) -> Bucket {
    let dims = program.sizes.keys();
    Bucket {
        program: number,
        sizes: program.sizes.values().copied().collect(),
        padded: dims.map(|dim| program.padding.allows(dim)).collect(),
        cost,
    }
}

/// Returns whether a dynamic program runs at these sizes, in the order of its dimensions.
fn within(program: &record::Program, request: &[i64]) -> bool {
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
        let costs = |costs| monotonic_costs(&[&small, &large], costs);
        assert_eq!(costs(&[9e-3, 4e-3]), [4e-3, 4e-3]);
        assert_eq!(costs(&[1e-3, 4e-3]), [1e-3, 4e-3]);
    }
}
