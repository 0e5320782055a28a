//! The HTML of the report.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use precast_store::record::bucket_name;

use super::{
    Page,
    charts::{self, times},
    checks,
    model::{FailureLine, ModelPart},
    table::{filter, heads},
    training,
};
use crate::{
    stats::ModuleStats,
    words::{asked, bytes, date, time},
};

const CSS: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// The browser may fetch nothing.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; \
                      form-action 'none'";

pub(super) fn page(page: &Page) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="generator" content=(concat!("precast ", env!("CARGO_PKG_VERSION")));
                title { "Precast report" @for part in &page.models { " · " (part.model) } }
                style { (PreEscaped(CSS)) }
            }
            body {
                main {
                    h1 { "What this store is worth" }
                    p.soft { "Store " code { (page.store) } ", read " (date(page.made)) "." }
                    (contents(page))
                    @if !page.damage.is_empty() {
                        h2 #damage { "Damaged" }
                        p { "These could not be read and are left out. " code { "precast verify" } " says more." }
                        ul { @for line in &page.damage { li.bad { (line) } } }
                    }
                    @if page.models.is_empty() { p { "The store has no model yet." } }
                    @for (index, part) in page.models.iter().enumerate() { (model(index, part, page)) }
                    (training::training(&page.training))
                    (sharing(page))
                    (failures(&page.failures))
                    (checks::checks(&page.checks))
                    (production(&page.production))
                    footer {
                        "Made by precast " (env!("CARGO_PKG_VERSION")) ". This page is one file and loads nothing. \
                         The same data: " code { "precast report --format json" } "."
                    }
                }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    }
}

fn contents(page: &Page) -> Markup {
    html! {
        nav aria-label="Contents" {
            @for (index, part) in page.models.iter().enumerate() { a href=(format!("#m{index}")) { (part.model) } }
            a href="#training" { "Training" }
            a href="#sizes" { "Sizes and sharing" }
            a href="#failed" { "What failed" }
            a href="#check" { "What checks found" }
            a href="#production" { "In production" }
        }
    }
}

fn model(index: usize, part: &ModelPart, page: &Page) -> Markup {
    let of_model = page
        .failures
        .iter()
        .filter(|line| line.failure.model == part.model);
    let outputs = part
        .programs()
        .any(|(_, line)| !line.receipt.outputs.is_empty());
    html! {
        h2 id=(format!("m{index}")) {
            (part.model)
            @match (part.release, &part.name) {
                (Some(seq), Some(name)) => { ", release " (seq) " (" (name) ")" }
                (Some(seq), None) => { ", release " (seq) }
                (None, _) => { ", not released" }
            }
        }
        @if !part.lacks.is_empty() {
            p { "A partial release, which only its number loads: it lacks " (part.lacks.join(", ")) "." }
        }
        @if !part.lost.is_empty() {
            p { "The release before it also answers " (part.lost.join(", ")) "." }
        }
        p.soft { @for target in &part.targets { code { (target) } " " } }
        (tiles(part, of_model.count()))
        h3 { "What it contains" }
        (programs_table(index, part))
        @let grids = part.modules.iter().filter_map(|module| Some((module, module.grid.as_ref()?)));
        @for (place, (module, grid)) in grids.enumerate() {
            @if place == 0 {
                h3 { "Which requests are covered" }
                p { "A request is padded into the smallest bucket that covers it. Each cell stands for the requests up to its \
                    size and tells how much of the work is padding on average, if all of them are as frequent." }
            }
            h4 { (module.name) @if !grid.fixed.is_empty() { ", at " (bucket_name(&grid.fixed)) } }
            div.figure { (charts::coverage(grid)) }
        }
        h3 { "How fast it is" }
        @if part.programs().any(|(_, line)| line.receipt.speedup().is_some()) {
            p { "Seconds a call, as measured when it was built." }
            div.figure { (charts::latency(part)) }
            @for (_, line) in part.programs() {
                @if let Some(instead) = &line.eager_instead { p { span.warn { "Slower" } ": " (instead.to_string()) "." } }
            }
        } @else {
            p.soft { "Latency was not measured when this was built." }
        }
        @if part.programs().any(|(_, line)| !line.receipt.tuned.is_empty()) {
            h3 { "What was tried" }
            (tuned_table(part))
        }
        h3 { "How exact it is" }
        @if outputs {
            p { "The largest difference from eager in each output, as a share of what the gate allows. The scale is \
                logarithmic; what passes the red line is never published." }
            div.figure { (charts::errors(part)) }
        } @else {
            p.soft { "Errors were not measured when this was built." }
        }
    }
}

