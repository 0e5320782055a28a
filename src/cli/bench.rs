//! `precast bench`: what a call of each bucket takes.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::json;
use tch::Tensor;

use super::{
    Context,
    exit::Usage,
    printer::note,
    run::{model, place},
    served::{BenchArgs, GraphChoice},
    table::{self, Column},
};
use crate::{
    Device, Model, Runtime,
    record::{Dtype, Input, Program, Sizes, bucket_name},
    runtime::{Graphs, RuntimeError, tensors},
};

/// One bucket's row. Times are in seconds.
#[derive(Serialize)]
struct Row {
    bucket: Sizes,
    rung: &'static str,
    /// What ran it: `artifact` or `graph`.
    runner: &'static str,
    calls: usize,
    /// From the call to its outputs being there.
    median: f64,
    p99: f64,
    /// Time between two answers when a thread does not wait for one before the next call; on the CPU there is nothing
    /// to wait for, and it is the mean.
    pipelined: f64,
    /// Launching the graph on its static tensors alone, pipelined, where there is a graph.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay: Option<f64>,
    /// Answers a second, of all threads together.
    throughput: f64,
}

pub(super) fn run(args: &BenchArgs, context: &Context) -> Result<u8> {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(Usage {
            message: format!("`--seconds {}` is not between 0 and 3600", args.seconds),
            hint: "say how many seconds each bucket is measured, as `--seconds 2`".to_owned(),
        }
        .into());
    }
    let store = context.open()?;
    let name = model(&store, args.model.as_deref())?;
    let device = place(&store, &name, args.device)?;
    let graphs = match args.graphs {
        GraphChoice::AsBuilt => Graphs::AsBuilt,
        GraphChoice::Always => Graphs::Always,
        GraphChoice::Never => Graphs::Never,
    };
    let started = Instant::now();
    let runtime = Runtime::new(&store, device)?
        .instances(args.threads.into())
        .graphs(graphs);
    let model = runtime.load(&name)?;
    let loaded = started.elapsed().as_secs_f64();
    let programs = model.programs(&args.module);
    if programs.is_empty() {
        // Says which modules there are.
        model.run::<Tensor>(&args.module, &[])?;
    }
    for (program, reason) in model.without_graph() {
        note(format_args!(
            "no graph for {} {}: {reason}",
            program.module,
            bucket_name(&program.sizes)
        ));
    }
    let mut first = None;
    let mut rows = Vec::new();
    for program in programs {
        if context.cancel.load(Ordering::Relaxed) {
            break;
        }
        let inputs = samples(program, device)?;
        if first.is_none() {
            let answer = model.run(&args.module, &inputs)?;
            wait(device);
            drop(answer);
            first = Some(started.elapsed().as_secs_f64());
        }
        let row = measure(&model, program, &inputs, device, args)?;
        rows.push(row);
    }
    if context.out.json() {
        let memory = crate::runtime::device_memory(device).ok();
        context.out.document(json!({
            "model": name, "module": args.module, "device": device.to_string(), "threads": args.threads,
            "load_seconds": loaded, "first_answer_seconds": first, "buckets": rows,
            "device_memory": memory.map(|m| json!({ "allocated": m.allocated, "reserved": m.reserved, "free": m.free, "total": m.total })),
        }))?;
        return Ok(0);
    }
    let columns = [
        Column::left("bucket", 0),
        Column::left("runner", 1),
        Column::right("median", 0),
        Column::right("p99", 0),
        Column::right("pipelined", 0),
        Column::right("replay", 2),
        Column::right("calls/s", 1),
    ];
    let cells = |row: &Row| {
        vec![
            bucket_name(&row.bucket),
            row.runner.to_owned(),
            micros(row.median),
            micros(row.p99),
            micros(row.pipelined),
            row.replay.map_or_else(|| "-".to_owned(), micros),
            format!("{:.0}", row.throughput),
        ]
    };
    table::print(
        &context.out,
        &columns,
        rows.iter().map(|row| Ok(cells(row))),
    )?;
    Ok(0)
}

