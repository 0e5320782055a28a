//! The gate: a program is published only after it ran and its outputs were compared with eager.
//!
//! The candidate runs through the same runtime that production uses. It has a process of its own, so that a crash or a hang
//! affects no other candidate. Its objects and artifact records are in the store already. The program's record is not; the
//! process receives it from here.
//!
//! An output passes when it has eager's dtype and shape, no NaN and no infinity where eager has none, and each element
//! differs from eager's by at most `atol + rtol * |eager|`. A spec may set both. Otherwise they follow the coarsest dtype of
//! the computation (a float32 output of a bfloat16 convolution has the precision of bfloat16), with `atol` scaled by the
//! largest magnitude in eager's output.
//!
//! The gate then repeats the comparison at smaller sizes, which the runtime pads into the bucket. If a padded request
//! differs from eager at its own size, the program is published for its exact size only.
//!
//! A release that only has other weights passes a smoke run ([`SmokeRequest`]): each program runs with the weights of
//! before and with the new ones. Where an output was finite, it must be finite again.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use precast_store::{
    Digest,
    record::{Dtype, Program, Shim, Step, receipt::Gate},
};
use serde::{Deserialize, Serialize};

use super::{
    BuildError,
    launcher::WAIT_POLICY,
    lifeline,
    limits::{Limits, Stop, end_family},
};

/// How long a candidate may run.
pub(super) const LIMIT: Duration = Duration::from_secs(900);

/// The command that reads a [`Question`] as JSON on stdin and answers with a [`Verdict`] on stdout.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program to start.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// A program that is not published yet, the samples to compare it with, and the tolerances.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GateRequest {
    /// Path of the store that has the artifacts.
    pub store: PathBuf,
    /// The record of the candidate, which is not in the store yet.
    pub program: Program,
    /// The steps of other candidates, to be measured in turns with the program's.
    #[serde(default)]
    pub others: Vec<Vec<Step>>,
    /// Whether no other task of the build runs meanwhile: then it is measured for longer, and the result decides.
    #[serde(default)]
    pub exclusive: bool,
    /// The shim for this torch, whose objects are in the store.
    pub shim: Shim,
    /// Digest of the weight set in the store; none for a model without parameters and buffers.
    pub weights: Option<Digest>,
    /// Names of tied tensors -> the name under which the weight set holds them.
    pub aliases: BTreeMap<String, String>,
    /// Inputs `in.N` and eager's outputs `out.N`, as safetensors; `smaller.K.in.N` and `smaller.K.out.N` are the same at
    /// sizes inside the bucket.
    pub samples: PathBuf,
    /// How often to run it.
    pub steps: u32,
    /// Relative tolerance of the spec; none for that of the dtype.
    pub rtol: Option<f64>,
    /// Absolute tolerance of the spec; none for that of the dtype.
    pub atol: Option<f64>,
    /// For each output the coarsest dtype that it was computed in on the way, where that is below float32.
    #[serde(default)]
    pub computed_in: Vec<Option<Dtype>>,
}

/// Programs of a release, to be run with the weights of before and with others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SmokeRequest {
    /// Path of the store that has all of it.
    pub store: PathBuf,
    /// The programs.
    pub programs: Vec<Program>,
    /// The shim for this torch.
    pub shim: Shim,
    /// The weights of before; none where no release has the programs. Then only NaN is wrong.
    pub before: Option<StoredWeights>,
    /// The weights that are to be published.
    pub after: StoredWeights,
}

/// A weight set in the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredWeights {
    /// Its digest; none for a model without parameters and buffers.
    pub object: Option<Digest>,
    /// Names of tied tensors -> the name under which the weight set holds them.
    pub aliases: BTreeMap<String, String>,
}

/// The question to a gate's process.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Question {
    /// Whether a candidate agrees with eager.
    Compare(Box<GateRequest>),
    /// Whether programs run with other weights.
    Smoke(Box<SmokeRequest>),
}

/// What the gate found.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// The candidate may be published.
    Passed {
        /// What was measured, for the program's receipt.
        report: Box<Gate>,
    },
    /// The candidate is refused.
    Failed {
        /// The reason in one line.
        message: String,
    },
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

/// Asks a child process a [`Question`], and returns the report for a candidate's receipt.
pub(super) fn in_child(
    launcher: &Launcher,
    request: &impl Serialize,
    limits: &Limits,
    limit: Duration,
    stop: &Stop,
) -> Result<Gate, BuildError> {
    let failed = |message: String, log: &str| BuildError::Gate {
        message,
        log: log.to_owned(),
    };
    let mut command = Command::new(&launcher.program);
    command
        .args(&launcher.args)
        .env("OMP_WAIT_POLICY", WAIT_POLICY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let started = lifeline::spawn(&mut command);
    let (mut child, _lifeline) = started.map_err(|source| BuildError::NoPython {
        program: launcher.program.clone(),
        source,
    })?;
    let request = serde_json::to_vec(request).map_err(|e| BuildError::Protocol {
        message: e.to_string(),
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // In a thread: a child that loads libtorch does not read yet. A child that died early is found by its status.
        thread::spawn(move || stdin.write_all(&request));
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
        Ok(Verdict::Passed { report }) => Ok(*report),
        Ok(Verdict::Failed { message }) => Err(failed(message, &log)),
        Err(_) => Err(failed(
            format!("the process that checks it ended with {status}"),
            &log,
        )),
    }
}
