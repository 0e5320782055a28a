//! `precast train`: steps on batches of a file, with checkpoints.

mod data;
mod folder;
mod meter;
mod rate;
mod speed;

use std::{
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};
use owo_colors::OwoColorize;
use serde::Serialize;

use self::{
    data::{Batch, Data},
    folder::Folder,
    meter::Meter,
    rate::Schedule,
    speed::Speed,
};
use super::{
    Context,
    exit::{INTERRUPTED, Refusal, warning},
    internal,
    progress::seconds,
    served::{PlaceArgs, device},
};
use crate::{
    Device, Model, Runtime,
    inspect::{receipt::Instead, training::Figures},
    record::{Input, Program, bucket_name},
    runtime::{
        Loading, Trainer,
        command::{keep_freed, tensors},
        training::{Losses, Sums},
    },
};

#[derive(clap::Args)]
pub(super) struct TrainArgs {
    /// The module of kind `step`, as the spec names it
    module: String,
    /// A safetensors file: a tensor for each input of the batch, with one row for each example
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Number of steps, with those of an earlier run that is continued
    #[arg(long)]
    steps: u64,
    /// The learning rate, after the warm-up
    #[arg(long, default_value_t = 1e-3)]
    lr: f32,
    /// The learning rate from the warm-up to the last step
    #[arg(long, value_enum, default_value_t = Schedule::Constant)]
    schedule: Schedule,
    /// Steps in which the learning rate rises from 0
    #[arg(long, default_value_t = 0)]
    warmup: u64,
    /// Batches of one update, for a module with `accumulate`
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    accumulate: u64,
    /// The devices that share each batch, as `cuda:0,cuda:1`, for a module with `accumulate` [default: one]
    #[arg(long, value_name = "DEVICE,…", value_delimiter = ',', value_parser = device, conflicts_with = "device")]
    devices: Vec<Device>,
    /// Add the gradients of several GPUs in the host's memory, in the order of the devices, also where NCCL is found
    #[arg(long)]
    no_nccl: bool,
    /// The seed of the order of the batches, and of dropout
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A folder for checkpoints: a run continues from the newest one in it
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Publish the weights as a new release at the end, of another model if one is named
    #[arg(long, value_name = "MODEL")]
    publish: Option<Option<String>>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// `precast train MODULE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct TrainDocument {
    model: String,
    module: String,
    /// Updates, with those of earlier runs.
    steps: u64,
    /// The loss of each step of this run, in order.
    losses: Vec<f64>,
    /// The metrics of the last step, by name.
    metrics: Vec<(String, f64)>,
    /// Examples that this run's steps had in a second.
    rows_per_second: f64,
    seconds: f64,
    /// Programs that eager answered in place of slower artifacts.
    eager_instead: Vec<Instead>,
    /// Floating-point operations of matrix products, convolutions and attention in a second, at the median step; on a
    /// GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    flops_per_second: Option<f64>,
    /// Their share of the devices' peak, from 0 to 1; for a GPU whose peak is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu: Option<f64>,
    /// `step`.
    kind: &'static str,
    /// The devices that trained.
    device: String,
    /// Where the gradients of several devices were added: `nccl` or `memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    sums: Option<&'static str>,
    /// The first step, steps a second, and peak memory on the first device, for `precast report --training`.
    artifact: Figures,
    /// The release that it started from; absent where it continued a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<u64>,
    /// The newest checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<PathBuf>,
    /// The number of the published release.
    #[serde(skip_serializing_if = "Option::is_none")]
    release: Option<u64>,
    /// The model of this release: `model`, unless `--publish` named another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<String>,
}