/// Measures one bucket at its own sizes.
fn measure(
    model: &Model,
    program: &Program,
    inputs: &[Tensor],
    device: Device,
    args: &BenchArgs,
) -> Result<Row> {
    let module = program.module.as_str();
    let warm_up = Instant::now();
    let answer = model.run(module, inputs)?;
    let (rung, runner) = (
        answer.served().rung().name(),
        if answer.served().graph() {
            "graph"
        } else {
            "artifact"
        },
    );
    while warm_up.elapsed() < Duration::from_millis(200) {
        drop(model.run(module, inputs)?);
    }
    wait(device);
    let limit = Duration::from_secs_f64(args.seconds);
    // One after the other, each waited for.
    let (mut times, begin) = (Vec::new(), Instant::now());
    while begin.elapsed() < limit || times.len() < 10 {
        let called = Instant::now();
        let answer = model.run(module, inputs)?;
        wait(device);
        times.push(called.elapsed().as_secs_f64());
        drop(answer);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    // Not waited for, by every thread.
    let stop = AtomicBool::new(false);
    let begin = Instant::now();
    let calls: Result<Vec<usize>> = std::thread::scope(|scope| {
        let work = |inputs: Vec<Tensor>| {
            let mut calls = 0;
            while !stop.load(Ordering::Relaxed) {
                drop(model.run(module, &inputs)?);
                calls += 1;
                if calls % 256 == 0 {
                    // So that the queue stays short of what the device holds.
                    wait(device);
                }
            }
            wait(device);
            Ok(calls)
        };
        let threads: Vec<_> = (0..args.threads)
            .map(|_| {
                let inputs = inputs.iter().map(Tensor::shallow_clone).collect();
                scope.spawn(move || work(inputs))
            })
            .collect();
        std::thread::sleep(limit);
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| bail!("a caller panicked")))
            .collect()
    });
    let (calls, took) = (
        calls?.iter().sum::<usize>().max(1),
        begin.elapsed().as_secs_f64(),
    );
    Ok(Row {
        bucket: program.sizes.clone(),
        rung,
        runner,
        calls: calls + times.len(),
        median: at(0.5),
        p99: at(0.99),
        pipelined: took / calls as f64 * f64::from(args.threads),
        replay: replay(model, program, device, limit)?,
        throughput: calls as f64 / took,
    })
}

fn replay(
    model: &Model,
    program: &Program,
    device: Device,
    limit: Duration,
) -> Result<Option<f64>> {
    let Some(mut session) = model.session(&program.module, &program.sizes) else {
        return Ok(None);
    };
    let (mut calls, begin) = (0, Instant::now());
    while begin.elapsed() < limit {
        for _ in 0..256 {
            session.replay().map_err(|message| RuntimeError::Tensor {
                module: program.module.as_str().into(),
                message,
            })?;
        }
        calls += 256;
        wait(device);
    }
    Ok(Some(begin.elapsed().as_secs_f64() / f64::from(calls)))
}

/// Returns inputs of the bucket's sizes: integers in the range the spec says, or their pad value; floats from a normal
/// distribution.
fn samples(program: &Program, device: Device) -> Result<Vec<Tensor>> {
    let place = tensors::device(device);
    let sample = |input: &Input| -> Result<Tensor> {
        let (shape, kind) = (&input.layout.shape, tensors::kind(input.layout.dtype));
        let made = match (input.layout.dtype, input.range) {
            (dtype, _) if dtype.is_float() => {
                Tensor::f_randn(shape, (tch::Kind::Float, place))?.f_to_kind(kind)?
            }
            (Dtype::Bool, _) => Tensor::f_ones(shape, (kind, place))?,
            (_, Some([low, high])) => {
                Tensor::f_randint_low(low, high.max(low + 1), shape, (kind, place))?
            }
            (_, None) => Tensor::f_zeros(shape, (kind, place))?,
        };
        Ok(made)
    };
    program.inputs.iter().map(sample).collect()
}

fn wait(device: Device) {
    if let Device::Cuda(ordinal) = device {
        tch::Cuda::synchronize(ordinal as i64);
    }
}

fn micros(seconds: f64) -> String {
    match seconds * 1e6 {
        micros if micros < 100.0 => format!("{micros:.1} µs"),
        micros if micros < 10_000.0 => format!("{micros:.0} µs"),
        micros => format!("{:.1} ms", micros / 1e3),
    }
}
