//! Measuring one request: alone, and by every thread at once.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::{
    Device, Model,
    cli::served::BenchArgs,
    record::{Program, Sizes},
    runtime::{Tensor, cuda::synchronize},
};

/// What calls took, in seconds.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Figures {
    pub calls: usize,
    /// From the call to its outputs being there.
    pub median: f64,
    pub p99: f64,
    /// Time between two answers when a thread does not wait for one before the next call; on the CPU there is nothing
    /// to wait for, and it is the mean.
    pub pipelined: f64,
    /// The run of a session, pipelined, where there is a graph: its inputs are static and not copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<f64>,
    /// Answers a second, of all threads together.
    pub throughput: f64,
}

/// What one contender did so far.
#[derive(Default)]
struct Taken {
    /// Of calls one after the other, each waited for.
    alone: Vec<f64>,
    /// Calls of all threads, and for how long.
    together: usize,
    seconds: f64,
}

/// How often contenders take turns.
const TURNS: u32 = 8;

/// Measures each model at one request, in turns where there are several. `replay` names the bucket whose graph, if the
/// first has one, is launched alone as well.
pub(super) fn measure(
    models: &[&Model],
    program: &Program,
    inputs: &[Tensor],
    replay: Option<&Sizes>,
    device: Device,
    args: &BenchArgs,
) -> Result<Vec<Figures>> {
    let module = program.module.as_str();
    for model in models {
        let warm_up = Instant::now();
        while warm_up.elapsed() < Duration::from_millis(200) {
            drop(model.run(module, inputs)?);
        }
        wait(device)?;
    }
    let whole = Duration::from_secs_f64(args.seconds);
    let turns = if models.len() > 1 { TURNS } else { 1 };
    let mut taken: Vec<Taken> = models.iter().map(|_| Taken::default()).collect();
    for _ in 0..turns {
        for (model, taken) in models.iter().zip(&mut taken) {
            alone(model, module, inputs, device, whole / turns, taken)?;
        }
    }
    for _ in 0..turns {
        for (model, taken) in models.iter().zip(&mut taken) {
            let limit = whole / turns;
            together(model, module, inputs, device, limit, args.threads, taken)?;
        }
    }
    let mut figures: Vec<Figures> = taken
        .into_iter()
        .map(|taken| taken.figures(args.threads))
        .collect();
    if let (Some(sizes), Some(first)) = (replay, figures.first_mut()) {
        first.replay = launches(models[0], module, sizes, inputs, device, whole)?;
    }
    Ok(figures)
}

impl Taken {
    fn figures(mut self, threads: u16) -> Figures {
        self.alone.sort_by(f64::total_cmp);
        let last = self.alone.len().saturating_sub(1);
        let at = |share: f64| self.alone[(last as f64 * share).round() as usize];
        let together = self.together.max(1) as f64;
        Figures {
            calls: self.together + self.alone.len(),
            median: at(0.5),
            p99: at(0.99),
            pipelined: self.seconds / together * f64::from(threads),
            replay: None,
            throughput: together / self.seconds,
        }
    }
}

/// Calls one after the other, each waited for; a few at least.
fn alone(
    model: &Model,
    module: &str,
    inputs: &[Tensor],
    device: Device,
    limit: Duration,
    taken: &mut Taken,
) -> Result<()> {
    const LEAST: usize = 10;
    let (begin, before) = (Instant::now(), taken.alone.len());
    while begin.elapsed() < limit || taken.alone.len() - before < LEAST {
        let called = Instant::now();
        let answer = model.run(module, inputs)?;
        wait(device)?;
        taken.alone.push(called.elapsed().as_secs_f64());
        drop(answer);
    }
    Ok(())
}

/// Calls by every thread at once, not waited for.
fn together(
    model: &Model,
    module: &str,
    inputs: &[Tensor],
    device: Device,
    limit: Duration,
    threads: u16,
    taken: &mut Taken,
) -> Result<()> {
    let stop = AtomicBool::new(false);
    let begin = Instant::now();
    let work = |inputs: &[Tensor], over: &dyn Fn() -> bool| -> Result<usize> {
        let mut calls = 0;
        while !over() {
            drop(model.run(module, inputs)?);
            calls += 1;
            if calls % 256 == 0 {
                // So that the queue stays short of what the device holds.
                wait(device)?;
            }
        }
        wait(device)?;
        Ok(calls)
    };
    let calls: Result<Vec<usize>> = match threads {
        // A second thread would bring a second team of OpenMP's threads.
        1 => work(inputs, &|| begin.elapsed() >= limit).map(|calls| vec![calls]),
        _ => std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|_| {
                    let inputs: Vec<_> = inputs.iter().map(Tensor::share).collect();
                    let (work, stop) = (&work, &stop);
                    scope.spawn(move || work(&inputs, &|| stop.load(Ordering::Relaxed)))
                })
                .collect();
            std::thread::sleep(limit);
            stop.store(true, Ordering::Relaxed);
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| bail!("a caller panicked")))
                .collect()
        }),
    };
    taken.together += calls?.iter().sum::<usize>();
    taken.seconds += begin.elapsed().as_secs_f64();
    Ok(())
}

/// Returns the time of a session's run, which launches the graph and copies its outputs, on the same inputs: blank ones take a
/// device less power, and may take it less time. None without a graph.
fn launches(
    model: &Model,
    module: &str,
    sizes: &Sizes,
    inputs: &[Tensor],
    device: Device,
    limit: Duration,
) -> Result<Option<f64>> {
    let opened = model.session(module, sizes).ok();
    let Some(mut session) = opened.filter(|session| session.is_graph()) else {
        return Ok(None);
    };
    let mut own = session.inputs();
    if !std::iter::zip(&own, inputs).all(|(own, input)| own.shape() == input.shape()) {
        return Ok(None); // a variant with other inputs
    }
    for (to, from) in own.iter_mut().zip(inputs) {
        to.write(from)?;
    }
    wait(device)?;
    let (mut calls, begin) = (0, Instant::now());
    while begin.elapsed() < limit {
        for _ in 0..256 {
            session.run()?;
        }
        calls += 256;
        wait(device)?;
    }
    Ok(Some(begin.elapsed().as_secs_f64() / f64::from(calls)))
}

pub(super) fn wait(device: Device) -> Result<()> {
    Ok(synchronize(device)?)
}