pub(super) fn run(args: &TrainArgs, context: &Context) -> Result<u8> {
    let mut meter = Meter::new();
    keep_freed();
    let (store, name, device) = args.place.open(context)?;
    args.place.libtorch.open()?;
    let devices = match args.devices.is_empty() {
        true => vec![device],
        false => args.devices.clone(),
    };
    let (device, count) = (devices[0], devices.len() as u64);
    let names: Vec<String> = devices.iter().map(Device::to_string).collect();
    let model = Runtime::new(&store, devices.clone())?
        .loading(Loading::OnDemand)
        .trial(internal::trial(&store, context)?)
        .load(&name)?;
    let trainer = model.trainer(&args.module)?;
    let mut trainer = match args.no_nccl {
        true => trainer.without_nccl(),
        false => trainer,
    };
    let sums = trainer.sums();
    if sums == Some(Sums::Memory) && device != Device::Cpu && !args.no_nccl {
        note!("gradients are added in the host's memory: `libnccl.so.2` is not found");
    }
    let data = Data::open(&args.data, inputs(&model, &args.module), count)?;
    let publish = args.publish.as_ref();
    let publish = publish.map(|named| named.as_deref().unwrap_or(model.name()));
    if let Some(model) = publish {
        trainer.may_publish_to(&store, model)?;
    }
    trainer.set_seed(args.seed)?;
    let folder = args.checkpoint.as_deref().map(Folder::open).transpose()?;
    let settings = folder::settings(args, &data, count);
    let mut newest = match &folder {
        Some(folder) => folder.resume(args, &mut trainer, &settings)?,
        None => None,
    };
    let from = model.release().filter(|_| newest.is_none());
    if let Some(seq) = from {
        note!("starts from release {seq} of `{}`", model.name());
    }
    trainer.set_position(trainer.progress().position, args.seed);
    for (name, value) in &settings {
        trainer.set_note(name, value);
    }
    let save = |trainer: &mut Trainer<'_>| {
        let saved = folder.as_ref().map(|folder| folder.save(trainer));
        saved.transpose()
    };

    let speed = Speed::new(&model, &args.module, args.accumulate, &devices);
    let started = Instant::now();
    let bar = Bar::new(args.steps, trainer.progress().step, speed.as_ref());
    let mut losses = Vec::new();
    let mut last = Losses::default();
    while trainer.progress().step < args.steps && !context.cancel.load(Ordering::Relaxed) {
        let position = trainer.progress().position;
        let (batches, after) = data.batches(position, args.accumulate, args.seed)?;
        trainer.set_lr(args.schedule.rate(args, trainer.progress().step));
        last = meter.step(device, || step(&mut trainer, &batches))?;
        losses.push(last.loss);
        trainer.set_position(after, args.seed);
        let step = trainer.progress().step;
        if !last.is_finite() {
            return Err(not_a_number(args, step, &batches, newest.as_deref())?);
        }
        if step.is_multiple_of(args.every) || step == args.steps {
            newest = save(&mut trainer)?.or(newest);
        }
        bar.step(
            step,
            &last,
            losses.len() as u64 * data.rows_of_call() * args.accumulate,
        );
    }
    bar.end();

    let took = started.elapsed().as_secs_f64();
    for lost in model.quarantined() {
        let (module, bucket) = (&lost.module, bucket_name(&lost.bucket));
        warning(&format!("{module} {bucket} is set aside: {}", lost.error));
    }
    if context.cancel.load(Ordering::Relaxed) {
        let step = trainer.progress().step;
        match save(&mut trainer)? {
            Some(path) => note!(
                "interrupted after step {step}: go on from `{}`",
                path.display()
            ),
            None => note!("interrupted after step {step}: `--checkpoint` would have kept it"),
        }
        return Ok(INTERRUPTED);
    }
    meter.held(device, trainer.bytes());
    let release = publish.map(|model| trainer.publish_to(&store, model));
    let release = release.transpose()?;
    let rows = losses.len() as u64 * data.rows_of_call() * args.accumulate;
    let artifact = meter.figures();
    let median = artifact.steps_per_second.zip(speed.as_ref());
    let document = TrainDocument {
        model: model.name().to_owned(),
        module: args.module.clone(),
        steps: trainer.progress().step,
        losses,
        metrics: last.metrics,
        rows_per_second: rows as f64 / took.max(1e-9),
        seconds: took,
        eager_instead: model
            .faster_as_eager()
            .into_iter()
            .filter_map(Instead::of)
            .collect(),
        flops_per_second: median.map(|(rate, speed)| speed.flops(rate)),
        mfu: median.and_then(|(rate, speed)| speed.mfu(rate)),
        kind: "step",
        device: names.join(", "),
        sums: sums.map(Sums::name),
        artifact,
        from,
        checkpoint: newest,
        release: release.as_ref().map(|release| release.seq),
        published: release.map(|release| release.model),
    };
    context.show(&document, || print(&document, context))?;
    Ok(0)
}

/// Returns the inputs of a batch: of the part that has the loss.
fn inputs<'m>(model: &'m Model, module: &str) -> Vec<&'m Input> {
    let eval = format!("{module}.eval");
    largest(model, &eval).map_or(vec![], |program| program.inputs.iter().collect())
}

