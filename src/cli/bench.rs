//! `precast bench`: the time of a call of each bucket, and, on request, the time of eager in the same run.
//!
//! A row is one request: a bucket's own sizes, or those of `--at`. It names the program that answered, which need not
//! be the bucket's artifact: a request may be padded into another bucket, and eager answers if it was faster at the
//! build of the program, unless `--compiled` forbids it. With `--against eager` the exported graph, which runs without
//! Python, is measured in alternation with the model, on the same inputs: the machine's other load affects both
//! equally.

mod measure;

use std::{
    collections::BTreeSet,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use self::measure::{Caller, Figures, Load};
use super::{
    Context,
    exit::Refusal,
    internal,
    progress::seconds,
    served::BenchArgs,
    table::{self, Column},
};
use crate::{
    Digest, Model, Runtime, Store,
    gate::samples_of_full,
    record::{Program, Sizes, bucket_name, split_model},
    runtime::{Outputs, Served, Tensor, counters::Rung, cuda::synchronize},
};

/// `precast bench MODULE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct BenchDocument<'a> {
    model: &'a str,
    module: &'a str,
    /// As `cpu` or `cuda:0`.
    device: String,
    threads: u16,
    load_seconds: f64,
    /// From the start of loading to the first answer.
    first_answer_seconds: Option<f64>,
    buckets: &'a [BenchRow],
    /// Null on the CPU.
    device_memory: Option<Memory>,
}

/// Bytes of the device's memory.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Memory {
    allocated: u64,
    reserved: u64,
    free: u64,
    total: u64,
}

/// One request's row. Times are in seconds.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct BenchRow {
    /// The sizes of the program that answered; for a program of every size, those of its samples.
    bucket: Sizes,
    request: Sizes,
    #[cfg_attr(test, schemars(extend("enum" = ["exact", "padded", "dynamic", "eager"])))]
    rung: &'static str,
    /// The kind of code that ran the request.
    #[cfg_attr(test, schemars(extend("enum" = ["artifact", "graph", "eager"])))]
    runner: &'static str,
    program: Digest,
    /// The share of padding among the computed elements.
    padding: f64,
    #[serde(flatten)]
    figures: Figures,
    /// The figures of eager in the same run, with `--against eager`.
    #[serde(skip_serializing_if = "Option::is_none")]
    eager: Option<EagerFigures>,
    /// The median of eager over that of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct EagerFigures {
    /// A graph that was exported at one size is padded into, as an artifact is.
    padding: f64,
    #[serde(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &BenchArgs, context: &Context) -> Result<u8> {
    let limit = limit(args.seconds)?;
    let (store, name, device) = args.place.open(context)?;
    args.place.libtorch.open()?;
    note!("loading `{name}`");
    let started = Instant::now();
    let runtime = Runtime::new(&store, device)?
        .instances(args.threads.into())
        .sessions(args.threads.into())
        .graphs(args.graphs())
        .trial(internal::trial(&store, context)?)
        .eager_fallback(!args.compiled);
    let model = runtime.load(&name)?;
    let load_seconds = started.elapsed().as_secs_f64();
    let programs = model.programs(&args.module);
    if programs.is_empty() {
        // The error names the modules that there are.
        model.run::<Tensor>(&args.module, &[])?;
    }
    for (program, reason) in model.without_graph() {
        let bucket = bucket_name(&program.sizes);
        note!("no graph for {} {bucket}: {reason}", program.module);
    }
    let eager = match &args.against {
        Some(_) => eager(&store, &runtime, &name, &programs)?,
        None => None,
    };
    let requests = requests(&programs, &args.at)?;
    let (all, parts) = (requests.len(), if eager.is_some() { 4.0 } else { 2.0 });
    let mut first_answer_seconds = None;
    let mut rows = Vec::new();
    for (place, (program, sizes)) in requests.into_iter().enumerate() {
        if context.cancel.load(Ordering::Relaxed) {
            break;
        }
        let (bucket, place) = (bucket_name(&sizes), place + 1);
        let took = seconds(args.seconds * parts);
        note!("measuring {bucket}, {place} of {all}, about {took}");
        // With full states: a session whose positions fit into a smaller bucket stays there.
        let inputs = samples_of_full(program, &sizes, device)?;
        let answer = Caller::of(&model, program, &inputs)?.run(&inputs)?;
        synchronize(device)?;
        first_answer_seconds.get_or_insert_with(|| started.elapsed().as_secs_f64());
        let load = Load {
            program,
            inputs: &inputs,
            device,
            limit,
            threads: args.threads,
        };
        let replay = sizes == program.sizes;
        rows.push(row(&load, &model, answer, eager.as_ref(), replay)?);
    }
    if !args.compiled && programs.iter().any(|program| !program.steps.is_empty()) {
        note_eager(&rows);
    }
    let memory = crate::runtime::cuda::device_memory(device).ok();
    let document = BenchDocument {
        model: &name,
        module: &args.module,
        device: device.to_string(),
        threads: args.threads,
        load_seconds,
        first_answer_seconds,
        buckets: &rows,
        device_memory: memory.map(|m| Memory {
            allocated: m.allocated,
            reserved: m.reserved,
            free: m.free,
            total: m.total,
        }),
    };
    context.show(&document, || print(args.against.is_some(), context, &rows))?;
    Ok(0)
}

