//! Nothing is published before it ran: a candidate program is run and compared with eager.
//!
//! The candidate runs through the same runtime that production uses, in a process of its own, so that an artifact that
//! crashes or hangs harms nothing. Its objects and artifact records are in the store already; the program's record is
//! not, and is handed over here.
//!
//! An output passes when it has eager's dtype and shape, no NaN and no infinity where eager has none, and each element
//! differs from eager's by at most `atol + rtol * |eager|`. A spec may say both; otherwise they follow the dtype, with
//! `atol` scaled by the largest magnitude in eager's output.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    BuildError,
    launcher::WAIT_POLICY,
    limits::{Limits, Stop, end_family},
};
use crate::{
    Digest,
    record::{Dtype, Program},
};

/// The command that reads a [`Candidate`] as JSON on stdin and answers with a [`Verdict`] on stdout.
#[derive(Clone, Debug)]
pub struct Launcher {
    pub program: PathBuf,
    pub args: Vec<OsString>,
}

/// A program that is not published yet, and what to compare it with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Candidate {
    pub store: PathBuf,
    pub program: Program,
    pub weights: Option<Digest>,
    pub aliases: BTreeMap<String, String>,
    /// Inputs `in.N` and eager's outputs `out.N`, as safetensors.
    pub samples: PathBuf,
    /// How often to run it.
    pub steps: u32,
    pub rtol: Option<f64>,
    pub atol: Option<f64>,
}

/// What the gate found.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    Passed { report: Value },
    Failed { message: String },
}

/// The tolerances of an output of this dtype where the spec says none; `atol` is to be scaled.
pub fn tolerance(dtype: Dtype) -> (f64, f64) {
    match dtype {
        Dtype::Float64 => (1e-7, 1e-8),
        Dtype::Float32 => (1e-4, 1e-5),
        Dtype::Float16 => (1e-2, 4e-3),
        Dtype::Bfloat16 => (4e-2, 2e-2),
        _ => (0.0, 0.0),
    }
}

