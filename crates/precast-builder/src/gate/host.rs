//! The gates of a release on another host than that of the build: under a newer torch.
//!
//! An artifact needs functions that newer versions of torch keep, so it may run there. Its gates decide: each program
//! is compared with eager under that torch, with the tolerances of its first gate. Inputs are drawn from the program's
//! record, and the program's own graph is eager. `prefill` and `decode` are compared in one session too. If all pass, the release is published again with the shim for that
//! torch, and every host with that torch runs the release from then on.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use precast_store::{
    Digest, Store, StoreError, Target,
    record::{Program, Release, Shim, Sizes},
};
use serde::Serialize;

use super::{ChainRequest, GateProcess, GateRequest, LIMIT, Samples, StoredWeights, chain};
use crate::{
    BuildError, GateCommand, Launcher,
    limits::{Limits, Stop},
    names::Names,
    shims::{self, CompiledShim},
    worker::{self, Worker},
};

/// The arguments of the gates of a host.
pub struct HostOptions<'a> {
    /// The store with the release.
    pub store: &'a Store,
    /// Starts a Python worker with the torch of the host, for its shim.
    pub launcher: Launcher,
    /// Starts the process that compares a program with eager.
    pub gate: GateCommand,
    /// Parent of private folders, which are removed at the end.
    pub scratch: PathBuf,
    /// Set from outside to end it early.
    pub cancel: Arc<AtomicBool>,
}

/// The result of one release.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GatedRelease {
    /// Name of the model.
    pub model: String,
    /// Number of the release that was gated.
    pub release: u64,
    /// Full version of the torch that it was built with.
    pub built_with: String,
    /// Full version of the torch of this host.
    pub torch: String,
    /// Its programs.
    pub programs: Vec<GatedProgram>,
    /// The comparison of `prefill` and `decode` in one session; none for a release without these modules.
    pub chain: Option<GatedChain>,
    /// Whether everything passed.
    pub passed: bool,
    /// Number of the release that may run here; none if a gate failed.
    pub runs_as: Option<u64>,
}

/// The result of one program.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GatedProgram {
    /// The request key.
    pub id: Digest,
    /// Name of the module.
    pub module: String,
    /// The bucket.
    pub bucket: String,
    /// Largest absolute difference from eager; none without a comparison.
    pub max_abs: Option<f64>,
    /// The reason of a failure.
    pub error: Option<String>,
}

/// The result of the comparison of `prefill` and `decode` with eager, call by call.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GatedChain {
    /// Number of compared tokens; none without a comparison.
    pub tokens: Option<u64>,
    /// The difference from eager, if there is one.
    pub error: Option<String>,
    /// The reason why they were not compared, if they were not.
    pub not_compared: Option<String>,
}

/// A release and its programs.
pub struct HostGates {
    /// The release.
    pub release: Release,
    /// The programs that the store has.
    pub programs: Vec<Program>,
}

impl HostGates {
    /// Reads the programs of a release.
    pub fn of(store: &Store, release: Release) -> Result<Self, StoreError> {
        let programs = release
            .programs
            .iter()
            .map(|id| store.records().program(id));
        let programs = programs
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        Ok(Self { release, programs })
    }

    /// Gates every program on a host, and publishes the release for it if all pass. Calls `each` with the result of
    /// each program. Also returns whether the release is new.
    pub fn run(
        self,
        options: &HostOptions<'_>,
        host: &Target,
        each: &mut dyn FnMut(&GatedProgram),
    ) -> Result<(GatedRelease, bool), BuildError> {
        let shim = shim(options, &self.release.model, host)?;
        let built_with = self.programs.first().map(|one| one.target.torch.clone());
        let mut gated = GatedRelease {
            model: self.release.model.clone(),
            release: self.release.seq,
            built_with: built_with.unwrap_or_default(),
            torch: host.torch.clone(),
            programs: Vec::new(),
            chain: None,
            passed: true,
            runs_as: None,
        };
        for program in &self.programs {
            let result = self.gate(options, &shim, program)?;
            gated.passed &= result.error.is_none();
            each(&result);
            gated.programs.push(result);
        }
        if gated.passed {
            gated.chain = self.chain(options, &shim)?;
            let error = gated.chain.as_ref().and_then(|chain| chain.error.as_ref());
            gated.passed = error.is_none();
        }
        if !gated.passed {
            return Ok((gated, false));
        }
        let (published, new) = publish(options.store, self.release, shim)?;
        gated.runs_as = Some(published.seq);
        Ok((gated, new))
    }