/// Returns the time of `--seconds`.
fn limit(seconds: f64) -> Result<Duration, Refusal> {
    if seconds > 0.0 && seconds <= 3600.0 {
        return Ok(Duration::from_secs_f64(seconds));
    }
    let hint = "say how many seconds each bucket is measured, as `--seconds 2`";
    let message = format!("`--seconds {seconds}` is not between 0 and 3600");
    Err(Refusal::usage(message, hint))
}

/// Prints a note where eager answers requests of a module that has artifacts.
fn note_eager(rows: &[BenchRow]) {
    let (all, eager) = (rows.len(), rows.iter().filter(|row| row.rung == "eager"));
    if let eager @ 1.. = eager.count() {
        let hint = "`--compiled` leaves it out where there is an artifact";
        note!("eager answers {eager} of {all} requests; {hint}");
    }
}

/// Measures one request. `answer` is the model's answer; with `replay` the launch of the graph is also measured
/// separately.
fn row(
    load: &Load<'_>,
    model: &Model,
    answer: Outputs,
    eager: Option<&Model>,
    replay: bool,
) -> Result<BenchRow> {
    let served = answer.served().clone();
    drop(answer);
    let mut models = vec![model];
    let mut eager_padding = 0.0;
    if let Some(eager) = eager {
        match Caller::of(eager, load.program, load.inputs)
            .and_then(|mut caller| Ok(caller.run(load.inputs)?))
        {
            Ok(answer) => {
                eager_padding = padding(answer.served());
                models.push(eager);
            }
            Err(error) => {
                let request = bucket_name(&served.request());
                note!("no eager figures for {request}: {error}");
            }
        }
    }
    let mut figures = load.measure(&models)?.into_iter();
    let mut own = figures.next().context("nothing was measured")?;
    if replay {
        own.replay = load.launches(model)?;
    }
    let eager = figures.next().map(|figures| EagerFigures {
        padding: eager_padding,
        figures,
    });
    Ok(BenchRow {
        rung: served.rung().name(),
        runner: match served.rung() {
            _ if served.graph() => "graph",
            Rung::Eager => "eager",
            _ => "artifact",
        },
        program: served.program().id,
        padding: padding(&served),
        bucket: served.program().sizes.clone(),
        request: served.request(),
        ratio: (eager.as_ref()).map(|eager| eager.figures.median / own.median),
        figures: own,
        eager,
    })
}

/// Returns the share of padding among the computed elements.
fn padding(served: &Served) -> f64 {
    let product = |sizes: &Sizes| sizes.values().map(|&size| size as f64).product::<f64>();
    let wasted = |bucket| 1.0 - product(&served.request()) / product(bucket);
    served.bucket().map_or(0.0, wasted)
}