/// The main figures of a model.
fn tiles(part: &ModelPart, failed: usize) -> Markup {
    let programs = part.programs().count();
    let speedups = part
        .programs()
        .filter_map(|(_, line)| line.receipt.speedup());
    let worst = part.programs().filter_map(|(_, line)| line.receipt.worst());
    let size: u64 = part.artifacts.iter().map(|artifact| artifact.bytes).sum();
    let seconds = part.seconds();
    html! {
        div.tiles {
            (tile(&programs.to_string(), "programs", false))
            (tile(&part.artifacts.len().to_string(), &format!("artifacts, called by {} steps", part.calls), false))
            (tile(&bytes(size), "of shared objects", false))
            @if let Some(weights) = part.weights { (tile(&bytes(weights), "of weights, once for all", false)) }
            @if seconds > 0.0 { (tile(&time(seconds), "to build, all work added up", false)) }
            @if let Some(middle) = middle(speedups.collect()) { (tile(&times(middle), "than eager (median)", middle < 0.995)) }
            @if let Some(worst) = worst.reduce(f64::max) {
                (tile(&format!("{:.2} %", worst * 100.0), "of the tolerance used, at worst", worst > 1.0))
            }
            (tile(&failed.to_string(), "failed", failed > 0))
        }
    }
}

fn middle(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

fn tile(value: &str, name: &str, bad: bool) -> Markup {
    html! { div class=(if bad { "tile bad" } else { "tile" }) { b { (value) } span { (name) } } }
}

fn programs_table(index: usize, part: &ModelPart) -> Markup {
    let id = format!("programs-{index}");
    let states = part.programs().any(|(_, line)| line.state_bytes > 0);
    let mut columns = vec![
        ("ID", false),
        ("Module", false),
        ("Bucket", false),
        ("Steps", true),
        ("Artifacts", true),
        ("Size", true),
    ];
    columns.extend(states.then_some(("State", true)));
    columns.extend(
        [
            "Build",
            "Eager",
            "Artifact",
            "Against eager",
            "Memory",
            "Error",
        ]
        .map(|name| (name, true)),
    );
    html! {
        (filter(&id, "Show programs with"))
        div.scroll { table.sort id=(id) {
            (heads(&columns))
            tbody { @for (module, line) in part.programs() {
                @let receipt = &line.receipt;
                @let built: f64 = receipt.seconds.values().sum();
                @let ratio = receipt.speedup();
                tr {
                    td.id { (line.id.short()) }
                    td { (module.name) }
                    td { (line.bucket) @if line.fixed && !line.padded { span.warn { " exact sizes only" } } }
                    td.n { (line.steps) }
                    td.n { (line.artifacts) }
                    td.n data-v=(line.bytes) { (bytes(line.bytes)) }
                    @if states { td.n data-v=(line.state_bytes) { @if line.state_bytes > 0 { (bytes(line.state_bytes)) } } }
                    td.n data-v=(built) { @if built > 0.0 { (time(built)) } }
                    td.n data-v=[receipt.eager.map(|l| l.median)] { @if let Some(l) = receipt.eager { (time(l.median)) } }
                    td.n data-v=[receipt.artifact.map(|l| l.median)] { @if let Some(l) = receipt.artifact { (time(l.median)) } }
                    td.n data-v=[ratio] { @if let Some(r) = ratio {
                        span class=(if r < 0.995 { "bad" } else { "good" }) { (times(r)) }
                    } }
                    td.n data-v=[receipt.memory.map(|(_, artifact)| artifact)] { @if let Some((eager, artifact)) = receipt.memory {
                        span title=(format!("eager {}", bytes(eager))) { (bytes(artifact)) }
                    } }
                    td.n data-v=[receipt.worst()] { @if let Some(worst) = receipt.worst() {
                        span class=[(worst > 1.0).then_some("bad")] { (format!("{:.2} %", worst * 100.0)) }
                    } }
                }
            } }
        } }
        p.note { "Build: seconds of its own (capture, gate); its artifacts are listed below. Memory: what a call takes at most, beyond inputs \
            and weights. Error: share of the tolerance that \
            the worst output uses." @if states { " State: what each session keeps at this bucket." } }
    }
}

fn tuned_table(part: &ModelPart) -> Markup {
    html! {
        div.scroll { table {
            thead { tr {
                @for name in ["Program", "Options"] { th scope="col" { (name) } }
                @for name in ["Compile", "A call", "Speed", "Max abs"] { th.n scope="col" { (name) } }
                th scope="col" {}
            } }
            tbody { @for (module, line) in part.programs() {
                @let tuned = &line.receipt.tuned;
                @let first = tuned.first().and_then(|first| first.latency);
                @for (place, tried) in tuned.iter().enumerate() { tr {
                    td { @if place == 0 { (module.name) " " (line.bucket) } }
                    td { (tried.options) }
                    td.n { @if let Some(seconds) = tried.seconds { (time(seconds)) } }
                    td.n { @if let Some(latency) = tried.latency { (time(latency)) } }
                    td.n { @if let Some((first, own)) = first.zip(tried.latency) { (times(first / own)) } }
                    td.n { @if let Some(error) = tried.max_abs { (format!("{error:.2e}")) } }
                    td.wrap { @if tried.chosen { span.good { "kept" } } @else if let Some(why) = &tried.refused {
                        span.warn { "refused: " (why) }
                    } }
                } }
            } }
        } }
        p.note { "Every option set of a program was compiled and compared with eager, and those that passed were measured by \
            turns as whole programs. The first is kept unless another is clearly faster." }
    }
}

fn sharing(page: &Page) -> Markup {
    let total = &page.usage.total;
    let kept = [
        (page.usage.unpacked, "unpacked copies"),
        (page.usage.prepacked, "prepacked weights"),
    ];
    let kept = kept.iter().filter(|(size, _)| *size > 0);
    let kept: Vec<String> = kept
        .map(|(size, what)| format!("{} are {what}", bytes(*size)))
        .collect();
    html! {
        h2 #sizes { "Sizes and sharing" }
        p {
            // The figure of `precast du`, with what loads keep.
            "On disk the store takes " (bytes(page.usage.on_disk())) " for " (bytes(total.content))
            " of content"
            @if !kept.is_empty() {
                ", of which " (kept.join(" and "))
            }
            @if total.logical > total.content {
                "; without sharing it would be " (bytes(total.logical)) " of content"
            }
            "."
            @if total.reclaimable > 0 {
                " " (bytes(total.reclaimable)) " can go with " code { "precast gc --unreleased" } "."
            }
        }
        div.scroll { table.sort #usage {
            (heads(&[("Module", false), ("Objects", true), ("Without sharing", true), ("Content", true), ("On disk", true),
                ("Shared", true), ("Can go", true)]))
            tbody { @for group in &page.usage.groups {
                @let all = &group.bytes;
                tr {
                    td { (group.name) }
                    td.n { (all.objects) }
                    @for value in [all.logical, all.content, all.stored, all.shared, all.reclaimable] {
                        td.n data-v=(value) { (bytes(value)) }
                    }
                }
            } }
        } }
        @if page.models.iter().any(|part| !part.artifacts.is_empty()) {
            h3 { "Artifacts" }
            (filter("artifacts", "Show artifacts with"))
            div.scroll { table.sort #artifacts {
                (heads(&[("ID", false), ("Model", false), ("First step", false), ("Of", false), ("Programs", true), ("Calls", true), ("Size", true),
                    ("Compile", true)]))
                tbody { @for part in &page.models { @for artifact in &part.artifacts {
                    @let seconds: f64 = artifact.seconds.values().sum();
                    tr {
                        td.id { (artifact.id.short()) }
                        td { (part.model) }
                        td { @if artifact.step.is_empty() { "whole module" } @else { (artifact.step) } }
                        td { (artifact.bucket) }
                        td.n { (artifact.programs) }
                        td.n { (artifact.calls) }
                        td.n data-v=(artifact.bytes) { (bytes(artifact.bytes)) }
                        td.n data-v=(seconds) { @if seconds > 0.0 { (time(seconds)) } }
                    }
                } } }
            } }
        }
    }
}