/// Checks a candidate in a child process and returns the report for its receipt.
pub(super) fn in_child(
    launcher: &Launcher,
    candidate: &Candidate,
    limits: &Limits,
    limit: Duration,
    stop: &Stop,
) -> Result<Value, BuildError> {
    let failed = |message: String, log: &str| BuildError::Gate {
        message,
        log: log.to_owned(),
    };
    let start = |source| BuildError::NoPython {
        program: launcher.program.clone(),
        source,
    };
    let mut child = Command::new(&launcher.program)
        .args(&launcher.args)
        .env("OMP_WAIT_POLICY", WAIT_POLICY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(start)?;
    let request = serde_json::to_vec(candidate).map_err(|e| BuildError::Protocol {
        message: e.to_string(),
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A child that died early is found by its status.
        let _ = stdin.write_all(&request);
    }
    let collect = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut text = Vec::new();
            pipe.map(|mut pipe| pipe.read_to_end(&mut text));
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = collect(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let log = collect(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let started = Instant::now();
    let mut watch = limits.watch(child.id());
    let status = loop {
        if let Ok(Some(status)) = child.try_wait() {
            break status;
        }
        let ended = if stop.is_set() {
            Some(BuildError::Interrupted)
        } else if started.elapsed() > limit {
            let message = format!("it did not end within {} s", limit.as_secs());
            Some(failed(message, ""))
        } else {
            let greedy = watch.check();
            greedy.map(|what| failed(format!("it took too much memory: {what}"), ""))
        };
        if let Some(error) = ended {
            end_family(child.id());
            let _ = child.wait();
            return Err(error);
        }
        thread::sleep(Duration::from_millis(10));
    };
    let (out, log) = (
        out.join().unwrap_or_default(),
        log.join().unwrap_or_default(),
    );
    if let Some(signal) = status.signal() {
        return Err(failed(
            format!("it ended its process with signal {signal}"),
            &log,
        ));
    }
    match serde_json::from_str(&out) {
        Ok(Verdict::Passed { report }) => Ok(report),
        Ok(Verdict::Failed { message }) => Err(failed(message, &log)),
        Err(_) => Err(failed(
            format!("the process that checks it ended with {status}"),
            &log,
        )),
    }
}

#[cfg(feature = "torch")]
pub use check::check;

#[cfg(feature = "torch")]
mod check {
    //! The part that runs in the child.

    use std::time::{Duration, Instant};

    use serde_json::{Value, json};
    use tch::{Kind, Tensor};

    use super::{Candidate, Verdict, tolerance};
    use crate::{
        Device,
        record::{Dtype, Output, Program},
        runtime::{Model, Runtime, tensors},
        store::Store,
        target::DeviceKind,
    };

    type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

    /// Runs a candidate and judges it.
    pub fn check(candidate: &Candidate) -> Verdict {
        match report(candidate) {
            Ok(Ok(report)) => Verdict::Passed { report },
            Ok(Err(message)) => Verdict::Failed { message },
            Err(error) => Verdict::Failed {
                message: error.to_string(),
            },
        }
    }

    fn report(candidate: &Candidate) -> Fallible<Result<Value, String>> {
        let store = Store::open(&candidate.store)?;
        let device = match candidate.program.target.device {
            DeviceKind::Cpu => Device::Cpu,
            DeviceKind::Cuda => Device::Cuda(0),
        };
        let program = &candidate.program;
        // What is judged is the artifact: nothing may answer in its place.
        let runtime = Runtime::new(&store, device)?.eager_fallback(false);
        let programs = vec![program.clone()];
        let model = runtime.load_programs(
            &program.model,
            programs,
            candidate.weights,
            candidate.aliases.clone(),
        )?;
        let mut samples = tensors::read(&std::fs::read(&candidate.samples)?)?;
        let mut take = |prefix: &str, count: usize| -> Fallible<Vec<Tensor>> {
            let named = (0..count).map(|i| format!("{prefix}.{i}"));
            named
                .map(|name| {
                    samples
                        .remove(&name)
                        .ok_or_else(|| format!("the samples lack `{name}`").into())
                })
                .collect()
        };
        let place = tensors::device(device);
        let inputs: Vec<Tensor> = take("in", program.inputs.len())?
            .iter()
            .map(|t| t.to_device(place))
            .collect();
        let expected: Vec<Tensor> = take("out", program.outputs.len())?;
        let mut outputs: Vec<Vec<Tensor>> = Vec::new();
        let started = Instant::now();
        for _ in 0..candidate.steps.max(1) {
            let out = model.run(&program.module, &inputs)?;
            outputs.push(out.iter().map(|t| t.to_device(tch::Device::Cpu)).collect());
        }
        let seconds = started.elapsed().as_secs_f64() / f64::from(candidate.steps.max(1));
        let mut rows = Vec::new();
        for (index, output) in program.outputs.iter().enumerate() {
            match compare(candidate, output, &outputs[0][index], &expected[index]) {
                Ok(row) => rows.push(row),
                Err(message) => return Ok(Err(format!("output `{}` {message}", output.name))),
            }
        }
        let same = |later: &Vec<Tensor>| later.iter().zip(&outputs[0]).all(|(a, b)| equal(a, b));
        let deterministic = outputs[1..].iter().all(same);
        let mut report = json!({
            "outputs": rows, "deterministic": deterministic, "steps": outputs.len(), "seconds_per_run": seconds,
        });
        let rival = exported(candidate, &runtime, &inputs, &expected);
        let models: Vec<&Model> = [&model].into_iter().chain(&rival).collect();
        for (name, (micros, runs)) in
            ["artifact", "eager"]
                .iter()
                .zip(latencies(&models, &program.module, &inputs, device)?)
        {
            report[format!("{name}_us")] = micros.into();
            report[format!("{name}_runs")] = runs.into();
        }
        Ok(Ok(report))
    }

    /// Returns the exported graph of a compiled program, where it runs and is right: at run time it may answer in the
    /// artifacts' place.
    fn exported(
        candidate: &Candidate,
        runtime: &Runtime,
        inputs: &[Tensor],
        expected: &[Tensor],
    ) -> Option<Model> {
        let program = Program {
            steps: vec![],
            ..candidate.program.clone()
        };
        if program.eager.is_none() || candidate.program.steps.is_empty() {
            return None;
        }
        let (name, module) = (program.model.clone(), program.module.clone());
        let outputs = program.outputs.clone();
        let (weights, aliases) = (candidate.weights, candidate.aliases.clone());
        let model = runtime
            .load_programs(&name, vec![program], weights, aliases)
            .ok()?;
        let got = model.run(&module, inputs).ok()?;
        let right = |(output, (got, expected)): (&Output, (&Tensor, &Tensor))| {
            compare(
                candidate,
                output,
                &got.to_device(tch::Device::Cpu),
                expected,
            )
            .is_ok()
        };
        let got: Vec<&Tensor> = got.iter().collect();
        let pairs = got.into_iter().zip(expected);
        outputs.iter().zip(pairs).all(right).then_some(model)
    }

    /// Returns the median microseconds of a call of each model, and of how many calls it is. They take turns, so that
    /// what else the machine does meets all of them alike.
    fn latencies(
        models: &[&Model],
        module: &str,
        inputs: &[Tensor],
        device: Device,
    ) -> Fallible<Vec<(f64, usize)>> {
        const RUNS: usize = 20;
        const LONGEST: Duration = Duration::from_secs(2);
        let mut taken: Vec<Vec<f64>> = vec![Vec::new(); models.len()];
        let begun = Instant::now();
        while taken[0].is_empty() || (taken[0].len() < RUNS && begun.elapsed() < LONGEST) {
            for (model, taken) in models.iter().zip(&mut taken) {
                let started = Instant::now();
                let out = model.run(module, inputs)?;
                if let Device::Cuda(ordinal) = device {
                    tch::Cuda::synchronize(i64::try_from(ordinal)?);
                }
                taken.push(started.elapsed().as_secs_f64() * 1e6);
                drop(out);
            }
        }
        let median = |mut taken: Vec<f64>| {
            taken.sort_by(f64::total_cmp);
            let middle = (taken[(taken.len() - 1) / 2] + taken[taken.len() / 2]) / 2.0;
            ((middle * 10.0).round() / 10.0, taken.len())
        };
        Ok(taken.into_iter().map(median).collect())
    }

    fn equal(a: &Tensor, b: &Tensor) -> bool {
        a.eq_tensor(b)
            .logical_or(&a.isnan().logical_and(&b.isnan()))
            .all()
            .int64_value(&[])
            == 1
    }

    fn compare(
        candidate: &Candidate,
        output: &Output,
        got: &Tensor,
        eager: &Tensor,
    ) -> Result<Value, String> {
        if got.size() != eager.size() || got.kind() != eager.kind() {
            return Err(format!(
                "is {:?} {:?}, eager's is {:?} {:?}",
                got.kind(),
                got.size(),
                eager.kind(),
                eager.size()
            ));
        }
        if !output.layout.dtype.is_float() {
            return match equal(got, eager) {
                true => Ok(json!({ "name": output.name, "equal": true })),
                false => Err("differs from eager's".to_owned()),
            };
        }
        let (got, eager) = (got.to_kind(Kind::Double), eager.to_kind(Kind::Double));
        let finite = eager.isfinite();
        if got
            .isfinite()
            .logical_not()
            .logical_and(&finite)
            .any()
            .int64_value(&[])
            == 1
        {
            return Err("has NaN or infinity where eager has none".to_owned());
        }
        let zero = Tensor::zeros_like(&eager);
        let (got, eager) = (
            got.where_self(&finite, &zero),
            eager.where_self(&finite, &zero),
        );
        let number = |t: Tensor| {
            if t.numel() == 0 {
                0.0
            } else {
                t.double_value(&[])
            }
        };
        let largest = if eager.numel() == 0 {
            0.0
        } else {
            number(eager.abs().max())
        };
        let (rtol, atol) = limits(candidate, output.layout.dtype, largest);
        let error = (&got - &eager).abs();
        let max_abs = if error.numel() == 0 {
            0.0
        } else {
            number(error.max())
        };
        let relative = &error / eager.abs().clamp_min(f64::MIN_POSITIVE.max(atol));
        let max_rel = if error.numel() == 0 {
            0.0
        } else {
            number(relative.max())
        };
        let norms = number((&got * &got).sum(Kind::Double)).sqrt()
            * number((&eager * &eager).sum(Kind::Double)).sqrt();
        let cosine = if norms > 0.0 {
            number((&got * &eager).sum(Kind::Double)) / norms
        } else {
            1.0
        };
        let beyond = number(
            (&error - (eager.abs() * rtol + atol))
                .gt(0.0)
                .sum(Kind::Double),
        );
        if beyond > 0.0 {
            return Err(format!(
                "differs from eager in {beyond} of {} elements (largest difference {max_abs:.3e}, rtol {rtol:.1e}, \
                 atol {atol:.1e}, cosine {cosine:.6})",
                error.numel()
            ));
        }
        Ok(json!({
            "name": output.name, "max_abs": max_abs, "max_rel": max_rel, "cosine": cosine, "rtol": rtol, "atol": atol,
        }))
    }

    fn limits(candidate: &Candidate, dtype: Dtype, largest: f64) -> (f64, f64) {
        let (rtol, atol) = tolerance(dtype);
        (
            candidate.rtol.unwrap_or(rtol),
            candidate.atol.unwrap_or(atol * largest.max(1e-30)),
        )
    }
}
