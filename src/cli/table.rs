//! Tables of text. Columns are as wide as their content; a narrow terminal hides the least important ones.

use anyhow::Result;
use owo_colors::OwoColorize;

use super::printer::Printer;

/// How many rows are looked at before the widths are fixed, so that a long list streams.
const SAMPLE: usize = 1000;
const GAP: usize = 2;

/// Colours a cell.
type Paint = fn(&str) -> String;

/// One column.
pub(super) struct Column {
    pub(super) name: &'static str,
    /// The highest rank is left out first; columns of rank 0 stay.
    pub(super) rank: u8,
    pub(super) right: bool,
    pub(super) paint: Option<Paint>,
}

impl Column {
    pub(super) const fn left(name: &'static str, rank: u8) -> Self {
        Self {
            name,
            rank,
            right: false,
            paint: None,
        }
    }

    pub(super) const fn right(name: &'static str, rank: u8) -> Self {
        Self {
            name,
            rank,
            right: true,
            paint: None,
        }
    }

    pub(super) const fn painted(self, paint: Paint) -> Self {
        Self {
            paint: Some(paint),
            ..self
        }
    }
}

/// Prints rows under a header, and returns how many. Widths come from the first rows; a longer cell later pushes its
/// row, nothing is cut.
pub(super) fn print(
    out: &Printer,
    columns: &[Column],
    mut rows: impl Iterator<Item = Result<Vec<String>>>,
) -> Result<usize> {
    let first: Vec<Vec<String>> = rows.by_ref().take(SAMPLE).collect::<Result<_>>()?;
    if first.is_empty() {
        return Ok(0);
    }
    let mut widths: Vec<usize> = columns.iter().map(|column| column.name.len()).collect();
    for row in &first {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let kept = fit(columns, &widths, out.width());
    let line = |cell: &dyn Fn(usize) -> (String, Option<Paint>)| {
        let mut text = String::new();
        for (place, &index) in kept.iter().enumerate() {
            let (cell, paint) = cell(index);
            let padding = " ".repeat(widths[index].saturating_sub(cell.chars().count()));
            let painted = match paint {
                Some(paint) if !cell.is_empty() => paint(&cell),
                _ => cell.clone(),
            };
            if columns[index].right {
                text.extend([padding.as_str(), painted.as_str()]);
            } else {
                text.extend([painted.as_str(), padding.as_str()]);
            }
            if place + 1 < kept.len() {
                text.push_str(&" ".repeat(GAP));
            }
        }
        text
    };
    out.line(
        line(&|index| {
            (
                columns[index].name.to_owned(),
                Some(|text| text.dimmed().to_string()),
            )
        })
        .trim_end(),
    )?;
    let mut count = 0;
    for row in first.into_iter().map(Ok).chain(rows) {
        let row = row?;
        let text = line(&|index| {
            (
                row.get(index).cloned().unwrap_or_default(),
                columns[index].paint,
            )
        });
        out.line(text.trim_end())?;
        count += 1;
    }
    Ok(count)
}

/// Prints rows as [`print`] does; without any, a note that there are no `name`.
pub(super) fn print_some(
    out: &Printer,
    columns: &[Column],
    rows: impl Iterator<Item = Vec<String>>,
    name: &str,
) -> Result<()> {
    if print(out, columns, rows.map(Ok))? == 0 {
        note!("no {name}");
    }
    Ok(())
}

/// Returns the indices of the columns that fit.
fn fit(columns: &[Column], widths: &[usize], room: Option<usize>) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    let Some(room) = room else {
        return kept;
    };
    loop {
        let taken: usize = kept.iter().map(|&index| widths[index] + GAP).sum();
        let least = kept
            .iter()
            .copied()
            .max_by_key(|&index| (columns[index].rank, index));
        match least {
            Some(least) if taken > room + GAP && columns[least].rank > 0 => {
                kept.retain(|&index| index != least)
            }
            _ => return kept,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_goes_by_rank_and_rank_0_stays() {
        let columns = [
            Column::left("A", 0),
            Column::left("B", 2),
            Column::left("C", 1),
            Column::right("D", 0),
        ];
        let widths = [10, 10, 10, 10];
        assert_eq!(fit(&columns, &widths, None), [0, 1, 2, 3]);
        assert_eq!(fit(&columns, &widths, Some(46)), [0, 1, 2, 3]);
        assert_eq!(fit(&columns, &widths, Some(45)), [0, 2, 3]);
        assert_eq!(fit(&columns, &widths, Some(22)), [0, 3]);
        assert_eq!(fit(&columns, &widths, Some(5)), [0, 3]);
    }
}
