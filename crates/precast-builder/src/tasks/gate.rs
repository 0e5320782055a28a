//! Gates a captured program: assembles its record, and compares each of its candidates with eager.

use std::{collections::BTreeSet, path::PathBuf, time::Instant};

use precast_store::{
    Digest,
    record::{ArtifactKind, Dtype, Eager, Padding, Program, Provenance, SCHEMA, Shim, Step, Train},
};

use super::{CapturedProgram, capture};
use crate::{
    BuildError,
    gate::{GateRequest, Samples, StoredWeights, choice, reuse, tolerance},
    progress::Event,
    protocol::{Captured, CapturedStep, Request, Truth},
    publish::{self, Layouts},
    slot::{Context, Slot},
    task::{Action, Job, TaskFailure},
};

/// Gates a program. Returns its record, to be published.
pub(crate) fn gate(
    slot: &mut Slot<'_>,
    job: &Job<'_>,
    captured: CapturedProgram,
    weights: &StoredWeights,
    shim: &Shim,
) -> Result<Program, TaskFailure> {
    let CapturedProgram {
        captured,
        candidates,
        chosen_by,
        ..
    } = captured;
    let store = slot.context.options().store;
    let mut program = record(slot.context, job, &captured)?;
    if let Some(first) = candidates.first() {
        program.steps = steps(job, &captured.steps, &first.keys);
    }
    if job.item.settings.compile.healthcheck {
        let mut request = request(slot.context, job, &program, &captured, weights, shim);
        let started = Instant::now();
        let given = reuse::given(&request);
        let earlier = match &given {
            Some(given) => reuse::earlier(store, job, &program, &candidates, given)?,
            None => None,
        };
        program.receipt.gate_given = given;
        if let Some(earlier) = earlier {
            slot.context.event(&Event::GatedBefore {
                module: &job.module.name,
                bucket: &job.bucket,
                by: earlier.by,
            });
            program.receipt.gate = Some(earlier.gate);
            program.receipt.gated_by = Some(earlier.by);
            program.padding = earlier.padding;
        } else {
            let of = |keys: &[Digest]| steps(job, &captured.steps, keys);
            let mut unable = None;
            if in_half(job, &program, &captured) {
                match truth(slot, job, &captured, Dtype::Float32, RUNS)? {
                    Ok(file) => request.truth = Some(file),
                    Err(failure) => unable = Some(failure),
                }
            }
            let mut fastest = choice::fastest(slot, job, request.clone(), &candidates, &of);
            if let Err(error) = &fastest
                && let BuildError::Gate { far: true, .. } = error
            {
                let dtype = match in_half(job, &program, &captured) {
                    true => Dtype::Float32,
                    false => Dtype::Float64,
                };
                let found = match unable {
                    Some(failure) => Err(failure),
                    None => truth(slot, job, &captured, dtype, MORE_RUNS)?,
                };
                request.truth = Some(found.map_err(|failure| refused(error, failure))?);
                fastest = choice::fastest(slot, job, request.clone(), &candidates, &of);
            }
            let fastest = fastest?;
            let seconds = started.elapsed().as_secs_f64();
            program.receipt.took("gate", seconds);
            passed(slot, job, &mut program, &captured, request, fastest)?;
        }
    }
    if let Some(before) = chosen_by
        && let Some(before) = store.records().program(&before)?
    {
        program.receipt.tuned = before.receipt.tuned;
        let first = before.receipt.tuned_by;
        program.receipt.tuned_by = Some(first.unwrap_or(before.id));
    }
    Ok(program)
}

/// Runs of eager in which its distance from the truth is measured: at first, and where a value was refused.
const RUNS: u32 = 4;
const MORE_RUNS: u32 = 12;

/// Returns whether a program's values are all compared with the truth: those in half precision, without tolerances.
fn in_half(job: &Job<'_>, program: &Program, captured: &Captured) -> bool {
    let own = program.outputs.iter().map(|output| output.layout.dtype);
    let mut all = own.chain(captured.compute_dtypes.iter().copied().flatten());
    let module = job.module;
    let plain = module.gate.rtol.is_none() && module.gate.atol.is_none();
    let plain = plain && module.train.is_none() && module.pair.is_none();
    plain && job.item.form.compiled && all.any(Dtype::is_half)
}

/// Runs a module with more digits on the samples of its capture. Returns the file of the values, or why it can't run so.
fn truth(
    slot: &mut Slot<'_>,
    job: &Job<'_>,
    captured: &Captured,
    dtype: Dtype,
    runs: u32,
) -> Result<Result<PathBuf, TaskFailure>, TaskFailure> {
    let request = Request::Truth {
        module: capture::module_request(slot, job)?,
        sizes: job.item.form.sizes.clone(),
        samples: captured.samples.clone(),
        dtype,
        runs,
        out: (slot.context.workers.scratch).join(format!("truth-{}", job.id.short())),
    };
    match slot.ask::<Truth>(Action::Truth, &job.name, &request, capture::LIMIT) {
        Ok((found, _)) => Ok(Ok(found.file)),
        Err(failure) if failure.error.ends_build() => Err(failure),
        Err(failure) => Ok(Err(failure)),
    }
}

