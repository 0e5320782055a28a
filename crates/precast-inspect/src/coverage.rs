//! Coverage of a grid of buckets: which requests it covers, and the share of padding.

use std::collections::BTreeMap;

use serde::Serialize;

use precast_store::record::Sizes;

/// The requests of one cell of the grid: larger than the previous cell, up to this size.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cell {
    /// The largest request of the cell.
    pub sizes: Sizes,
    /// Whether the grid has a bucket of exactly these sizes.
    pub exact: bool,
    /// The bucket that answers; none if no bucket covers the cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<Sizes>,
    /// The share of the bucket that is padding, on average over the requests of the cell: 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waste: Option<f64>,
}

/// A module's buckets as a table: the first dimension down, the second across. Further dimensions have their largest
/// size.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Grid {
    /// Name and sizes of the dimension that runs down; none for a module with one dimension.
    pub rows: Option<(String, Vec<i64>)>,
    /// Name and sizes of the dimension that runs across.
    pub columns: (String, Vec<i64>),
    /// Dimensions that are held fixed.
    pub fixed: Sizes,
    /// Row by row.
    pub cells: Vec<Cell>,
}

/// Returns the grid of these buckets; none if they have no dimension.
///
/// `wanted` may have more buckets than `there`: failed ones also have a cell.
pub fn grid(there: &[Sizes], wanted: &[Sizes]) -> Option<Grid> {
    let mut axes: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for sizes in there.iter().chain(wanted) {
        for (name, size) in sizes {
            axes.entry(name.clone()).or_default().push(*size);
        }
    }
    for sizes in axes.values_mut() {
        sizes.sort_unstable();
        sizes.dedup();
    }
    let mut axes = axes.into_iter();
    let first = axes.next()?;
    let (rows, columns) = match axes.next() {
        Some(second) => (Some(first), second),
        None => (None, first),
    };
    let fixed: Sizes = axes
        .filter_map(|(name, sizes)| Some((name, *sizes.last()?)))
        .collect();
    let mut cells = Vec::new();
    let one = vec![0];
    let down = rows.as_ref().map_or(&one, |(_, sizes)| sizes);
    for (row, height) in down.iter().enumerate() {
        for (column, width) in columns.1.iter().enumerate() {
            let mut sizes = fixed.clone();
            let mut mean = 1.0;
            if let Some((name, all)) = &rows {
                sizes.insert(name.clone(), *height);
                mean *= middle(all, row);
            }
            sizes.insert(columns.0.clone(), *width);
            mean *= middle(&columns.1, column);
            cells.push(cell(sizes, mean, &fixed, there));
        }
    }
    Some(Grid {
        rows,
        columns,
        fixed,
        cells,
    })
}

/// Returns the mean size of the requests between a bucket's size and the next smaller one.
fn middle(sizes: &[i64], at: usize) -> f64 {
    let below = if at == 0 { 0 } else { sizes[at - 1] };
    (below + 1 + sizes[at]) as f64 / 2.0
}

fn cell(sizes: Sizes, mean: f64, fixed: &Sizes, there: &[Sizes]) -> Cell {
    let volume = |sizes: &Sizes| sizes.values().map(|size| *size as f64).product::<f64>();
    let covers = |bucket: &&Sizes| {
        bucket.len() == sizes.len()
            && sizes
                .iter()
                .all(|(name, size)| bucket.get(name).is_some_and(|has| has >= size))
    };
    let bucket = there
        .iter()
        .filter(covers)
        .min_by(|a, b| volume(a).total_cmp(&volume(b)));
    let waste = bucket.map(|bucket| 1.0 - mean * volume(fixed) / volume(bucket).max(1.0));
    Cell {
        exact: there.contains(&sizes),
        bucket: bucket.cloned(),
        waste: waste.map(|waste| waste.clamp(0.0, 1.0)),
        sizes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(batch: i64, seq: i64) -> Sizes {
        BTreeMap::from([("batch".into(), batch), ("seq".into(), seq)])
    }

    #[test]
    fn a_hole_is_answered_by_the_next_bucket_and_wastes_more() {
        let wanted = [sizes(1, 32), sizes(1, 128), sizes(8, 32), sizes(8, 128)];
        let there = [sizes(1, 32), sizes(8, 32), sizes(8, 128)];
        let grid = grid(&there, &wanted).unwrap();
        assert_eq!(grid.cells.len(), 4);
        let [a, hole, _, large] = &grid.cells[..] else {
            panic!()
        };
        assert!(a.exact && !hole.exact);
        // Requests of 1 to 32 in a bucket of 32: 16.5 of 32 are used.
        assert!((a.waste.unwrap() - (1.0 - 16.5 / 32.0)).abs() < 1e-9);
        assert_eq!(hole.bucket, Some(sizes(8, 128)));
        assert!((hole.waste.unwrap() - (1.0 - 80.5 / 1024.0)).abs() < 1e-9);
        assert_eq!(large.bucket, Some(sizes(8, 128)));
        assert!(super::grid(&[Sizes::new()], &[]).is_none());
    }

    #[test]
    fn what_nothing_covers_has_no_bucket() {
        let grid = grid(&[sizes(1, 32)], &[sizes(1, 32), sizes(1, 64)]).unwrap();
        assert_eq!(grid.cells[1].bucket, None);
        assert_eq!(grid.cells[1].waste, None);
    }
}