/// Returns the program of a module with the largest sizes.
fn largest<'m>(model: &'m Model, module: &str) -> Option<&'m Program> {
    let programs = model.programs(module).into_iter();
    programs.max_by_key(|program| program.sizes.values().product::<i64>())
}

/// Makes one step: on the last batch, after the gradients of the earlier ones.
fn step(trainer: &mut Trainer<'_>, batches: &[Batch]) -> Result<Losses> {
    let Some((last, before)) = batches.split_last() else {
        return Ok(Losses::default());
    };
    let mut sum = 0.0;
    for batch in before {
        sum += trainer.accumulate(&batch.named())?.loss;
    }
    let losses = trainer.step(&last.named())?;
    let loss = (sum + losses.loss) / batches.len() as f64;
    Ok(Losses { loss, ..losses })
}

/// Returns the error for a loss or a norm that is no number; keeps the batches of the step in a file.
fn not_a_number(
    args: &TrainArgs,
    step: u64,
    batches: &[Batch],
    newest: Option<&Path>,
) -> Result<anyhow::Error> {
    let folder = args.checkpoint.clone().unwrap_or_default();
    let path = folder.join(format!("not-a-number-{step}.safetensors"));
    let named = batches.iter().enumerate().flat_map(|(index, batch)| {
        let prefix = match batches.len() {
            1 => String::new(),
            _ => format!("{index}."),
        };
        let tensors = batch.tensors.iter();
        tensors.map(move |(name, tensor)| (format!("{prefix}{name}"), tensor.share()))
    });
    tensors::write(&path, &named.collect::<Vec<_>>())
        .with_context(|| format!("can't write `{}`", path.display()))?;
    let message = format!("the loss or the norm of the gradients of step {step} is no number");
    let good = newest.map_or("there is no checkpoint".to_owned(), |newest| {
        format!("the checkpoint `{}` is of before", newest.display())
    });
    let hint = format!(
        "its batch is in `{}`; {good}; lower `--lr`, or set `clip` in the spec",
        path.display()
    );
    Ok(Refusal::failed(message, hint).into())
}

fn print(document: &TrainDocument, context: &Context) -> Result<()> {
    let out = &context.out;
    let loss = document
        .losses
        .last()
        .map_or(String::new(), |loss| format!(", loss {loss:.4}"));
    let (module, steps) = (&document.module, document.steps);
    writeln!(out, "trained {module} to step {steps}{loss}")?;
    for (name, value) in &document.metrics {
        writeln!(out, "{name}: {value:.4}")?;
    }
    if let Some(path) = &document.checkpoint {
        writeln!(out, "checkpoint: {}", path.display())?;
    }
    if let (Some(seq), Some(model)) = (document.release, &document.published) {
        writeln!(out, "published {model} release {seq}")?;
    }
    for one in &document.eager_instead {
        note!("{} {one}", "slower:".yellow());
    }
    note!(
        "{} steps in {}, {:.0} rows/s",
        document.losses.len(),
        seconds(document.seconds),
        document.rows_per_second
    );
    Ok(())
}

/// The progress: a bar on a terminal, else some lines.
struct Bar<'a> {
    bar: ProgressBar,
    speed: Option<&'a Speed>,
    started: Instant,
    first: u64,
    /// Steps between lines.
    lines: u64,
}

impl<'a> Bar<'a> {
    fn new(steps: u64, first: u64, speed: Option<&'a Speed>) -> Self {
        let bar = ProgressBar::new(steps);
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(first);
        Self {
            bar,
            speed,
            started: Instant::now(),
            first,
            lines: (steps / 20).max(1),
        }
    }

    fn step(&self, step: u64, losses: &Losses, rows: u64) {
        let took = self
            .started
            .elapsed()
            .max(Duration::from_micros(1))
            .as_secs_f64();
        let norm = losses.grad_norm.unwrap_or(0.0);
        let (steps, rows) = ((step - self.first) as f64 / took, rows as f64 / took);
        let mut text = format!(
            "loss {:.4}, norm {norm:.3}, {steps:.1} steps/s, {rows:.0} rows/s",
            losses.loss
        );
        if let Some(speed) = self.speed {
            text = format!("{text}, {}", speed.text(steps));
        }
        if self.bar.is_hidden() {
            if step.is_multiple_of(self.lines) {
                note!("step {step}: {text}");
            }
            return;
        }
        self.bar.set_message(text);
        self.bar.set_position(step);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
