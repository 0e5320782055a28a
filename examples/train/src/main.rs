//! Trains a small GPT with a compiled step, publishes it, and swaps it into a model that generates text meanwhile: no
//! Python here.
//!
//! ```console
//! $ precast build -f examples/train/precast.toml
//! $ precast build -f examples/train/train.toml
//! $ train --rows target/train/rows.bin
//! ```
//!
//! `make train` does all of it from nothing, and compares the losses with those of eager. The step is a model of its own,
//! which keeps the weights of its entry: a second run trains from the same ones, and the model that answers gets new ones.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints its progress"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use precast_runtime::{Device, Model, Runtime, Store, Value};
use serde_json::Value as Json;

/// The sizes of a batch, as the spec has them.
const BATCH: usize = 8;
const CONTEXT: usize = 64;

/// The arguments of a run.
#[derive(Parser)]
#[command(about = "Trains a small GPT with a compiled step")]
pub struct Args {
    /// Rows of 65 characters, as eager.py writes them
    #[arg(long, value_name = "FILE")]
    rows: PathBuf,
    #[arg(long, default_value_t = 600)]
    steps: usize,
    /// The learning rate
    #[arg(long, default_value_t = 3e-3)]
    rate: f32,
    /// The last losses must be below this on average
    #[arg(long, default_value_t = 2.6)]
    below: f64,
    /// Compare with the losses of this file, as eager.py writes it
    #[arg(long, value_name = "FILE")]
    eager: Option<PathBuf>,
    /// Draw the losses into this file, as SVG
    #[arg(long, value_name = "FILE")]
    draw: Option<PathBuf>,
    /// The store that `precast build` filled
    #[arg(long, default_value = "artifacts", value_name = "DIR")]
    store: PathBuf,
    /// The folder of the package `torch`
    #[arg(long, env = "LIBTORCH", value_name = "DIR")]
    libtorch: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Trains while another thread generates text, and compares the losses.
pub fn run(args: &Args) -> Result<()> {
    let rows = fs::read(&args.rows).with_context(|| args.rows.display().to_string())?;
    let rows: Vec<&[u8]> = rows.chunks_exact(CONTEXT + 1).collect();
    ensure!(
        rows.len() >= BATCH,
        "too few rows in {}",
        args.rows.display()
    );
    Runtime::libtorch(args.libtorch.as_deref(), false)?;
    let store = Store::open(&args.store)?;
    // Two programs of a service: one trains, the other answers.
    let runtime = Runtime::new(&store, Device::Cpu)?;
    let (training, serving) = (runtime.load("gpt-train")?, runtime.load("gpt")?);
    println!(
        "trains from {}, and {} answers",
        named(&training),
        named(&serving)
    );
    let prompt = rows[0];
    println!("before: {}", generate(&serving, prompt)?);
    let (done, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let losses = thread::scope(|scope| {
        let answering = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                next(&serving, prompt)?;
                calls.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let losses = train(args, &training, &rows).and_then(|losses| {
            let mut trainer = losses.1;
            let release = trainer.publish_to(&store, serving.name())?;
            serving.swap(&runtime.weights_of(serving.name())?)?;
            println!(
                "published release {} of `gpt`, and swapped it in",
                release.seq
            );
            Ok(losses.0)
        });
        done.store(true, Ordering::Relaxed);
        let answered = answering.join();
        answered.map_err(|_| anyhow::anyhow!("the thread that answers panicked"))??;
        losses
    })?;
    println!(
        "{} calls meanwhile, none failed",
        calls.load(Ordering::Relaxed)
    );
    println!("after: {}", generate(&serving, prompt)?);
    check(args, &losses)
}

/// Returns the release of a model, in words.
fn named(model: &Model) -> String {
    let release = model.release().map(|seq| format!("release {seq} of "));
    format!("{}`{}`", release.unwrap_or_default(), model.name())
}

/// Trains, and returns the losses and the trainer.
fn train<'m>(
    args: &Args,
    model: &'m Model,
    rows: &[&[u8]],
) -> Result<(Vec<f64>, precast_runtime::Trainer<'m>)> {
    let mut trainer = model.trainer("train")?;
    let (mut losses, started) = (Vec::new(), Instant::now());
    trainer.set_lr(args.rate);
    for step in 0..args.steps {
        let batch = (0..BATCH).map(|row| rows[(step * BATCH + row) % rows.len()]);
        let batch: Vec<&[u8]> = batch.collect();
        let characters = |from: usize| -> Result<Value> {
            let all = batch.iter().flat_map(|row| &row[from..from + CONTEXT]);
            let all: Vec<i64> = all.map(|&byte| byte.into()).collect();
            Ok(Value::new(&all, &[BATCH, CONTEXT])?)
        };
        let made = trainer.step(&[("ids", characters(0)?), ("targets", characters(1)?)])?;
        ensure!(made.is_finite(), "the loss of step {step} is no number");
        losses.push(made.loss);
        if (step + 1) % 100 == 0 {
            let each = started.elapsed().as_secs_f64() / (step + 1) as f64;
            let tokens = (BATCH * CONTEXT) as f64 / each;
            println!(
                "step {}: loss {:.3}, {:.1} ms a step, {tokens:.0} characters/s",
                step + 1,
                made.loss,
                each * 1e3
            );
        }
    }
    Ok((losses, trainer))
}

/// Returns the likeliest character after a text of 64 characters.
fn next(model: &Model, text: &[u8]) -> Result<u8> {
    let ids: Vec<i64> = text[..CONTEXT].iter().map(|&byte| byte.into()).collect();
    let out = model.run("forward", &[Value::new(&ids, &[1, CONTEXT])?])?;
    let logits = out.array::<f32>(0)?;
    let width = logits.data().len() / CONTEXT;
    let last = &logits.data()[(CONTEXT - 1) * width..];
    let best = (0..width).max_by(|&a, &b| last[a].total_cmp(&last[b]));
    Ok(u8::try_from(best.unwrap_or(0))?)
}

/// Returns the 64 characters that a model adds to a text.
fn generate(model: &Model, text: &[u8]) -> Result<String> {
    let mut all = text[..CONTEXT].to_vec();
    for at in 0..CONTEXT {
        let character = next(model, &all[at..])?;
        all.push(character);
    }
    Ok(format!("{:?}", String::from_utf8_lossy(&all[CONTEXT..])))
}

/// Compares the losses with the limit and with eager's, and draws them.
fn check(args: &Args, losses: &[f64]) -> Result<()> {
    let last = &losses[losses.len().saturating_sub(20)..];
    let mean = last.iter().sum::<f64>() / last.len() as f64;
    println!("loss of the last {} steps: {mean:.3}", last.len());
    ensure!(mean < args.below, "it is not below {}", args.below);
    let mut eager = vec![];
    if let Some(path) = &args.eager {
        let read: Json = serde_json::from_slice(&fs::read(path)?)?;
        let all = read["losses"].as_array().into_iter().flatten();
        eager = all.filter_map(Json::as_f64).collect();
        let pairs = losses.iter().zip(&eager);
        let apart = pairs.fold(0.0_f64, |most, (own, other)| {
            most.max((own - other).abs() / other)
        });
        println!(
            "largest difference from eager's losses: {:.3} %",
            apart * 100.0
        );
        ensure!(apart < 0.05, "the losses are not those of eager");
    }
    match &args.draw {
        Some(path) => draw(path, losses, &eager),
        None => Ok(()),
    }
}

/// Draws losses as lines: those of the step above, those of eager below it and wider.
fn draw(path: &Path, losses: &[f64], eager: &[f64]) -> Result<()> {
    let most = losses
        .iter()
        .chain(eager)
        .fold(0.0_f64, |most, loss| most.max(*loss));
    let line = |all: &[f64], style: &str| {
        let points = all.iter().enumerate().map(|(step, loss)| {
            let x = 40.0 + 560.0 * step as f64 / losses.len().max(1) as f64;
            format!("{x:.1},{:.1}", 300.0 - 280.0 * loss / most)
        });
        let points: Vec<String> = points.collect();
        format!(
            "<polyline fill='none' {style} points='{}'/>",
            points.join(" ")
        )
    };
    let svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 330' font-family='sans-serif' font-size='12'>\
         <rect width='640' height='330' fill='white'/><path d='M40 20V300H600' fill='none' stroke='#888'/>\
         <text x='8' y='24'>{most:.1}</text><text x='24' y='304'>0</text><text x='540' y='320'>{} steps</text>\
         <text x='430' y='40' fill='#e69f00'>eager</text><text x='430' y='58' fill='#0072b2'>step</text>{}{}</svg>\n",
        losses.len(),
        line(eager, "stroke='#e69f00' stroke-width='4'"),
        line(losses, "stroke='#0072b2' stroke-width='1.2'"),
    );
    Ok(fs::write(path, svg)?)
}
