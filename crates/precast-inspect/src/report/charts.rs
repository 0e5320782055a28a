//! The charts of the report, as SVG with the colours of the page.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::model::{ArtifactLine, ModelPart, Module};
use crate::{coverage::Grid, receipt::Latency, words::time};

/// Charts with a row for each program show at most so many.
pub(super) const ROWS: usize = 120;

const WIDTH: f64 = 920.0;

fn percent(share: f64) -> String {
    match share * 100.0 {
        p if p > 0.0 && p < 1.0 => "<1 %".to_owned(),
        p => format!("{p:.0} %"),
    }
}

/// The grid of buckets: darker cells waste more.
pub(super) fn coverage(grid: &Grid) -> Markup {
    let (columns, widths) = &grid.columns;
    let one = (String::new(), vec![0]);
    let (rows, heights) = grid.rows.as_ref().unwrap_or(&one);
    let (cell_w, cell_h, left, top) = (104.0, 46.0, 110.0, 34.0);
    let width = left + cell_w * widths.len() as f64 + 2.0;
    let height = top + cell_h * heights.len() as f64 + 2.0;
    html! {
        svg.small viewBox=(format!("0 0 {width} {height}")) width=(width) role="img"
            aria-label="Padding waste of each cell of the bucket grid" {
            @for (x, size) in widths.iter().enumerate() {
                text.axis x=(left + cell_w * (x as f64 + 0.5)) y=(top - 10.0) text-anchor="middle" {
                    (columns) " ≤ " (size)
                }
            }
            @for (y, size) in heights.iter().enumerate() {
                @if !rows.is_empty() {
                    text.axis x=(left - 10.0) y=(top + cell_h * (y as f64 + 0.5) + 4.0) text-anchor="end" {
                        (rows) " ≤ " (size)
                    }
                }
            }
            @for (index, cell) in grid.cells.iter().enumerate() {
                @let (x, y) = (index % widths.len(), index / widths.len());
                @let (left, top) = (left + cell_w * x as f64, top + cell_h * y as f64);
                @let tooltip = match (&cell.bucket, cell.waste) {
                    (Some(bucket), Some(waste)) => format!(
                        "requests up to {}: {} of the bucket {} is padding on average",
                        precast_store::record::bucket_name(&cell.sizes), percent(waste), precast_store::record::bucket_name(bucket)
                    ),
                    _ => format!("requests up to {}: no bucket covers them", precast_store::record::bucket_name(&cell.sizes)),
                };
                g {
                    title { (tooltip) }
                    @match cell.waste {
                        Some(waste) => {
                            rect.waste x=(left + 1.0) y=(top + 1.0) width=(cell_w - 2.0) height=(cell_h - 2.0) rx="3"
                                style=(format!("--w:{waste:.3}")) {}
                            @if !cell.exact {
                                rect.hole x=(left + 3.0) y=(top + 3.0) width=(cell_w - 6.0) height=(cell_h - 6.0) rx="2" {}
                            }
                            text.cell x=(left + cell_w / 2.0) y=(top + 20.0) text-anchor="middle" { (percent(waste)) }
                            text.note x=(left + cell_w / 2.0) y=(top + 35.0) text-anchor="middle" {
                                @if cell.exact { "own bucket" } @else { "no bucket" }
                            }
                        }
                        None => {
                            rect.none x=(left + 1.0) y=(top + 1.0) width=(cell_w - 2.0) height=(cell_h - 2.0) rx="3" {}
                            text.cell x=(left + cell_w / 2.0) y=(top + 28.0) text-anchor="middle" { "not covered" }
                        }
                    }
                }
            }
        }
    }
}

/// A bar of a build: when it began, how long it took, phase by phase.
struct Span<'a> {
    artifact: &'a ArtifactLine,
    start: f64,
    total: f64,
}