/// Returns a refusal by tolerances, with the reason for which the module can't run with more digits.
fn refused(error: &BuildError, failure: TaskFailure) -> TaskFailure {
    let (message, log) = match error {
        BuildError::Gate { message, log, .. } => (message.clone(), log.clone()),
        other => (other.to_string(), String::new()),
    };
    TaskFailure {
        error: BuildError::Gate {
            message: format!("{message}; {}", failure.error),
            log,
            far: false,
        },
        log: failure.log,
    }
}

/// Returns the steps of a program with the artifacts of a candidate; empty if eager runs it.
fn steps(job: &Job<'_>, calls: &[CapturedStep], keys: &[Digest]) -> Vec<Step> {
    let calls = calls.iter().filter(|_| job.item.form.compiled);
    let step = |step: &CapturedStep| Step {
        name: step.name.clone(),
        artifact: keys[step.segment],
        inputs: step.inputs.clone(),
        outputs: step.outputs.clone(),
        binding: step.binding.clone(),
    };
    calls.map(step).collect()
}

/// Returns the record of a program without its steps, and puts its graph and its constants into the store.
fn record(
    context: &Context<'_>,
    job: &Job<'_>,
    captured: &Captured,
) -> Result<Program, TaskFailure> {
    let (store, known) = (context.options().store, &context.model.known);
    let form = &job.item.form;
    let layouts = Layouts {
        inputs: (captured.inputs.iter())
            .map(|input| input.layout.clone())
            .collect(),
        outputs: (captured.outputs.iter())
            .map(|output| output.layout.clone())
            .collect(),
    };
    // The whole module needs the libraries of all its segments.
    let paths = captured.segments.iter().flat_map(|s| &s.libraries);
    let paths: BTreeSet<&PathBuf> = paths.collect();
    let paths: Vec<PathBuf> = paths.into_iter().cloned().collect();
    let mut libraries = publish::libraries(store, &paths)?;
    libraries.sort_unstable();
    libraries.dedup();
    let graph = ArtifactKind::Graph;
    let eager = match &captured.exported {
        Some(file) => Some(Eager {
            artifact: publish::held(store, graph, file, known, layouts, libraries)?,
            weights: captured.exported_weights.clone(),
        }),
        None => None,
    };
    let (constants, none) = (ArtifactKind::Constants, Layouts::default());
    let constants = match &captured.extra_weights {
        Some(file) => Some(publish::held(store, constants, file, known, none, vec![])?),
        None => None,
    };
    Ok(Program {
        schema: SCHEMA,
        id: job.id,
        model: context.options().spec.model.name.clone(),
        module: job.module.name.clone(),
        sizes: form.sizes.clone(),
        dynamic: captured.dynamic.clone().or_else(|| form.dynamic.clone()),
        target: known.target.clone(),
        inputs: captured.inputs.clone(),
        states: captured.states.clone(),
        outputs: captured.outputs.clone(),
        results: captured.results.clone(),
        checks: captured.checks.clone(),
        values: captured.values,
        steps: vec![],
        eager,
        constants,
        padding: Padding::new(&form.sizes, &captured.exact),
        train: job.module.train.as_ref().map(|train| Train {
            part: train.part,
            optimizer: train.optimizer.clone(),
        }),
        call_spec: captured.call_spec.clone(),
        request: job.request.clone(),
        receipt: captured.receipt.clone().receipt(captured.seconds),
        provenance: Provenance::now(),
    })
}

fn request(
    context: &Context<'_>,
    job: &Job<'_>,
    program: &Program,
    captured: &Captured,
    weights: &StoredWeights,
    shim: &Shim,
) -> GateRequest {
    GateRequest {
        store: context.options().store.path().to_owned(),
        program: program.clone(),
        others: vec![],
        exclusive: false,
        shim: shim.clone(),
        weights: weights.object,
        aliases: weights.aliases.clone(),
        samples: Samples::File(captured.samples.clone()),
        truth: None,
        steps: job.item.settings.compile.smoketest_steps,
        rtol: job.module.gate.rtol,
        atol: job.module.gate.atol.or_else(|| of_gradients(captured)),
        compute_dtypes: captured.compute_dtypes.clone(),
    }
}

/// Returns the absolute tolerance of gradients: a share of the largest one.
fn of_gradients(captured: &Captured) -> Option<f64> {
    let own = captured.outputs.iter().map(|output| output.layout.dtype);
    let inner = captured.compute_dtypes.iter().copied().flatten();
    let shares = own.chain(inner).map(|dtype| tolerance(dtype).1);
    captured
        .largest
        .map(|largest| shares.fold(0.0, f64::max) * largest)
}

/// Takes the results of a gate into the record. A program that seemed slower than eager is measured again.
fn passed(
    slot: &Slot<'_>,
    job: &Job<'_>,
    program: &mut Program,
    captured: &Captured,
    mut request: GateRequest,
    fastest: choice::Fastest,
) -> Result<(), TaskFailure> {
    let mut report = fastest.report;
    let mut exact = captured.exact.clone();
    exact.extend(report.exact());
    program.padding = Padding::new(&job.item.form.sizes, &exact);
    program.steps = fastest.steps;
    if !fastest.tuned.is_empty() {
        program.receipt.tuned = Some(fastest.tuned);
    }
    request.program.steps.clone_from(&program.steps);
    let started = Instant::now();
    if choice::measure_again(slot, &job.name, &mut request, &mut report)? {
        let seconds = started.elapsed().as_secs_f64();
        program.receipt.took("measure", seconds);
    }
    program.receipt.gate = Some(report);
    Ok(())
}
