//! The report's section on training: the first step, steps a second and memory, beside eager's.
//!
//! A build measures a training step as any program, in alternation with eager without Python. Files of processes that
//! trained add the time to the first step, and modules that train in Python.

use maud::{Markup, html};
use precast_store::record::TrainPart;

use super::{
    charts::times,
    model::{ModelPart, Module, ProgramLine},
    table::heads,
};
use crate::{
    receipt::ReceiptSummary,
    training::{Figures, Training},
    words::{bytes, time},
};

/// Returns the figures of the training steps of a model, as their builds measured them.
pub(super) fn built(part: &ModelPart) -> Vec<Training> {
    let lines = part.programs().filter_map(|(module, line)| {
        let halves = match line.train? {
            TrainPart::Step => vec![line],
            TrainPart::Gradients => vec![line, update(part, module)?],
            TrainPart::Update | TrainPart::Eval => return None,
        };
        let name = module.name.trim_end_matches(".gradients");
        let receipts: Vec<&ReceiptSummary> = halves.iter().map(|half| &half.receipt).collect();
        let latency = |of: fn(&ReceiptSummary) -> Option<f64>| {
            let seconds: Option<f64> = receipts.iter().map(|receipt| of(receipt)).sum();
            seconds.filter(|seconds| *seconds > 0.0).map(f64::recip)
        };
        let memory: Option<Vec<(u64, u64)>> = receipts.iter().map(|one| one.memory).collect();
        let most = |of: fn(&(u64, u64)) -> u64| memory.iter().flatten().map(of).max();
        let figures = |steps_per_second, peak_bytes| Figures {
            first_step_seconds: None,
            steps_per_second,
            peak_bytes,
        };
        let eager = latency(|one| Some(one.eager?.median));
        Some(Training {
            model: part.model.clone(),
            module: name.to_owned(),
            bucket: line.bucket.clone(),
            kind: "step".to_owned(),
            device: part.targets.join(", "),
            built: true,
            artifact: figures(
                latency(|one| Some(one.artifact?.median)),
                most(|(_, own)| *own),
            ),
            eager: eager.map(|rate| figures(Some(rate), most(|(eager, _)| *eager))),
        })
    });
    lines.collect()
}

/// Returns the program of the update that belongs to a module of gradients.
fn update<'p>(part: &'p ModelPart, gradients: &Module) -> Option<&'p ProgramLine> {
    let name = gradients.name.strip_suffix(".gradients")?;
    let name = format!("{name}.update");
    part.modules
        .iter()
        .find(|it| it.name == name)?
        .programs
        .first()
}

/// Draws the section.
pub(super) fn training(all: &[Training]) -> Markup {
    html! {
        h2 #training { "Training beside eager" }
        @if all.is_empty() {
            p.soft { "No model here has a training step, and no figures were given. "
                code { "precast train --format json > train.json" } " and, in Python, "
                code { "CompileSmoketest.run(…).training.save(\"train.json\")" } " make them; "
                code { "precast report --training train.json" } " adds them." }
        } @else {
            div.scroll { table.sort #training-figures {
                (heads(&[("Model", false), ("Module", false), ("Kind", false), ("Measured", false), ("First step", true), ("Eager's", true),
                    ("Steps a second", true), ("Eager's", true), ("Against eager", true), ("Memory", true), ("Eager's", true)]))
                tbody { @for one in all { (row(one)) } }
            } }
            p.note { "First step: from the start of the process, or from the module in Python, to its end, with all that is compiled. \
                Memory: the most that a step takes beyond what was held before it. Measured in the build: alternating with eager \
                without Python, which has no time to a first step." }
        }
    }
}

fn row(one: &Training) -> Markup {
    let eager = one.eager.unwrap_or_default();
    let rates = one.artifact.steps_per_second.zip(eager.steps_per_second);
    let ratio = rates.map(|(own, eager)| own / eager);
    html! { tr {
        td { (one.model) }
        td { (one.module) @if !one.bucket.is_empty() { " " (one.bucket) } }
        td { (one.kind) }
        td { @if one.built { "in the build" } @else { "in training, " (one.device) } }
        @for figures in [&one.artifact, &eager] {
            td.n data-v=[figures.first_step_seconds] { @if let Some(seconds) = figures.first_step_seconds { (time(seconds)) } }
        }
        @for figures in [&one.artifact, &eager] {
            td.n data-v=[figures.steps_per_second] { @if let Some(rate) = figures.steps_per_second { (rounded(rate)) } }
        }
        td.n data-v=[ratio] { @if let Some(ratio) = ratio {
            span class=(if ratio < 0.995 { "bad" } else { "good" }) { (times(ratio)) }
        } }
        @for figures in [&one.artifact, &eager] {
            td.n data-v=[figures.peak_bytes] { @if let Some(peak) = figures.peak_bytes { (bytes(peak)) } }
        }
    } }
}