/// Lays compiles out in time; none when it is not known when they ended.
fn spans(artifacts: &[ArtifactLine]) -> Vec<Span<'_>> {
    let mut all: Vec<Span<'_>> = artifacts
        .iter()
        .filter_map(|artifact| {
            let total: f64 = artifact.seconds.values().sum();
            let start = artifact.finished? as f64 - total;
            (total > 0.0).then_some(Span {
                artifact,
                start,
                total,
            })
        })
        .collect();
    all.sort_by(|a, b| a.start.total_cmp(&b.start));
    all
}

/// The compiles of a build over time.
pub(super) fn timeline(artifacts: &[ArtifactLine]) -> Markup {
    let mut spans = spans(artifacts);
    let left_out = spans.len().saturating_sub(ROWS);
    spans.sort_by(|a, b| b.total.total_cmp(&a.total));
    spans.truncate(ROWS);
    spans.sort_by(|a, b| a.start.total_cmp(&b.start));
    let begin = spans
        .iter()
        .map(|span| span.start)
        .fold(f64::INFINITY, f64::min);
    let end = spans
        .iter()
        .map(|span| span.start + span.total)
        .fold(0.0, f64::max);
    // The compiles of a build that was continued a day later all begin at the left.
    let one_day = end - begin < 86_400.0;
    let longest = spans.iter().map(|span| span.total).fold(0.0, f64::max);
    let range = if one_day { end - begin } else { longest }.max(1e-9);
    let phases: BTreeSet<&String> = spans
        .iter()
        .flat_map(|span| span.artifact.seconds.keys())
        .collect();
    let mut phases: Vec<&str> = phases.into_iter().map(String::as_str).collect();
    phases.sort_by_key(|phase| order(phase));
    let (left, row) = (230.0, 34.0);
    let scale = (WIDTH - left - 90.0) / range;
    let height = row * spans.len() as f64 + 30.0;
    html! {
        p.legend {
            @for (index, phase) in phases.iter().enumerate() {
                span { i class=(format!("swatch p{}", index % 6)) {} " " (phase) }
            }
        }
        svg.chart viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="Compile time of each artifact" {
            @for tick in ticks(range, unit(range)) {
                line.grid x1=(left + tick * scale) x2=(left + tick * scale) y1="0" y2=(height - 22.0) {}
                text.axis x=(left + tick * scale) y=(height - 6.0) text-anchor="middle" { (tick_label(tick, range)) }
            }
            @for (index, span) in spans.iter().enumerate() {
                @let y = row * index as f64;
                @let start = if one_day { span.start - begin } else { 0.0 };
                g {
                    title { (span.artifact.step) " " (span.artifact.id.short()) ": " (time(span.total)) }
                    text.label x=(left - 10.0) y=(y + 14.0) text-anchor="end" { (label(&span.artifact.step)) }
                    text.note x=(left - 10.0) y=(y + 28.0) text-anchor="end" { (span.artifact.bucket) }
                    @for (phase, offset, seconds) in parts(span) {
                        @let number = phases.iter().position(|known| *known == phase).unwrap_or(0) % 6;
                        rect class=(format!("p{number}")) x=(format!("{:.1}", left + (start + offset) * scale)) y=(y + 8.0)
                            width=(format!("{:.1}", (seconds * scale).max(0.6))) height="16" {}
                    }
                    text.value x=(left + (start + span.total) * scale + 6.0) y=(y + 21.0) { (time(span.total)) }
                }
            }
        }
        @if left_out > 0 { p.note { "The " (ROWS) " longest of " (ROWS + left_out) " compiles." } }
    }
}

fn parts<'a>(span: &Span<'a>) -> Vec<(&'a str, f64, f64)> {
    let mut offset = 0.0;
    let mut parts = Vec::new();
    let mut phases: Vec<(&String, &f64)> = span.artifact.seconds.iter().collect();
    phases.sort_by_key(|(phase, _)| order(phase));
    for (phase, seconds) in phases {
        parts.push((phase.as_str(), offset, *seconds));
        offset += seconds;
    }
    parts
}

