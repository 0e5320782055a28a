//! The charts of the report, as SVG with the colours of the page.

use maud::{Markup, html};

use super::model::{ModelPart, Module};
use crate::{coverage::Grid, receipt::Latency, words::time};

/// Maximum number of rows in charts with a row for each program.
pub(super) const ROWS: usize = 120;

/// Maximum number of rows in a chart with a row for each output.
const OUTPUTS: usize = 40;

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

/// Returns the end of a name that is too long for a label.
fn label(name: &str) -> String {
    match name.char_indices().rev().nth(22) {
        Some((at, _)) if name.chars().count() > 24 => format!("…{}", &name[at..]),
        _ => name.to_owned(),
    }
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
        .map(|(_, _, a, b)| a.median.max(b.median))
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
                    text.value x=(left + eager.median * scale + 6.0) y=(y + 18.0) { (time(eager.median)) }
                    (bar("artifact", left, y + 23.0, scale, artifact))
                    text.value.strong x=(left + artifact.median * scale + 6.0) y=(y + 35.0) {
                        (time(artifact.median)) " · " (times(eager.median / artifact.median.max(1e-12)))
                    }
                }
            }
        }
        @if left_out > 0 { p.note { "The first " (ROWS) " of " (ROWS + left_out) " programs; the table has all." } }
    }
}

fn bar(class: &str, left: f64, y: f64, scale: f64, latency: &Latency) -> Markup {
    let width = (latency.median * scale).max(1.0);
    html! {
        rect class=(class) x=(left) y=(y) width=(format!("{width:.1}")) height="15" rx="2" {}
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

/// The share of its tolerance that each output uses, on a logarithmic scale that ends at the limit.
pub(super) fn errors(part: &ModelPart) -> Markup {
    let mut rows: Vec<_> = part
        .programs()
        .flat_map(|(module, line)| {
            line.receipt
                .outputs
                .iter()
                .map(move |output| (module, line, output))
        })
        .collect();
    // A training step has an output for each parameter.
    let all = rows.len();
    if all > OUTPUTS {
        rows.sort_by(|a, b| b.2.used().total_cmp(&a.2.used()));
        rows.truncate(OUTPUTS);
    }
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
        @if all > OUTPUTS { p.note { "The " (OUTPUTS) " of " (all) " outputs with the largest shares." } }
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
    }
}
