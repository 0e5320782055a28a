//! Columns of text, as wide as what is in them.

use anyhow::Result;

use super::printer::Printer;

/// How many rows are looked at before the widths are fixed, so that a long list streams.
const SAMPLE: usize = 1000;

/// Prints rows under a header. Widths come from the first rows; a longer cell later pushes its row, nothing is cut.
pub(super) fn print(
    out: &Printer,
    header: &[&str],
    mut rows: impl Iterator<Item = Result<Vec<String>>>,
) -> Result<usize> {
    let first: Vec<Vec<String>> = rows.by_ref().take(SAMPLE).collect::<Result<_>>()?;
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.len()).collect();
    for row in &first {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &[String]| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(&widths) {
            text.push_str(&format!("{cell:<width$}  "));
        }
        text.trim_end().to_owned()
    };
    if first.is_empty() {
        return Ok(0);
    }
    out.line(line(
        &header
            .iter()
            .map(|cell| (*cell).to_owned())
            .collect::<Vec<_>>(),
    ))?;
    let mut count = 0;
    for row in first.into_iter().map(Ok).chain(rows) {
        out.line(line(&row?))?;
        count += 1;
    }
    Ok(count)
}