/// Returns the place of a phase in a compile; unknown ones come last.
fn order(phase: &str) -> usize {
    const KNOWN: [&str; 7] = [
        "capture", "lower", "triton", "headers", "cpp", "link", "load",
    ];
    KNOWN
        .iter()
        .position(|known| *known == phase)
        .unwrap_or(KNOWN.len())
}

fn label(step: &str) -> String {
    let name = if step.is_empty() {
        "whole module"
    } else {
        step
    };
    match name.char_indices().nth(24) {
        Some(_) => format!(
            "…{}",
            name.chars()
                .skip(name.chars().count() - 23)
                .collect::<String>()
        ),
        None => name.to_owned(),
    }
}

/// Returns the seconds of the unit that an axis of this range is labelled in.
fn unit(range: f64) -> f64 {
    match range {
        r if r < 1.0 => 1e-3,
        r if r < 180.0 => 1.0,
        r if r < 10_800.0 => 60.0,
        _ => 3600.0,
    }
}

fn tick_label(tick: f64, range: f64) -> String {
    let unit = unit(range);
    let name = match unit {
        u if u < 1.0 => "ms",
        u if u < 60.0 => "s",
        u if u < 3600.0 => "min",
        _ => "h",
    };
    let rounded = (tick / unit * 1000.0).round() / 1000.0;
    format!("{rounded} {name}")
}