/// Returns the module's exported graphs as a model that shares the weights; none if no program has a graph.
fn eager(
    store: &Store,
    runtime: &Runtime,
    model: &str,
    programs: &[&Program],
) -> Result<Option<Model>> {
    let mut exported: Vec<Program> = programs.iter().map(|&program| program.clone()).collect();
    exported.retain(|program| program.eager.is_some());
    exported
        .iter_mut()
        .for_each(|program| program.steps.clear());
    if exported.is_empty() {
        note!("no eager figures: no program of the module has an exported graph");
        return Ok(None);
    }
    let (name, release) = split_model(model);
    let release = store.releases().get(name, release)?;
    let release = release.with_context(|| format!("the release of `{model}` is gone"))?;
    let (shims, weights, aliases) = (&release.shims, release.weights, release.aliases);
    Ok(Some(
        runtime.load_programs(name, exported, shims, weights, aliases)?,
    ))
}

/// Returns the sizes of `--at`, or each bucket's once, each with a program that takes such inputs.
fn requests<'a>(programs: &[&'a Program], at: &[Sizes]) -> Result<Vec<(&'a Program, Sizes)>> {
    if at.is_empty() {
        let (mut seen, mut buckets) = (BTreeSet::new(), Vec::new());
        for &program in programs {
            let names: Vec<_> = program.inputs.iter().map(|input| &input.name).collect();
            if seen.insert((names, &program.sizes)) {
                buckets.push((program, program.sizes.clone()));
            }
        }
        return Ok(buckets);
    }
    let request = |sizes: &Sizes| {
        let mut named = (programs.iter()).filter(|program| program.sizes.keys().eq(sizes.keys()));
        // The program of this bucket, if there is one.
        let own = named.clone().find(|program| program.sizes == *sizes);
        let Some(&program) = own.or_else(|| named.next()) else {
            let known: BTreeSet<String> = programs.iter().map(|p| bucket_name(&p.sizes)).collect();
            let known: Vec<String> = known.into_iter().collect();
            let at = bucket_name(sizes);
            let message = format!("`--at {at}` does not name the module's dimensions");
            let hint = format!("say a size for each, as one of {}", known.join("; "));
            return Err(Refusal::usage(message, hint).into());
        };
        Ok((program, sizes.clone()))
    };
    at.iter().map(request).collect()
}

fn print(against: bool, context: &Context, rows: &[BenchRow]) -> Result<()> {
    let mut columns = vec![
        Column::left("request", 0),
        Column::left("bucket", 3),
        Column::left("rung", 1),
        Column::left("runner", 4),
        Column::right("padding", 2),
        Column::right("median", 0),
        Column::right("p99", 0),
        Column::right("pipelined", 5),
        Column::right("replay", 6),
        Column::right("calls/s", 1),
    ];
    if against {
        columns.extend([
            Column::right("eager", 0),
            Column::right("eager p99", 4),
            Column::right("eager calls/s", 3),
            Column::right("ratio", 0),
        ]);
    }
    let or = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let cells = |row: &BenchRow| {
        let mut cells = vec![
            bucket_name(&row.request),
            bucket_name(&row.bucket),
            row.rung.to_owned(),
            row.runner.to_owned(),
            format!("{:.0}%", row.padding * 100.0),
            micros(row.figures.median),
            micros(row.figures.p99),
            micros(row.figures.pipelined),
            or(row.figures.replay.map(micros)),
            format!("{:.0}", row.figures.throughput),
        ];
        if against {
            let eager = row.eager.as_ref().map(|eager| &eager.figures);
            cells.extend([
                or(eager.map(|eager| micros(eager.median))),
                or(eager.map(|eager| micros(eager.p99))),
                or(eager.map(|eager| format!("{:.0}", eager.throughput))),
                or(row.ratio.map(|ratio| format!("{ratio:.2}x"))),
            ]);
        }
        cells
    };
    table::print(&context.out, &columns, rows.iter().map(cells))
}

fn micros(seconds: f64) -> String {
    match seconds * 1e6 {
        micros if micros < 100.0 => format!("{micros:.1} µs"),
        micros if micros < 10_000.0 => format!("{micros:.0} µs"),
        micros => format!("{:.1} ms", micros / 1e3),
    }
}
