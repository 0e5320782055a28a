//! `precast bench`: what a call of each bucket takes, beside what eager takes in the same run.
//!
//! A row is one request: a bucket's own sizes, or those of `--at`. It says what answered, which need not be the bucket's
//! artifact: a request may be padded into another bucket, and eager answers where it was faster when the program was
//! built, unless `--compiled` forbids it. With `--against eager` the exported graph, which runs without Python,
//! takes turns with it on the same inputs, so that what else the machine does meets both alike.

mod measure;

use std::{collections::BTreeSet, sync::atomic::Ordering, time::Instant};

use anyhow::{Context as _, Result};
use serde::Serialize;

use self::measure::{Figures, measure, wait};
use super::{
    Context,
    exit::Usage,
    internal,
    printer::note,
    progress::seconds,
    served::{Against, BenchArgs, GraphChoice, model, place},
    table::{self, Column},
};
use crate::{
    Digest, Model, Runtime, Store,
    gate::samples,
    record::{Program, Sizes, bucket_name, split_model},
    runtime::{Rung, Served, Tensor, cuda::Graphs},
};

/// `precast bench MODULE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document<'a> {
    model: &'a str,
    module: &'a str,
    /// As `cpu` or `cuda:0`.
    device: String,
    threads: u16,
    load_seconds: f64,
    /// From the start of loading to the first answer.
    first_answer_seconds: Option<f64>,
    buckets: &'a [Row],
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
struct Row {
    /// The sizes of what answered; of what takes every size, those of its samples.
    bucket: Sizes,
    request: Sizes,
    #[cfg_attr(test, schemars(extend("enum" = ["exact", "padded", "dynamic", "eager"])))]
    rung: &'static str,
    /// What ran it: `artifact`, `graph` or `eager`.
    #[cfg_attr(test, schemars(extend("enum" = ["artifact", "graph", "eager"])))]
    runner: &'static str,
    program: Digest,
    /// Of the elements that were computed, the part nobody asked for.
    padding: f64,
    #[serde(flatten)]
    figures: Figures,
    /// What eager took in the same run, where it was asked for and runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    eager: Option<Rival>,
    /// How many times as long eager took, by the medians.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Rival {
    /// Its own: a graph that was exported at one size is padded into as an artifact is.
    padding: f64,
    #[serde(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &BenchArgs, context: &Context) -> Result<u8> {
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(Usage {
            message: format!("`--seconds {}` is not between 0 and 3600", args.seconds),
            hint: "say how many seconds each bucket is measured, as `--seconds 2`".to_owned(),
        }
        .into());
    }
    let store = context.open_with(args.weights.unpacked())?;
    let name = model(&store, args.model.as_deref())?;
    let device = place(&store, &name, args.device)?;
    let graphs = match args.graphs {
        GraphChoice::AsBuilt => Graphs::AsBuilt,
        GraphChoice::Always => Graphs::Always,
        GraphChoice::Never => Graphs::Never,
    };
    let say = |text: String| {
        if !context.quiet {
            note(text);
        }
    };
    args.libtorch.open()?;
    say(format!("loading `{name}`"));
    let started = Instant::now();
    let runtime = Runtime::new(&store, device)?
        .instances(args.threads.into())
        .graphs(graphs)
        .trial(internal::trial(&store, context)?)
        .eager_fallback(!args.compiled);
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
    let eager = match args.against {
        Some(Against::Eager) => eager(&store, &runtime, &name, &programs)?,
        None => None,
    };
    let mut first = None;
    let mut rows = Vec::new();
    let requests = requests(&programs, &args.at)?;
    let (all, parts) = (requests.len(), if eager.is_some() { 4.0 } else { 2.0 });
    for (place, (program, sizes)) in requests.into_iter().enumerate() {
        if context.cancel.load(Ordering::Relaxed) {
            break;
        }
        say(format!(
            "measuring {}, {} of {all}, about {}",
            bucket_name(&sizes),
            place + 1,
            seconds(args.seconds * parts)
        ));
        let inputs = samples(program, &sizes, device)?;
        let answer = model.run(&args.module, &inputs)?;
        wait(device)?;
        let served = answer.served().clone();
        drop(answer);
        first.get_or_insert_with(|| started.elapsed().as_secs_f64());
        let answers = eager.as_ref().map(|eager| eager.run(&args.module, &inputs));
        let rival = match answers {
            Some(Ok(answer)) => eager
                .as_ref()
                .map(|eager| (eager, padding(answer.served()))),
            Some(Err(error)) => {
                let asked = bucket_name(&sizes);
                note(format_args!("no eager figures for {asked}: {error}"));
                None
            }
            None => None,
        };
        let replay = (sizes == program.sizes).then(|| program.sizes.clone());
        let rivals = rival.iter().map(|(eager, _)| *eager);
        let contenders: Vec<&Model> = [&model].into_iter().chain(rivals).collect();
        let mut figures = measure(&contenders, program, &inputs, replay.as_ref(), device, args)?;
        let eager = rival.and_then(|(_, padding)| {
            let figures = figures.pop()?;
            Some(Rival { padding, figures })
        });
        let own = figures.pop().context("nothing was measured")?;
        rows.push(row(&served, own, eager));
    }
    if !args.compiled {
        let preferred = rows.iter().filter(|row| row.rung == "eager").count();
        if preferred > 0 && programs.iter().any(|program| !program.steps.is_empty()) {
            note(format_args!(
                "eager answers {preferred} of {} requests; `--compiled` leaves it out where there is an artifact",
                rows.len()
            ));
        }
    }
    if context.out.json() {
        let memory = crate::runtime::cuda::device_memory(device).ok();
        context.out.document(&Document {
            model: &name,
            module: &args.module,
            device: device.to_string(),
            threads: args.threads,
            load_seconds: loaded,
            first_answer_seconds: first,
            buckets: &rows,
            device_memory: memory.map(|m| Memory {
                allocated: m.allocated,
                reserved: m.reserved,
                free: m.free,
                total: m.total,
            }),
        })?;
        return Ok(0);
    }
    print(args, context, &rows)?;
    Ok(0)
}

