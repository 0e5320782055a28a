//! Tables of text. Columns are as wide as their content; a narrow terminal hides the least important ones.

use anyhow::Result;
use owo_colors::OwoColorize;

use super::printer::Printer;

/// Number of rows that determine the widths, so that a long list streams.
const SAMPLE: usize = 1000;
const GAP: usize = 2;

/// Colours a cell.
type Paint = fn(&str) -> String;

/// One column.
pub(super) struct Column {
    name: &'static str,
    /// The column with the highest rank is left out first. Columns of rank 0 are always printed.
    rank: u8,
    right: bool,
    paint: Option<Paint>,
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
            right: true,
            ..Self::left(name, rank)
        }
    }

    pub(super) const fn painted(self, paint: Paint) -> Self {
        Self {
            paint: Some(paint),
            ..self
        }
    }
}

/// Prints rows under a header. The first rows determine the widths. A later longer cell shifts its row; nothing is cut.
pub(super) fn print(
    out: &Printer,
    columns: &[Column],
    mut rows: impl Iterator<Item = Vec<String>>,
) -> Result<()> {
    let first: Vec<Vec<String>> = rows.by_ref().take(SAMPLE).collect();
    if first.is_empty() {
        return Ok(());
    }
    let header: Vec<String> = columns
        .iter()
        .map(|column| column.name.to_owned())
        .collect();
    let mut widths = vec![0; columns.len()];
    for row in first.iter().chain([&header]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let kept = fit(columns, &widths, out.width());
    let line = |row: &[String], paint: &dyn Fn(&Column) -> Option<Paint>| {
        let cells = kept.iter().map(|&index| {
            let cell = row.get(index).map_or("", String::as_str);
            let padding = " ".repeat(widths[index].saturating_sub(cell.chars().count()));
            let painted = match paint(&columns[index]) {
                Some(paint) if !cell.is_empty() => paint(cell),
                _ => cell.to_owned(),
            };
            if columns[index].right {
                padding + &painted
            } else {
                painted + &padding
            }
        });
        let line = cells.collect::<Vec<_>>().join(&" ".repeat(GAP));
        out.line(line.trim_end())
    };
    line(&header, &|_| Some(|text| text.dimmed().to_string()))?;
    let mut rows = first.into_iter().chain(rows);
    rows.try_for_each(|row| line(&row, &|column| column.paint))
}

/// Prints rows as [`print`] does; without any, a note that there are no `name`.
pub(super) fn print_some(
    out: &Printer,
    columns: &[Column],
    rows: impl Iterator<Item = Vec<String>>,
    name: &str,
) -> Result<()> {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        note!("no {name}");
    }
    print(out, columns, rows)
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