    /// Compares `prefill` and `decode` in one session with eager. None for a release without these modules.
    fn chain(
        &self,
        options: &HostOptions<'_>,
        shim: &Shim,
    ) -> Result<Option<GatedChain>, BuildError> {
        if !chain::has_chain(&self.programs) {
            return Ok(None);
        }
        let without = |why: &str| {
            Ok(Some(GatedChain {
                tokens: None,
                error: None,
                not_compared: Some(why.to_owned()),
            }))
        };
        // A module that its build did not compare has no gate in its receipts.
        let checked =
            |program: &Program| program.steps.is_empty() || program.receipt.gate_given.is_some();
        let tolerances = |program: &Program| {
            let given = program.receipt.gate_given.as_ref();
            given.map_or((None, None), |given| (given.rtol, given.atol))
        };
        let Some(programs) = chain::programs(self.programs.clone(), checked, tolerances) else {
            return without("a module has no graph that eager could run, or no gate");
        };
        let request = ChainRequest {
            store: options.store.path().to_owned(),
            chain: programs,
            shim: shim.clone(),
            weights: StoredWeights {
                object: self.release.weights,
                aliases: self.release.aliases.clone(),
            },
            tokens: chain::TOKENS,
        };
        let process = GateProcess {
            command: &options.gate,
            limits: &Limits::new(None),
            limit: LIMIT,
            stop: &Stop::new(&options.cancel),
        };
        let (tokens, error) = match process.ask(&request) {
            Ok(gate) if gate.steps.is_none() => {
                return without("a session can't call them with tokens alone");
            }
            Ok(gate) => (gate.steps, None),
            Err(BuildError::Interrupted) => return Err(BuildError::Interrupted),
            Err(BuildError::Gate { message, .. }) => (None, Some(message)),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(Some(GatedChain {
            tokens,
            error,
            not_compared: None,
        }))
    }

    fn gate(
        &self,
        options: &HostOptions<'_>,
        shim: &Shim,
        program: &Program,
    ) -> Result<GatedProgram, BuildError> {
        let (max_abs, error) = match self.compare(options, shim, program) {
            Ok(max_abs) => (max_abs, None),
            Err(BuildError::Interrupted) => return Err(BuildError::Interrupted),
            Err(BuildError::Gate { message, .. }) => (None, Some(message)),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(GatedProgram {
            id: program.id,
            module: program.module.clone(),
            bucket: program.bucket(),
            max_abs,
            error,
        })
    }

    /// Returns the largest difference to eager; none for a program without artifacts, which only runs.
    fn compare(
        &self,
        options: &HostOptions<'_>,
        shim: &Shim,
        program: &Program,
    ) -> Result<Option<f64>, BuildError> {
        let process = GateProcess {
            command: &options.gate,
            limits: &Limits::new(None),
            limit: LIMIT,
            stop: &Stop::new(&options.cancel),
        };
        let report = process.ask(&self.request(options, shim, program))?;
        if let Some(why) = report.exact().into_values().next() {
            return Err(BuildError::Gate {
                message: format!("a padded request differs from eager: {why}"),
                log: String::new(),
                far: false,
            });
        }
        let compared = report.outputs.as_ref().into_iter().flatten();
        Ok(compared
            .map(|output| output.max_abs.unwrap_or(0.0))
            .reduce(f64::max))
    }

    fn request(&self, options: &HostOptions<'_>, shim: &Shim, program: &Program) -> GateRequest {
        let first = program.receipt.gate_given.as_ref();
        let any_size = any_size(&self.programs, program).filter(|_| !program.steps.is_empty());
        let smaller = any_size.map_or_else(Vec::new, |any_size| smaller(program, any_size));
        GateRequest {
            store: options.store.path().to_owned(),
            program: program.clone(),
            others: vec![],
            exclusive: false,
            shim: shim.clone(),
            weights: self.release.weights,
            aliases: self.release.aliases.clone(),
            samples: Samples::Drawn {
                any_size: any_size.cloned().map(Box::new),
                smaller,
            },
            truth: None,
            steps: first.map_or(1, |given| given.steps),
            rtol: first.and_then(|given| given.rtol),
            atol: first.and_then(|given| given.atol),
            compute_dtypes: first
                .map(|given| given.compute_dtypes.clone())
                .unwrap_or_default(),
        }
    }
}

/// Returns the program with a graph for every size, of the same module and variant as `program`, if there is one.
fn any_size<'a>(programs: &'a [Program], program: &Program) -> Option<&'a Program> {
    programs.iter().find(|other| {
        other.title() == program.title() && other.dynamic.is_some() && other.eager.is_some()
    })
}

/// Returns sizes that are padded into the bucket, where padding is allowed, and that a graph takes: about half of each,
/// and one less.
fn smaller(program: &Program, any_size: &Program) -> Vec<Sizes> {
    if program.dynamic.is_some() {
        return vec![];
    }
    let less = |by: fn(i64) -> i64| -> Sizes {
        let sizes = program.sizes.iter().map(|(dim, &size)| {
            let less = by(size).clamp(1, size);
            let padded = program.padding.allows(dim);
            (dim.clone(), if padded { less } else { size })
        });
        sizes.collect()
    };
    let takes = |(dim, size): (&String, &i64)| {
        let bounds = any_size.dynamic.as_ref().and_then(|dims| dims.get(dim));
        bounds.is_some_and(|bounds| (bounds.min..=bounds.max).contains(size))
    };
    let mut all = vec![less(|size| size / 2 + 1), less(|size| size - 1)];
    all.retain(|sizes| *sizes != program.sizes && sizes.iter().all(takes));
    all.dedup();
    all
}

/// Returns the shim for a host's torch: the shim of an earlier release of the model, or a newly compiled one.
fn shim(options: &HostOptions<'_>, model: &str, host: &Target) -> Result<Shim, BuildError> {
    let HostOptions {
        store,
        launcher,
        scratch,
        cancel,
        ..
    } = options;
    if let Some(shim) = shims::known(store, model, host)? {
        return Ok(shim);
    }
    let compile = |worker: &mut Worker| {
        let hello = worker.hello(Names::none())?;
        if (&hello.torch, &hello.torch_git) != (&host.torch, &host.torch_git) {
            return Err(BuildError::OtherTorch {
                program: launcher.program.clone(),
                found: hello.torch,
                wanted: host.torch.clone(),
            });
        }
        let request = shims::request(host, worker.private());
        let compiled: CompiledShim = worker.call(&request, shims::LIMIT, &mut |_| {})?;
        shims::put(store, host, &compiled)
    };
    worker::with_single_worker(launcher, scratch, "shim", Names::none(), cancel, compile)
}

/// Publishes a release again, with one more shim. Returns it, and whether it is new.
fn publish(store: &Store, mut release: Release, shim: Shim) -> Result<(Release, bool), StoreError> {
    release.shims.retain(|other| !other.same_subject(&shim));
    release.shims.push(shim);
    store.releases().put(&release)
}