/// Returns round multiples of `unit` from zero to `range`, four to eight of them.
fn ticks(range: f64, unit: f64) -> Vec<f64> {
    let range = range / unit;
    let power = 10_f64.powf((range / 4.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|step| range / step <= 8.0);
    let step = step.unwrap_or(power * 10.0);
    (0..=(range / step).floor() as usize)
        .map(|n| n as f64 * step * unit)
        .collect()
}

/// Eager and artifact, two bars a program.
pub(super) fn latency(part: &ModelPart) -> Markup {
    let rows: Vec<(&Module, &str, Latency, Latency)> = part
        .programs()
        .filter_map(|(module, line)| {
            Some((
                module,
                line.bucket.as_str(),
                line.receipt.eager?,
                line.receipt.artifact?,
            ))
        })
        .collect();
    let left_out = rows.len().saturating_sub(ROWS);
    let rows = &rows[..rows.len().min(ROWS)];
    let most = rows
        .iter()
        .map(|(_, _, a, b)| reach(a).max(reach(b)))
        .fold(1e-12, f64::max);
    let (left, row) = (230.0, 46.0);
    let scale = (WIDTH - left - 170.0) / most;
    let height = row * rows.len() as f64 + 6.0;
    html! {
        p.legend { span { i.swatch.eager {} " eager" } span { i.swatch.artifact {} " artifact" } }
        svg.chart viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="Latency of each bucket against eager" {
            @for (index, (module, bucket, eager, artifact)) in rows.iter().enumerate() {
                @let y = row * index as f64;
                g {
                    text.label x=(left - 10.0) y=(y + 19.0) text-anchor="end" { (module.name) }
                    text.note x=(left - 10.0) y=(y + 34.0) text-anchor="end" { (bucket) }
                    (bar("eager", left, y + 6.0, scale, eager))
                    text.value x=(left + reach(eager) * scale + 6.0) y=(y + 18.0) { (time(eager.median)) }
                    (bar("artifact", left, y + 23.0, scale, artifact))
                    text.value.strong x=(left + reach(artifact) * scale + 6.0) y=(y + 35.0) {
                        (time(artifact.median)) " · " (times(eager.median / artifact.median.max(1e-12)))
                    }
                }
            }
        }
        @if left_out > 0 { p.note { "The first " (ROWS) " of " (ROWS + left_out) " programs; the table has all." } }
    }
}

/// Returns where a bar and its spread end.
fn reach(latency: &Latency) -> f64 {
    latency.high.unwrap_or(0.0).max(latency.median)
}

fn bar(class: &str, left: f64, y: f64, scale: f64, latency: &Latency) -> Markup {
    html! {
        rect class=(class) x=(left) y=(y) width=(format!("{:.1}", (latency.median * scale).max(1.0))) height="15" rx="2" {}
        @if let (Some(low), Some(high)) = (latency.low, latency.high) {
            line.spread x1=(left + low * scale) x2=(left + high * scale) y1=(y + 7.5) y2=(y + 7.5) {}
        }
    }
}

/// Returns `3.1x faster` or `1.2x slower`.
pub(super) fn times(ratio: f64) -> String {
    match ratio {
        r if r >= 1.005 => format!("{r:.2}× faster"),
        r if r > 0.0 && r < 0.995 => format!("{:.2}× slower", 1.0 / r),
        _ => "as fast".to_owned(),
    }
}

/// How much of its tolerance each output uses, on a logarithmic scale that ends at the limit.
pub(super) fn errors(part: &ModelPart) -> Markup {
    let rows: Vec<_> = part
        .programs()
        .flat_map(|(module, line)| {
            line.receipt
                .outputs
                .iter()
                .map(move |output| (module, line, output))
        })
        .collect();
    let left_out = rows.len().saturating_sub(ROWS);
    let rows = &rows[..rows.len().min(ROWS)];
    let (left, row, decades) = (230.0, 34.0, 5.0);
    let span = WIDTH - left - 230.0;
    let place =
        |used: f64| left + span * ((used.max(1e-9).log10() + decades) / decades).clamp(0.0, 1.08);
    let height = row * rows.len() as f64 + 26.0;
    html! {
        svg.chart viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="Error against tolerance" {
            @for decade in 0..=5 {
                @let x = left + span * f64::from(decade) / decades;
                line class=(if decade == 5 { "grid limit" } else { "grid" }) x1=(x) x2=(x) y1="0" y2=(height - 20.0) {}
                text.axis x=(x) y=(height - 5.0) text-anchor="middle" {
                    (["0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "limit"][decade as usize])
                }
            }
            @for (index, (module, line, output)) in rows.iter().enumerate() {
                @let y = row * index as f64;
                @let x = place(output.used());
                g {
                    title { (module.name) " " (line.bucket) " " (output.name) ": cosine " (output.cosine) }
                    text.label x=(left - 10.0) y=(y + 15.0) text-anchor="end" { (module.name) " · " (label(&output.name)) }
                    text.note x=(left - 10.0) y=(y + 28.0) text-anchor="end" { (line.bucket) }
                    line.stem x1=(left) x2=(x) y1=(y + 17.0) y2=(y + 17.0) {}
                    circle class=(if output.used() > 1.0 { "dot over" } else { "dot" }) cx=(x) cy=(y + 17.0) r="5" {}
                    text.value x=(left + span + 14.0) y=(y + 21.0) {
                        @if output.exact || output.max_abs == 0.0 { "exactly equal" }
                        @else { "max " (format!("{:.1e}", output.max_abs)) " of " (format!("{:.1e}", output.atol)) }
                    }
                }
            }
        }
        @if left_out > 0 { p.note { "The first " (ROWS) " of " (ROWS + left_out) " outputs." } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let all: Vec<String> = [0.0, 3.3e-5, 0.0012, 0.25, 6.92, 118.0, 600.0, 9000.0]
            .map(time)
            .into();
        assert_eq!(
            all.join(", "),
            "0 s, 33.0 µs, 1.20 ms, 250 ms, 6.92 s, 118 s, 10.0 min, 2.50 h"
        );
        assert_eq!(times(2.0), "2.00× faster");
        assert_eq!(times(0.5), "2.00× slower");
        assert_eq!(times(1.0), "as fast");
        for range in [0.003, 1.0, 7.0, 33.0, 100.0, 5000.0] {
            let ticks = ticks(range, unit(range));
            assert!((2..=9).contains(&ticks.len()), "{range}: {ticks:?}");
        }
    }
}