fn failures(all: &[FailureLine]) -> Markup {
    html! {
        h2 #failed { "What failed and why" }
        @if all.is_empty() { p { "Nothing: every attempt since the last success is in the store." } }
        @else {
            div.scroll { table.sort #failures {
                (heads(&[("Model", false), ("Module", false), ("Bucket", false), ("What", false), ("Why", false), ("When", false)]))
                tbody { @for FailureLine { failure, at } in all { tr {
                    td { (failure.model) }
                    td { (failure.module) }
                    td { (failure.bucket) }
                    td.bad { (failure.code) }
                    td.wrap {
                        @if let Some(location) = &failure.location { code { (location) } ": " }
                        (failure.message)
                        @if let Some(hint) = &failure.hint { br; span.soft { (hint) } }
                        br; code.soft { "precast log " (failure.id.short()) }
                    }
                    td data-v=(at) { (date(*at)) }
                } } }
            } }
        }
    }
}

fn production(all: &[ModuleStats]) -> Markup {
    html! {
        h2 #production { "What fell back in production" }
        @if all.is_empty() {
            p.soft { "No counts were given. A service writes them with " code { "Model::counts" } "; "
                code { "precast report --counts FILE" } " adds them." }
        }
        @for module in all {
            h3 { (module.model) " " (module.module) }
            p {
                (module.calls) " calls, " (format!("{:.1} %", module.hit_rate() * 100.0)) " had a bucket of their own size"
                @if let Some(waste) = module.waste { "; " (format!("{:.1} %", waste * 100.0)) " of the work was padding" }
                "."
            }
            @if !module.misses.is_empty() {
                div.scroll { table.sort {
                    (heads(&[("Asked for", false), ("Answered by", false), ("Bucket", false), ("Calls", true), ("Padding", true)]))
                    tbody { @for miss in module.misses.iter().take(200) { tr {
                        td { (asked(&miss.sizes)) }
                        td class=(if miss.rung == "padded" { "" } else { "warn" }) { (miss.rung) }
                        td { @if let Some(bucket) = &miss.bucket { (bucket_name(bucket)) } }
                        td.n { (miss.count) }
                        td.n data-v=[miss.waste] { @if let Some(w) = miss.waste { (format!("{:.0} %", w * 100.0)) } }
                    } } }
                } }
                @if module.misses.len() > 200 { p.note { "The 200 most frequent of " (module.misses.len()) " shapes." } }
            }
        }
    }
}
