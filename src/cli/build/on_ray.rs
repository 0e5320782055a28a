//! `precast build --on ray`: other builders on the nodes of a Ray cluster, before this one.
//!
//! Each is a whole `precast build --remote … --push` on its node. They share the programs by leases in the remote, as builders
//! that a user starts. The Python of the build starts them (`python/precast/client/on_ray.py`) and passes on what they say.
//! Afterwards this build finds by key what they made, makes what is still missing, and publishes: the same release as
//! without them.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    sync::{atomic::Ordering, mpsc},
    thread,
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{super::exit::Refusal, BuildArgs};
use crate::{
    build::{
        self, BuildError, Options, Summary,
        progress::{Event, Progress},
    },
    store::target::DeviceKind,
};

/// The builders: what they are to do, and where.
pub(super) struct Builders<'a> {
    /// The arguments of this build.
    pub args: &'a BuildArgs,
    /// The cluster, as the user wrote it.
    pub cluster: &'a str,
    /// The place of the remote.
    pub remote: &'a str,
}

/// A line of the Python.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    /// What a builder said.
    Said {
        builder: usize,
        node: String,
        said: Value,
    },
    /// Something about the builders.
    Note { note: String },
    /// No builder can be started.
    Error { error: String, hint: String },
}

/// Reads `NAME=NUMBER`.
pub(super) fn resource(text: &str) -> Result<(String, f64), String> {
    let parsed = text.split_once('=').and_then(|(name, amount)| {
        let amount: f64 = amount.parse().ok()?;
        (!name.is_empty() && amount.is_finite() && amount > 0.0).then(|| (name.to_owned(), amount))
    });
    parsed.ok_or_else(|| "it is `NAME=NUMBER`, as `sm90=1`".to_owned())
}

/// Builds with the help of builders on a cluster, if the remote lacks anything.
pub(super) fn build(
    builders: &Builders<'_>,
    options: &mut Options<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<Summary> {
    options.locked = true;
    let looked = build::build(options, progress);
    options.locked = false;
    match looked {
        Err(BuildError::Locked { missing, .. }) => {
            share(builders, missing, options, progress)?;
        }
        Err(BuildError::LockedShim { .. }) => {}
        ended => return Ok(ended?),
    }
    Ok(build::build(options, progress)?)
}

/// Starts builders, and passes on what they say until there is nothing left for them to do.
fn share(
    builders: &Builders<'_>,
    missing: usize,
    options: &Options<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let python = builders.args.python.interpreter(&options.spec.root);
    let refused = |why: String| {
        let message = format!("`{}` can't start builders on Ray: {why}", python.display());
        let hint = "`pip install 'precast[ray]'` there, with the versions of the cluster; `--python` names another one";
        Refusal::usage(message, hint)
    };
    let mut child = Command::new(&python)
        .args(["-P", "-m", "precast.client.on_ray"])
        // Ctrl-C is for this process, which ends the other one.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| refused(error.to_string()))?;
    let (mut input, output) = (child.stdin.take(), child.stdout.take());
    let request = request(builders, missing, options);
    if let Some(input) = &mut input {
        // A Python that ended has said why.
        let _ = writeln!(input, "{request}").and_then(|()| input.flush());
    }
    let (send, lines) = mpsc::channel();
    let read = thread::spawn(move || {
        let lines = output.into_iter().flat_map(|it| BufReader::new(it).lines());
        lines
            .map_while(Result::ok)
            .all(|line| send.send(line).is_ok())
    });
    let (mut error, mut heard) = (None, false);
    loop {
        if options.cancel.load(Ordering::Relaxed) {
            // The end of its input has it end the builders.
            input.take();
        }
        match lines.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(Line::Said {
                    builder,
                    node,
                    said,
                }) => progress.event(&Event::Builder {
                    builder,
                    node: &node,
                    said: &said,
                }),
                Ok(Line::Note { note: message }) => {
                    heard = true;
                    progress.event(&Event::Note { message: &message });
                }
                Ok(Line::Error {
                    error: message,
                    hint,
                }) => error = Some(Refusal::usage(message, hint)),
                Err(_) => progress.event(&Event::Note { message: &line }),
            },
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    let _ = read.join();
    let status = child.wait()?;
    match error {
        _ if options.cancel.load(Ordering::Relaxed) => Err(BuildError::Interrupted.into()),
        Some(error) => Err(error.into()),
        None if heard && !status.success() => {
            let message =
                format!("builders on Ray ended with {status}: this machine makes what is missing");
            progress.event(&Event::Note { message: &message });
            Ok(())
        }
        None if !status.success() => Err(refused(format!("it ended with {status}")).into()),
        None => Ok(()),
    }
}

/// Returns the request: the arguments of each builder, and what it needs.
fn request(builders: &Builders<'_>, missing: usize, options: &Options<'_>) -> Value {
    let args = builders.args;
    let mut given = Vec::new();
    let mut give = |name: &str, value: Option<String>| {
        given.extend(value.map(|value| format!("--{name}={value}")));
    };
    give("remote", Some(builders.remote.to_owned()));
    give("only", args.spec.only.clone());
    for set in &args.spec.set {
        give("set", Some(set.clone()));
    }
    give("jobs", args.jobs.map(|jobs| jobs.to_string()));
    give("memory", args.memory.map(|bytes| bytes.to_string()));
    give("timeout", args.timeout.map(|seconds| seconds.to_string()));
    give("release", args.release.clone());
    for module in &args.without {
        give("without", Some(module.clone()));
    }
    let flags = [
        ("--push", true),
        ("--tune", args.spec.tune),
        ("--allow-lost", args.allow_lost),
        ("--untried-torch", args.python.untried_torch),
    ];
    given.extend(
        flags
            .into_iter()
            .filter(|(_, is)| *is)
            .map(|(flag, _)| flag.to_owned()),
    );
    let path = std::path::absolute(args.spec.file.path()).unwrap_or_default();
    json!({
        "cluster": builders.cluster,
        "spec": path,
        "arguments": given,
        "missing": missing,
        "cpus": args.jobs,
        "gpus": u8::from(options.spec.target.device == DeviceKind::Cuda),
        "resources": (args.ray_resource.iter().cloned()).collect::<BTreeMap<String, f64>>(),
    })
}
