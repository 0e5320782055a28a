//! The work of a build, spread over its workers.
//!
//! Each worker has a thread that takes the next job it may do: the first worker captures programs (it holds the
//! model), every worker compiles and gates. Longer compiles start first, as far as the size of the graph tells. An
//! artifact that several programs need is compiled once; a program is gated when the last of its artifacts is there.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    BuildError, Built, Options, Outcome,
    engine::{StoredWeights, provenance, reopen},
    gate,
    progress::{Event, Progress},
    protocol::{Captured, Compiled, ModuleRequest, Request, Sampled, Segment},
    worker::Worker,
};
use crate::{
    Digest,
    plan::{ArtifactKey, HeldKey, Item, Known, Plan},
    record::{
        Artifact, ArtifactKind, Eager, Failure, Layout, Padding, Program, SCHEMA, Sizes, Step,
    },
    spec::{FailPolicy, Module},
    store::StoreError,
};

const CAPTURE_LIMIT: Duration = Duration::from_secs(1800);
const COMPILE_LIMIT: Duration = Duration::from_secs(7200);

/// One program to make.
pub(super) struct Job<'a> {
    /// Index into the plan's items.
    pub index: usize,
    pub item: &'a Item,
    pub id: Digest,
    pub request: &'a Value,
}

/// What was done.
#[derive(Default)]
pub(super) struct Done {
    /// By index into the plan's items.
    pub outcomes: HashMap<usize, Outcome>,
    pub compiled: usize,
}

/// An artifact to compile.
struct Compile {
    key: Digest,
    explained: Value,
    segment: Segment,
    /// The job that asked for it first: its settings are those of the key.
    job: usize,
    /// What progress calls it.
    name: String,
}

/// A captured program that waits for its artifacts.
struct Waiting {
    captured: Captured,
    /// Key of each segment's artifact.
    keys: Vec<Digest>,
    missing: BTreeSet<Digest>,
    compiled: usize,
}

/// Inputs and outputs of an artifact.
#[derive(Default)]
struct Layouts {
    inputs: Vec<Layout>,
    outputs: Vec<Layout>,
}

enum Task {
    Capture(usize),
    Compile(Box<Compile>),
    Gate(usize),
}

#[derive(Default)]
struct Queue {
    captures: VecDeque<usize>,
    /// Sorted by size of the graph, the largest last.
    compiles: Vec<Compile>,
    gates: VecDeque<usize>,
    waiting: BTreeMap<usize, Waiting>,
    /// Artifacts that are queued or being compiled.
    pending: BTreeSet<Digest>,
    running: usize,
    done: Done,
    fatal: Option<BuildError>,
}

struct Shared<'a> {
    options: &'a Options<'a>,
    plan: &'a Plan,
    jobs: &'a [Job<'a>],
    weights: &'a StoredWeights,
    scratch: &'a Path,
    progress: &'a dyn Progress,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// Does `jobs`, starting with a worker that holds the model.
