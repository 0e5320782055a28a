//! Publishes artifacts, programs that passed their gate, and failures.
//!
//! The store takes its own copy of each file of a worker before the file is used. A program's record is published last, if
//! the program passed its gate and no source of the model has changed meanwhile.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Instant,
};

use precast_store::{
    Digest, StoreError,
    elf::Elf,
    record::{
        Artifact, ArtifactKind, CompileReceipt, Eager, Failure, Layout, Lenient, Padding, Program,
        Provenance, SCHEMA, Step, bounds_name, receipt::Seconds,
    },
};

use super::{
    BuildError, Built, Outcome,
    gate::{GateRequest, Samples, candidates::Candidate, sign_test},
    progress::Event,
    protocol::Compiled,
    regate,
    shims::harmless,
    task::{CapturedProgram, Compile},
    work::{Action, CompileFailure, Job, Work},
};
use crate::{
    plan::{HeldKey, Known},
    spec::FailPolicy,
};

/// Inputs and outputs of an artifact.
#[derive(Default)]
struct Layouts {
    inputs: Vec<Layout>,
    outputs: Vec<Layout>,
}

impl Work<'_> {
    /// Puts libraries of custom operators, and returns their digests in the same order.
    fn libraries(&self, paths: &[PathBuf]) -> Result<Vec<Digest>, StoreError> {
        let puts = paths
            .iter()
            .map(|path| self.options.store.objects().put_file(path));
        puts.map(|put| put.map(|(object, _)| object)).collect()
    }

    /// Puts the graph or constants of a program, and returns the key of the artifact that holds them.
    fn hold(
        &self,
        kind: ArtifactKind,
        file: &Path,
        known: &Known,
        layouts: Layouts,
        libraries: Vec<Digest>,
    ) -> Result<Digest, BuildError> {
        let store = self.options.store;
        let (object, size) = store.objects().put_file(file)?;
        let (id, key) = HeldKey {
            kind,
            object: &object,
            libraries: &libraries,
            target: &known.target,
        }
        .explained();
        if !store.records().keep_artifact(&id)? {
            store.records().put_artifact(&Artifact {
                schema: SCHEMA,
                id,
                kind,
                object,
                size,
                target: known.target.clone(),
                inputs: layouts.inputs,
                outputs: layouts.outputs,
                constants: vec![],
                prepared: vec![],
                proxy: None,
                libraries,
                imports: None,
                graph: None,
                log: None,
                key,
                receipt: CompileReceipt::default(),
                provenance: Provenance::now(),
            })?;
        }
        Ok(id)
    }

    /// Takes the store's own copy of what a worker wrote, and publishes the artifact.
    pub(super) fn keep(
        &self,
        compile: Compile,
        compiled: Compiled,
        log: &[u8],
    ) -> Result<(), BuildError> {
        let store = self.options.store;
        let Some(known) = &self.plan.known else {
            return Err(BuildError::Protocol {
                message: "compiled before the target was known".to_owned(),
            });
        };
        let (object, size) = store.objects().put_file(&compiled.library)?;
        let bytes = store.objects().read(&object)?;
        harmless("artifact", &bytes)?;
        let proxy = match &compiled.proxy {
            Some(path) => Some(store.objects().put_file(path)?.0),
            None => None,
        };
        let libraries = self.libraries(&compile.segment.libraries)?;
        let log = match log.is_empty() {
            true => None,
            false => Some(store.objects().put_bytes(log)?),
        };
        let graph = store
            .objects()
            .put_bytes(compile.segment.graph.as_bytes())?;
        let mut made = Provenance::now();
        made.metadata = compiled.metadata.into();
        store.records().put_artifact(&Artifact {
            schema: SCHEMA,
            id: compile.key,
            kind: ArtifactKind::Library,
            object,
            size,
            target: known.target.clone(),
            inputs: compile.segment.inputs,
            outputs: compile.segment.outputs,
            constants: compile.segment.constants,
            prepared: compiled.prepared,
            proxy,
            libraries,
            imports: Elf::parse(&*bytes).and_then(|elf| elf.imports()).ok(),
            graph: Some(graph),
            log,
            key: compile.explained,
            receipt: CompileReceipt {
                seconds: Seconds::from(compiled.seconds).into(),
                ..CompileReceipt::default()
            },
            provenance: made,
        })?;
        Ok(())
    }

    pub(super) fn gate(&self, number: usize, job: usize) -> Result<(), BuildError> {
        let Some(program) = self.lock().captured.remove(&job) else {
            return Ok(());
        };
        let CapturedProgram {
            captured,
            mut candidates,
            chosen_by,
            compiled,
        } = program;
        if let Some(failure) = self.refuse_candidates(&mut candidates) {
            return self.fail_with(job, &failure.0, &failure.1);
        }
        let (Some(known), Some(weights), Some(shim)) =
            (&self.plan.known, self.weights.get(), self.shim.get())
        else {
            return Err(BuildError::Protocol {
                message: "gated before the target, the weights and the shim were known".to_owned(),
            });
        };
        let Job {
            item, id, request, ..
        } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
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
            Some(graph) => Some(Eager {
                artifact: self.hold(ArtifactKind::Graph, graph, known, layouts, libraries)?,
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
        let (calls, compiled_form) = (captured.steps, item.form.compiled);
        let steps = |keys: &[Digest]| -> Vec<Step> {
            let calls = calls.iter().filter(|_| compiled_form);
            calls
                .map(|step| Step {
                    name: step.name.clone(),
                    artifact: keys[step.segment],
                    inputs: step.inputs.clone(),
                    outputs: step.outputs.clone(),
                    binding: step.binding.clone(),
                })
                .collect()
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
            checks: captured.checks,
            values: captured.values,
            steps: candidates
                .first()
                .map(|candidate| steps(&candidate.keys))
                .unwrap_or_default(),
            eager,
            constants,
            padding: Padding::new(&item.form.sizes, &captured.exact),
            call_spec: captured.call_spec,
            request: (*request).clone(),
            receipt: captured.receipt.receipt(captured.seconds),
            provenance: Provenance::now(),
        };
        let name = item.name(self.options.spec);
        if item.settings.compile.healthcheck {
            let given = GateRequest {
                store: self.options.store.path().to_owned(),
                program: program.clone(),
                others: vec![],
                exclusive: false,
                shim: shim.clone(),
                weights: weights.object,
                aliases: weights.aliases.clone(),
                samples: Samples::File(captured.samples),
                steps: item.settings.compile.smoketest_steps,
                rtol: module.gate.rtol,
                atol: module.gate.atol,
                computed_in: captured.computed_in,
            };
            let place = (module.name.as_str(), &*item.form.name());
            let started = Instant::now();
            let again = given.clone();
            let looked_at = regate::given(&given);
            let earlier = match &looked_at {
                Some(looked_at) => {
                    self.gated_before(&self.jobs[job], &program, &candidates, looked_at)?
                }
                None => None,
            };
            program.receipt.gate_given = looked_at.into();
            if let Some(earlier) = earlier {
                self.progress.event(&Event::GatedBefore {
                    module: &module.name,
                    bucket: &item.form.name(),
                    by: earlier.by,
                });
                program.receipt.gate = earlier.gate.into();
                program.receipt.gated_by = earlier.by.into();
                program.padding = earlier.padding;
                return self.publish(job, program, chosen_by, compiled);
            }
            match self.gate_candidates(number, place, &name, given, candidates, &steps) {
                Ok(fastest) => {
                    program.steps = fastest.steps;
                    let mut exact = captured.exact;
                    exact.extend(fastest.report.exact());
                    program.padding = Padding::new(&item.form.sizes, &exact);
                    program
                        .receipt
                        .took("gate", started.elapsed().as_secs_f64());
                    program.receipt.gate = fastest.report.into();
                    if !fastest.tuned.is_empty() {
                        program.receipt.tuned = fastest.tuned.into();
                    }
                    if let Err(error) = self.measure_again(number, &name, again, &mut program) {
                        return self.fail(job, error, &[]);
                    }
                }
                Err(error) => return self.fail(job, error, &[]),
            }
        }
        self.publish(job, program, chosen_by, compiled)
    }

    /// Refuses candidates with an artifact that could not be compiled. Returns the reason where no candidate is left.
    fn refuse_candidates(&self, candidates: &mut [Candidate]) -> Option<CompileFailure> {
        let state = self.lock();
        let mut first = None;
        for candidate in candidates.iter_mut() {
            if let Some(failure) = candidate
                .keys
                .iter()
                .find_map(|key| state.failures.get(key))
            {
                candidate
                    .refused
                    .get_or_insert_with(|| failure.0.to_string());
                first.get_or_insert_with(|| failure.clone());
            }
        }
        first.filter(|_| {
            candidates
                .iter()
                .all(|candidate| candidate.refused.is_some())
        })
    }

    /// Measures a program that seemed slower than eager again, with no other task running. That decides which of them answers.
    fn measure_again(
        &self,
        number: usize,
        name: &str,
        mut request: GateRequest,
        program: &mut Program,
    ) -> Result<(), BuildError> {
        let Lenient::Known(gate) = &mut program.receipt.gate else {
            return Ok(());
        };
        let beside = gate.turns.get().is_some_and(|turns| !turns.alone);
        if !sign_test::in_doubt(gate) || !beside {
            return Ok(());
        }
        self.progress.event(&Event::Again {
            worker: number,
            job: Action::Measure.name(),
            what: name,
            message: &sign_test::describe(gate),
        });
        request.program.steps.clone_from(&program.steps);
        request.exclusive = true;
        let started = Instant::now();
        let measured = self.gate_one(number, Action::Measure, name, &request)?;
        sign_test::put(gate, &measured, 0, true);
        let seconds = started.elapsed().as_secs_f64();
        program.receipt.took("measure", seconds);
        Ok(())
    }

    fn publish(
        &self,
        job: usize,
        mut program: Program,
        chosen_by: Option<Digest>,
        compiled: usize,
    ) -> Result<(), BuildError> {
        let Some(known) = &self.plan.known else {
            return Err(BuildError::Protocol {
                message: "published before the target was known".to_owned(),
            });
        };
        let Job { item, id, .. } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
        if let Some(before) = chosen_by
            && let Some(before) = self.options.store.records().program(&before)?
        {
            program.receipt.tuned = before.receipt.tuned;
            let first = before.receipt.tuned_by.get().copied();
            program.receipt.tuned_by = first.unwrap_or(before.id).into();
        }
        if let Some(path) = crate::plan::changed_source(&self.options.spec.root, &known.entry) {
            return self.fail(job, BuildError::SourceChanged { path }, &[]);
        }
        self.options.store.records().put_program(&program)?;
        let bucket = item.form.name();
        self.progress.event(&Event::Published {
            module: &module.name,
            bucket: &bucket,
            id: *id,
            slower: program.slower_than_eager(),
        });
        let artifacts = program.steps.iter().map(|step| step.artifact);
        let artifacts = artifacts.collect::<BTreeSet<_>>().len();
        let built = Built {
            id: *id,
            artifacts,
            compiled,
            gated_by: program.receipt.gated_by.get().copied(),
            padding_refused: program.padding.refusal(&program.sizes),
            narrowed: (program.dynamic.as_ref())
                .filter(|held| item.form.is_narrowed_by(held))
                .map(|held| bounds_name(held, &program.sizes)),
        };
        self.lock()
            .done
            .outcomes
            .insert(self.jobs[job].index, Outcome::Built(built));
        Ok(())
    }

    pub(super) fn fail(&self, job: usize, error: BuildError, log: &[u8]) -> Result<(), BuildError> {
        match error.ends_build() {
            true => Err(error),
            false => self.fail_with(job, &error, log),
        }
    }

    /// Records that a program failed, with its log, so that `precast log` can show it.
    pub(super) fn fail_with(
        &self,
        job: usize,
        error: &BuildError,
        log: &[u8],
    ) -> Result<(), BuildError> {
        let Job {
            index, item, id, ..
        } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
        let bucket = item.form.name();
        let message = error.to_string();
        let location = error.location(&self.options.spec.root);
        let mut text = format!("{message}\n").into_bytes();
        // What a worker left when it was ended is the end of the log, which may be there as a whole.
        let whole = match error {
            BuildError::Worker(_) | BuildError::Gate { .. } => false,
            _ => !log.is_empty(),
        };
        for part in [error.log().as_bytes(), log]
            .into_iter()
            .skip(usize::from(whole))
        {
            if !part.is_empty() {
                text.push(b'\n');
                text.extend_from_slice(part);
            }
        }
        let log = self.options.store.objects().put_bytes(&text)?;
        self.options.store.records().put_failure(&Failure {
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
            provenance: Provenance::now(),
        })?;
        if item.form.left_out(error.code(), &item.settings.compile) {
            self.progress.event(&Event::LeftOut {
                module: &module.name,
                bucket: &bucket,
                message: &message,
            });
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