fn row(served: &Served, figures: Figures, eager: Option<Rival>) -> Row {
    let ratio = eager
        .as_ref()
        .map(|eager| eager.figures.median / figures.median);
    Row {
        rung: served.rung().name(),
        runner: match served.rung() {
            _ if served.graph() => "graph",
            Rung::Eager => "eager",
            _ => "artifact",
        },
        program: served.program().id,
        padding: padding(served),
        bucket: served.program().sizes.clone(),
        request: served.request(),
        figures,
        eager,
        ratio,
    }
}

/// Returns the part of the elements that were computed which nobody asked for.
fn padding(served: &Served) -> f64 {
    let product = |sizes: &Sizes| sizes.values().map(|&size| size as f64).product::<f64>();
    let wasted = |bucket| 1.0 - product(&served.request()) / product(bucket);
    served.bucket().map_or(0.0, wasted)
}

/// Returns the module's programs as their exported graphs, which share the model's weights; none where none has one.
fn eager(
    store: &Store,
    runtime: &Runtime,
    model: &str,
    programs: &[&Program],
) -> Result<Option<Model>> {
    let exported: Vec<Program> = programs
        .iter()
        .filter(|program| program.eager.is_some())
        .map(|&program| Program {
            steps: Vec::new(),
            ..program.clone()
        })
        .collect();
    if exported.is_empty() {
        note("no eager figures: no program of the module has an exported graph");
        return Ok(None);
    }
    let (name, release) = split_model(model);
    let release = store.releases().get(name, release)?;
    let release = release.with_context(|| format!("the release of `{model}` is gone"))?;
    let loaded = runtime.load_programs(
        name,
        exported,
        &release.shims,
        release.weights,
        release.aliases,
    )?;
    Ok(Some(loaded))
}

/// Returns what is asked for: the sizes of `--at`, or each bucket's once, and a program that takes such inputs.
fn requests<'a>(programs: &[&'a Program], at: &[Sizes]) -> Result<Vec<(&'a Program, Sizes)>> {
    let names = |program: &Program| -> Vec<String> {
        let inputs = program.inputs.iter();
        inputs.map(|input| input.name.clone()).collect()
    };
    let mut seen = BTreeSet::new();
    let mut requests = Vec::new();
    if at.is_empty() {
        for &program in programs {
            let request = (names(program), program.sizes.clone());
            if seen.insert(request) {
                requests.push((program, program.sizes.clone()));
            }
        }
        return Ok(requests);
    }
    for sizes in at {
        let mut named = programs
            .iter()
            .filter(|program| program.sizes.keys().eq(sizes.keys()));
        // Its own bucket's, where it is one's.
        let own = named.clone().find(|program| program.sizes == *sizes);
        let Some(&program) = own.or_else(|| named.next()) else {
            let known: BTreeSet<String> = programs.iter().map(|p| bucket_name(&p.sizes)).collect();
            let known: Vec<String> = known.into_iter().collect();
            return Err(Usage {
                message: format!(
                    "`--at {}` does not name the module's dimensions",
                    bucket_name(sizes)
                ),
                hint: format!("say a size for each, as one of {}", known.join("; ")),
            }
            .into());
        };
        requests.push((program, sizes.clone()));
    }
    Ok(requests)
}

fn print(args: &BenchArgs, context: &Context, rows: &[Row]) -> Result<()> {
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
    if args.against.is_some() {
        columns.extend([
            Column::right("eager", 0),
            Column::right("eager p99", 4),
            Column::right("eager calls/s", 3),
            Column::right("ratio", 0),
        ]);
    }
    let or = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let cells = |row: &Row| {
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
        if args.against.is_some() {
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
    table::print(
        &context.out,
        &columns,
        rows.iter().map(|row| Ok(cells(row))),
    )?;
    Ok(())
}

fn micros(seconds: f64) -> String {
    match seconds * 1e6 {
        micros if micros < 100.0 => format!("{micros:.1} µs"),
        micros if micros < 10_000.0 => format!("{micros:.0} µs"),
        micros => format!("{:.1} ms", micros / 1e3),
    }
}