pub(super) fn run(
    options: &Options<'_>,
    plan: &Plan,
    jobs: &[Job<'_>],
    worker: Worker,
    weights: &StoredWeights,
    scratch: &Path,
    progress: &dyn Progress,
) -> Result<Done, BuildError> {
    let queue = Mutex::new(Queue {
        captures: (0..jobs.len()).collect(),
        ..Queue::default()
    });
    let shared = Shared {
        options,
        plan,
        jobs,
        weights,
        scratch,
        progress,
        queue,
        changed: Condvar::new(),
    };
    thread::scope(|scope| {
        let mut first = Some(worker);
        for number in 0..options.jobs.max(1) {
            let shared = &shared;
            let worker = first.take();
            scope.spawn(move || shared.serve(number, worker));
        }
    });
    let queue = shared
        .queue
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    match queue.fatal {
        Some(error) => Err(error),
        None => Ok(queue.done),
    }
}

impl Shared<'_> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes tasks until nothing is left that could bring more.
    fn serve(&self, number: usize, mut worker: Option<Worker>) {
        while let Some(task) = self.next(number) {
            let result = match task {
                Task::Capture(job) => self.capture(number, &mut worker, job),
                Task::Compile(compile) => self.compile(number, &mut worker, *compile),
                Task::Gate(job) => self.gate(number, job),
            };
            let mut queue = self.lock();
            queue.running -= 1;
            if let Err(error) = result {
                queue.fatal.get_or_insert(error);
            }
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn next(&self, number: usize) -> Option<Task> {
        let mut queue = self.lock();
        loop {
            if self.options.cancel.load(Ordering::Relaxed) {
                queue.fatal.get_or_insert(BuildError::Interrupted);
            }
            if queue.fatal.is_some() {
                return None;
            }
            let capture = if number == 0 {
                queue.captures.pop_front().map(Task::Capture)
            } else {
                None
            };
            let task = capture
                .or_else(|| queue.gates.pop_front().map(Task::Gate))
                .or_else(|| {
                    queue
                        .compiles
                        .pop()
                        .map(|compile| Task::Compile(Box::new(compile)))
                });
            if task.is_some() {
                queue.running += 1;
                return task;
            }
            if queue.running == 0 && queue.captures.is_empty() {
                return None;
            }
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs `body` between the two events of a task, and returns its result with the seconds it took.
    fn told<T>(&self, worker: usize, job: &str, what: &str, body: impl FnOnce() -> T) -> (T, f64) {
        self.progress.event(&Event::Begin { worker, job, what });
        let started = Instant::now();
        let result = body();
        let seconds = started.elapsed().as_secs_f64();
        self.progress.event(&Event::End {
            worker,
            job,
            what,
            seconds,
        });
        (result, seconds)
    }

    /// Asks this thread's worker, starting it where it isn't there, and returns the answer with what it logged.
    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        number: usize,
        worker: &mut Option<Worker>,
        request: &Request,
        limit: Duration,
    ) -> (Result<T, BuildError>, Vec<u8>) {
        let cancel = &self.options.cancel;
        let live = match worker {
            Some(live) => live,
            None => match Worker::start(
                &self.options.launcher,
                self.scratch,
                &format!("worker-{number}"),
                cancel,
            ) {
                Ok(started) => worker.insert(started),
                Err(error) => return (Err(error), vec![]),
            },
        };
        let captures = matches!(request, Request::Capture { .. });
        if captures
            && !live.opened
            && let Err(error) = reopen(self.options, live)
        {
            return (Err(error), vec![]);
        }
        let start = live.log_len();
        let mut phase = |phase: &str| {
            self.progress.event(&Event::Phase {
                worker: number,
                phase,
            })
        };
        let answer = live.call(request, limit, cancel, &mut phase);
        let log = live.log_since(start);
        if !matches!(answer, Ok(_) | Err(BuildError::Worker(_))) {
            // It is in an unknown state, or gone: the next task gets a fresh one.
            *worker = None;
        }
        (answer, log)
    }

    fn capture(
        &self,
        number: usize,
        worker: &mut Option<Worker>,
        job: usize,
    ) -> Result<(), BuildError> {
        let Job { item, id, .. } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
        let name = item.name(self.options.spec);
        let (inputs, structure) = match module.sized_inputs(&item.form.sizes) {
            Some(inputs) => (inputs, None),
            None => {
                let request = self.watch(module, &item.form.sizes);
                let ((answer, log), _) = self.told(number, "inputs", &name, || {
                    self.ask::<Sampled>(number, worker, &request, CAPTURE_LIMIT)
                });
                match answer {
                    Ok(sampled) => (sampled.inputs, Some(sampled.structure)),
                    Err(error) => return self.fail(job, error, &log),
                }
            }
        };
        let request = Request::Capture {
            module: ModuleRequest {
                name: module.name.clone(),
                path: module.path.clone(),
                method: module.method.clone(),
                inputs,
                regions: match item.form.compiled {
                    true => module.regions.clone(),
                    false => vec![],
                },
                passes: item.settings.compile.passes.clone(),
                dynamic: item.form.dynamic.clone(),
                structure,
            },
            sizes: item.form.sizes.clone(),
            out: self.scratch.join(format!("capture-{}", id.short())),
        };
        let ((answer, log), _) = self.told(number, "capture", &name, || {
            self.ask::<Captured>(number, worker, &request, CAPTURE_LIMIT)
        });
        match answer {
            Ok(captured) => self.captured(job, captured),
            Err(error) => self.fail(job, error, &log),
        }
    }

    /// Asks for inputs that the spec leaves out: from the samples it names, or from the model's own inputs where
    /// another module of it has them.
    fn watch(&self, module: &Module, sizes: &Sizes) -> Request {
        let model = &self.options.spec.model;
        let whole = self.options.spec.modules.iter().find(|other| {
            other.path.is_empty() && other.method == "forward" && other.inputs.is_some()
        });
        // The model's inputs at the smallest bucket, where the module has no sizes of its own.
        let inputs = whole.and_then(|whole| {
            let own = whole.buckets.first().cloned().unwrap_or_default();
            let mut at = own;
            at.extend(sizes.clone());
            whole.sized_inputs(&at)
        });
        Request::Inputs {
            path: module.path.clone(),
            method: module.method.clone(),
            samples: model.samples.clone(),
            inputs: inputs.unwrap_or_default(),
            sizes: sizes.clone(),
        }
    }

    /// Queues what must be compiled for a captured program.
    fn captured(&self, job: usize, captured: Captured) -> Result<(), BuildError> {
        let Job { item, .. } = &self.jobs[job];
        let Some(known) = &self.plan.known else {
            return Err(BuildError::Protocol {
                message: "captured before the target was known".to_owned(),
            });
        };
        let mut keys = Vec::new();
        let mut compiles = Vec::new();
        let segments = match item.form.compiled {
            true => &captured.segments[..],
            false => &[],
        };
        for (index, segment) in segments.iter().enumerate() {
            let settings = &item.settings.compile;
            let key = ArtifactKey {
                graph: &Digest::of(segment.graph.as_bytes()),
                inputs: &segment.inputs,
                outputs: &segment.outputs,
                constants: &segment.constants,
                backend: settings.backend,
                mode: settings.mode,
                options: &settings.options,
                passes: &[],
                target: &known.target,
            };
            let (key, explained) = key.explained();
            keys.push(key);
            if !self.options.store.keep_artifact(&key)?
                && compiles.iter().all(|c: &Compile| c.key != key)
            {
                let step = captured.steps.iter().find(|step| step.segment == index);
                let name = step.map_or_else(String::new, |step| step.name.clone());
                let name = format!("{} {name}", item.name(self.options.spec))
                    .trim_end()
                    .to_owned();
                compiles.push(Compile {
                    key,
                    explained,
                    segment: segment.clone(),
                    job,
                    name,
                });
            }
        }
        let module = &self.options.spec.modules[item.module].name;
        self.progress.event(&Event::Captured {
            module,
            bucket: &item.form.name(),
            steps: captured.steps.len(),
            artifacts: keys.iter().collect::<BTreeSet<_>>().len(),
            missing: compiles.len(),
        });
        let mut queue = self.lock();
        let missing: BTreeSet<Digest> = compiles.iter().map(|compile| compile.key).collect();
        let compiled = missing.len();
        for compile in compiles {
            if queue.pending.insert(compile.key) {
                queue.compiles.push(compile);
            }
        }
        queue
            .compiles
            .sort_by_key(|compile| compile.segment.graph.len());
        if missing.is_empty() {
            queue.gates.push_back(job);
        }
        queue.waiting.insert(
            job,
            Waiting {
                captured,
                keys,
                missing,
                compiled,
            },
        );
        Ok(())
    }

    fn compile(
        &self,
        number: usize,
        worker: &mut Option<Worker>,
        compile: Compile,
    ) -> Result<(), BuildError> {
        let key = compile.key;
        let store = self.options.store;
        // Another process may be at it: then its result is ours.
        let mut waiting = |_: &str| !self.options.cancel.load(Ordering::Relaxed);
        let Some(claim) = store.claim(&key, &mut waiting)? else {
            return Err(BuildError::Interrupted);
        };
        let made = match store.keep_artifact(&key)? {
            true => Ok(false),
            false => self.make(number, worker, compile)?,
        };
        drop(claim);
        let mut queue = self.lock();
        queue.pending.remove(&key);
        let asking = |queue: &Queue| -> Vec<usize> {
            let waiting = queue.waiting.iter();
            let asking = waiting.filter(|(_, waiting)| waiting.missing.contains(&key));
            asking.map(|(job, _)| *job).collect()
        };
        let asking = asking(&queue);
        match made {
            Ok(compiled) => {
                queue.done.compiled += usize::from(compiled);
                for job in asking {
                    let ready = queue.waiting.get_mut(&job).is_some_and(|waiting| {
                        waiting.missing.remove(&key);
                        waiting.missing.is_empty()
                    });
                    if ready {
                        queue.gates.push_back(job);
                    }
                }
                Ok(())
            }
            Err((error, log)) => {
                for job in &asking {
                    queue.waiting.remove(job);
                }
                drop(queue);
                let mut asking = asking.into_iter();
                asking.try_for_each(|job| self.fail_with(job, &error, &log))
            }
        }
    }

    /// Compiles and publishes one artifact. The inner error is one of this artifact alone.
    #[allow(clippy::type_complexity)]
    fn make(
        &self,
        number: usize,
        worker: &mut Option<Worker>,
        compile: Compile,
    ) -> Result<Result<bool, (BuildError, Vec<u8>)>, BuildError> {
        let settings = &self.jobs[compile.job].item.settings.compile;
        let request = Request::Compile {
            file: compile.segment.file.clone(),
            device: self.options.spec.target.device.to_string(),
            isa: self.options.spec.target.isa.clone(),
            mode: settings.mode.name().to_owned(),
            options: settings.options.clone().into_iter().collect(),
            out: self
                .scratch
                .join(format!("artifact-{}", compile.key.short())),
        };
        let ((answer, log), _) = self.told(number, "compile", &compile.name, || {
            self.ask::<Compiled>(number, worker, &request, COMPILE_LIMIT)
        });
        match answer {
            Ok(compiled) => {
                self.keep(compile, compiled, &log)?;
                Ok(Ok(true))
            }
            Err(error) if error.ends_build() => Err(error),
            Err(error) => Ok(Err((error, log))),
        }
    }

    /// Puts libraries of custom operators, and returns their digests in the same order.
    fn libraries(&self, paths: &[PathBuf]) -> Result<Vec<Digest>, StoreError> {
        let puts = paths.iter().map(|path| self.options.store.put_file(path));
        puts.map(|put| put.map(|(object, _)| object)).collect()
    }

    /// Puts an archive or constants of a program, and returns the key of the artifact that holds them.
    fn hold(
        &self,
        kind: ArtifactKind,
        file: &Path,
        known: &Known,
        layouts: Layouts,
        libraries: Vec<Digest>,
    ) -> Result<Digest, BuildError> {
        let store = self.options.store;
        let (object, size) = store.put_file(file)?;
        let (id, key) = HeldKey {
            kind,
            object: &object,
            libraries: &libraries,
            target: &known.target,
        }
        .explained();
        if !store.keep_artifact(&id)? {
            store.put_artifact(&Artifact {
                schema: SCHEMA,
                id,
                kind,
                object,
                size,
                target: known.target.clone(),
                inputs: layouts.inputs,
                outputs: layouts.outputs,
                constants: vec![],
                proxy: None,
                libraries,
                graph: None,
                log: None,
                key,
                receipt: json!({}),
                provenance: provenance(),
            })?;
        }
        Ok(id)
    }

    /// Takes the store's own copy of what a worker wrote, and publishes the artifact.
    fn keep(&self, compile: Compile, compiled: Compiled, log: &[u8]) -> Result<(), BuildError> {
        let store = self.options.store;
        let Some(known) = &self.plan.known else {
            return Err(BuildError::Protocol {
                message: "compiled before the target was known".to_owned(),
            });
        };
        let (object, size) = store.put_file(&compiled.library)?;
        let proxy = match &compiled.proxy {
            Some(path) => Some(store.put_file(path)?.0),
            None => None,
        };
        let libraries = self.libraries(&compile.segment.libraries)?;
        let log = match log.is_empty() {
            true => None,
            false => Some(store.put_bytes(log)?),
        };
        let graph = store.put_bytes(compile.segment.graph.as_bytes())?;
        let mut made = provenance();
        made["metadata"] = compiled.metadata;
        store.put_artifact(&Artifact {
            schema: SCHEMA,
            id: compile.key,
            kind: ArtifactKind::Library,
            object,
            size,
            target: known.target.clone(),
            inputs: compile.segment.inputs,
            outputs: compile.segment.outputs,
            constants: compile.segment.constants,
            proxy,
            libraries,
            graph: Some(graph),
            log,
            key: compile.explained,
            receipt: json!({ "seconds": compiled.seconds }),
            provenance: made,
        })?;
        Ok(())
    }

    fn gate(&self, number: usize, job: usize) -> Result<(), BuildError> {
        let Some(Waiting {
            captured,
            keys,
            compiled,
            ..
        }) = self.lock().waiting.remove(&job)
        else {
            return Ok(());
        };
        let (
            Some(known),
            Job {
                item, id, request, ..
            },
        ) = (&self.plan.known, &self.jobs[job])
        else {
            return Err(BuildError::Protocol {
                message: "gated before the target was known".to_owned(),
            });
        };
        let module = &self.options.spec.modules[item.module];
        let steps = match item.form.compiled {
            true => captured.steps,
            false => vec![],
        };
        let steps = steps.into_iter().map(|step| Step {
            name: step.name,
            artifact: keys[step.segment],
            inputs: step.inputs,
            outputs: step.outputs,
            binding: step.binding,
        });
        let layouts = Layouts {
            inputs: captured
                .inputs
                .iter()
                .map(|input| input.layout.clone())
                .collect(),
            outputs: captured
                .outputs
                .iter()
                .map(|output| output.layout.clone())
                .collect(),
        };
        // What runs the whole module needs what any of its pieces does.
        let paths = captured.segments.iter().flat_map(|s| &s.libraries);
        let paths: BTreeSet<&PathBuf> = paths.collect();
        let paths: Vec<PathBuf> = paths.into_iter().cloned().collect();
        let mut libraries = self.libraries(&paths)?;
        libraries.sort_unstable();
        libraries.dedup();
        let eager = match &captured.exported {
            Some(archive) => Some(Eager {
                artifact: self.hold(ArtifactKind::Archive, archive, known, layouts, libraries)?,
                weights: captured.exported_weights.clone(),
            }),
            None => None,
        };
        let constants = match &captured.extra_weights {
            Some(file) => Some(self.hold(
                ArtifactKind::Constants,
                file,
                known,
                Layouts::default(),
                vec![],
            )?),
            None => None,
        };
        let mut program = Program {
            schema: SCHEMA,
            id: *id,
            model: self.options.spec.model.name.clone(),
            module: module.name.clone(),
            sizes: item.form.sizes.clone(),
            dynamic: captured.dynamic.or_else(|| item.form.dynamic.clone()),
            target: known.target.clone(),
            inputs: captured.inputs,
            outputs: captured.outputs,
            results: captured.results,
            values: captured.values,
            steps: steps.collect(),
            eager,
            constants,
            padding: match captured.padding_refused {
                Some(why) => Padding::Refused { why },
                None => Padding::Allowed,
            },
            call_spec: captured.call_spec,
            request: (*request).clone(),
            receipt: receipt(captured.seconds, captured.receipt),
            provenance: provenance(),
        };
        let name = item.name(self.options.spec);
        if item.settings.compile.healthcheck {
            let candidate = gate::Candidate {
                store: self.options.store.path().to_owned(),
                program: program.clone(),
                weights: self.weights.object,
                aliases: self.weights.aliases.clone(),
                samples: captured.samples,
                steps: item.settings.compile.smoketest_steps,
                rtol: module.gate.rtol,
                atol: module.gate.atol,
            };
            let (verdict, _) = self.told(number, "gate", &name, || {
                gate::in_child(&self.options.gate, &candidate, &self.options.cancel)
            });
            match verdict {
                Ok(report) => program.receipt["gate"] = report,
                Err(error) => return self.fail(job, error, &[]),
            }
        }
        if let Some(path) = crate::plan::changed_source(&self.options.spec.root, &known.entry) {
            return self.fail(job, BuildError::SourceChanged { path }, &[]);
        }
        self.options.store.put_program(&program)?;
        let bucket = item.form.name();
        self.progress.event(&Event::Published {
            module: &module.name,
            bucket: &bucket,
            id: *id,
        });
        let artifacts = keys.iter().collect::<BTreeSet<_>>().len();
        let built = Built {
            id: *id,
            artifacts,
            compiled,
        };
        self.lock()
            .done
            .outcomes
            .insert(self.jobs[job].index, Outcome::Built(built));
        Ok(())
    }

    fn fail(&self, job: usize, error: BuildError, log: &[u8]) -> Result<(), BuildError> {
        match error.ends_build() {
            true => Err(error),
            false => self.fail_with(job, &error, log),
        }
    }

    /// Records that a program failed, with its log, so that `precast log` can show it.
    fn fail_with(&self, job: usize, error: &BuildError, log: &[u8]) -> Result<(), BuildError> {
        let Job {
            index, item, id, ..
        } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
        let bucket = item.form.name();
        let message = error.to_string();
        let location = match error {
            BuildError::Worker(error) => error.location.clone(),
            _ => None,
        };
        let mut text = format!("{message}\n").into_bytes();
        for part in [error.log().as_bytes(), log] {
            if !part.is_empty() {
                text.push(b'\n');
                text.extend_from_slice(part);
            }
        }
        let log = self.options.store.put_bytes(&text)?;
        self.options.store.put_failure(&Failure {
            schema: SCHEMA,
            id: *id,
            model: self.options.spec.model.name.clone(),
            module: module.name.clone(),
            bucket: bucket.clone(),
            sizes: item.form.sizes.clone(),
            code: error.code().to_owned(),
            message: message.clone(),
            location: location.clone(),
            hint: Some(error.hint()),
            log: Some(log),
            provenance: provenance(),
        })?;
        if item.form.optional() {
            let outcome = Outcome::Skipped { why: message };
            self.lock().done.outcomes.insert(*index, outcome);
            return Ok(());
        }
        self.progress.event(&Event::Failed {
            module: &module.name,
            bucket: &bucket,
            id: *id,
            message: &message,
            location: location.as_deref(),
        });
        let raise = item.settings.compile.fail_policy == FailPolicy::Raise;
        let outcome = Outcome::Failed {
            key: Some(*id),
            message,
            location,
            hint: error.hint(),
            raise,
        };
        self.lock().done.outcomes.insert(*index, outcome);
        Ok(())
    }
}

/// Puts what the worker measured of the module beside the seconds of its capture.
fn receipt(seconds: f64, measured: Value) -> Value {
    let mut receipt = json!({ "seconds": { "capture": seconds } });
    if let (Some(all), Value::Object(measured)) = (receipt.as_object_mut(), measured) {
        all.extend(measured);
    }
    receipt
}