/// Returns a rate with about three digits.
fn rounded(rate: f64) -> String {
    match rate {
        rate if rate >= 100.0 => format!("{rate:.0}"),
        rate if rate >= 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use precast_store::{Store, record::Train, testing};
    use serde_json::json;

    use super::{
        super::{Choice, Page},
        *,
    };

    /// Puts a program of a part of a training step, with the measurements of its gate.
    fn put(store: &Store, module: &str, part: TrainPart, millis: (f64, f64), mib: (u64, u64)) {
        let artifact = testing::artifact(store, module);
        let artifact = store.records().put_artifact(&artifact).unwrap().id;
        let mut program = testing::program(module, 8, &[artifact]);
        program.model = "gpt".into();
        program.module = module.into();
        program.train = Some(Train {
            part,
            optimizer: "adamw".into(),
        });
        program.receipt = testing::read(json!({"gate": {
            "eager_us": millis.0 * 1e3, "artifact_us": millis.1 * 1e3,
            "eager_peak_bytes": mib.0 << 20, "artifact_peak_bytes": mib.1 << 20,
        }}));
        store.records().put_program(&program).unwrap();
    }

    #[test]
    fn builds_and_runs_are_shown_beside_eager() {
        let (_folder, store) = testing::store();
        put(&store, "train", TrainPart::Step, (24.7, 4.0), (96, 64));
        put(&store, "train.eval", TrainPart::Eval, (9.0, 1.0), (9, 9));
        for (part, name, artifact, mib) in [
            (TrainPart::Gradients, "halves.gradients", 30.0, (96, 64)),
            (TrainPart::Update, "halves.update", 20.0, (1, 128)),
        ] {
            put(&store, name, part, (20.0, artifact), mib);
        }
        let file = json!({
            "schema": 1, "model": "encoder", "module": "", "kind": "autograd", "device": "cpu",
            "artifact": {"first_step_seconds": 4.7, "steps_per_second": 1.5, "peak_bytes": 3 << 20},
            "eager": {"first_step_seconds": 1.4, "steps_per_second": 1.0, "peak_bytes": 4 << 20},
            "losses": [1.0],
        });
        let of_file = crate::training::parse(file.to_string().as_bytes()).unwrap();
        let choice = Choice {
            training: vec![of_file],
            ..Choice::default()
        };
        let page = Page::read(&store, &choice, 0).unwrap();
        let html = training(&page.training).into_string();
        let (table, _) = html.split_once("</table>").unwrap();
        let cell = |cell: &str| {
            let text = cell.split_once('>').unwrap().1;
            let parts = text.split('<').map(|part| part.rsplit('>').next().unwrap());
            parts.collect::<String>()
        };
        let rows = table.split("<tr>").skip(2);
        let rows = rows.map(|row| {
            row.split("<td")
                .skip(1)
                .map(cell)
                .collect::<Vec<_>>()
                .join(" | ")
        });
        insta::assert_snapshot!(rows.collect::<Vec<_>>().join("\n"), @"
gpt | halves batch=8 | step | in the build |  |  | 20.0 | 25.0 | 1.25× slower | 128 MiB | 96.0 MiB
gpt | train batch=8 | step | in the build |  |  | 250 | 40.5 | 6.17× faster | 64.0 MiB | 96.0 MiB
encoder |  | autograd | in training, cpu | 4.70 s | 1.40 s | 1.50 | 1.00 | 1.50× faster | 3.00 MiB | 4.00 MiB
");
        let document = serde_json::to_value(&page).unwrap();
        assert_eq!(document["training"].as_array().unwrap().len(), 3);
        assert!(page.html().contains("<a href=\"#training\">"));
    }

    #[test]
    fn other_files_are_no_figures() {
        for text in [
            "",
            "{}",
            r#"{"schema": 1}"#,
            r#"{"schema": 9, "model": "m"}"#,
        ] {
            assert_eq!(crate::training::parse(text.as_bytes()), None, "{text}");
        }
    }
}
