//! The choice of the bucket for a request: a pure function over a table that is built once.
//!
//! For every bucketed dimension the table has the sorted sizes that occur. The size of a request is one of them, or
//! lies below one. This selects a cell of the grid, and all requests in one cell have the same answer: the bucket of
//! exactly these sizes, or the cheapest bucket that covers them and may be padded in each dimension that is smaller.
//! Two binary searches and one look-up answer a request of two dimensions, with no allocation. If the grid would be too
//! large (many scattered points), buckets are tried in order of cost instead.

use smallvec::SmallVec;

/// A bucket of the table. `sizes` are in the order of the table's dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// The number of its program.
    pub program: usize,
    pub sizes: Vec<i64>,
    /// For each dimension, whether a request may be smaller and is padded.
    pub padded: SmallVec<[bool; 4]>,
    /// The cost of a call, in any unit. The lowest one is chosen.
    pub cost: f64,
}

/// The answer to a request: the number of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    Exact(usize),
    Padded(usize),
}

/// The routing table of one module.
#[derive(Clone, Debug)]
pub struct Table {
    buckets: Vec<Bucket>,
    /// Bucket indices, cheapest first.
    by_cost: Vec<usize>,
    /// For each dimension, the sizes that occur, ascending.
    sizes: Vec<Vec<i64>>,
    /// The answers, row-major. A dimension has two cells for each of its sizes: less than it, and equal to it. Empty
    /// when there would be too many.
    cells: Vec<Option<Route>>,
}

/// Beyond this a grid costs more memory than it saves time.
const MAX_CELLS: usize = 1 << 16;

impl Table {
    /// Builds the table of `buckets`, which all have the same number of sizes. Of two with the same sizes the cheaper
    /// is used.
    pub fn new(buckets: Vec<Bucket>) -> Self {
        let dims = buckets.first().map_or(0, |bucket| bucket.sizes.len());
        debug_assert!(buckets.iter().all(|bucket| bucket.sizes.len() == dims));
        let mut by_cost: Vec<usize> = (0..buckets.len()).collect();
        // Equal costs are settled by size and then by position, so that the answer never depends on an order of input.
        by_cost.sort_by(|&a, &b| {
            let (a_, b_) = (&buckets[a], &buckets[b]);
            a_.cost
                .total_cmp(&b_.cost)
                .then_with(|| a_.sizes.cmp(&b_.sizes))
                .then(a.cmp(&b))
        });
        let sizes: Vec<Vec<i64>> = (0..dims)
            .map(|dim| {
                let mut sizes: Vec<i64> = buckets.iter().map(|bucket| bucket.sizes[dim]).collect();
                sizes.sort_unstable();
                sizes.dedup();
                sizes
            })
            .collect();
        let mut table = Self {
            buckets,
            by_cost,
            sizes,
            cells: Vec::new(),
        };
        let count = table
            .sizes
            .iter()
            .try_fold(1usize, |n, sizes| n.checked_mul(2 * sizes.len()));
        if let Some(count) = count.filter(|&n| n <= MAX_CELLS && !table.buckets.is_empty()) {
            table.cells = (0..count).map(|cell| table.cell(cell)).collect();
        }
        table
    }

    /// Returns the program for a request of these sizes; none when no bucket fits.
    pub fn route(&self, request: &[i64]) -> Option<Route> {
        if self.cells.is_empty() {
            return self.scan(request);
        }
        let mut cell = 0;
        for (sizes, &size) in self.sizes.iter().zip(request) {
            let at = sizes.partition_point(|&have| have < size);
            let equal = *sizes.get(at)? == size;
            cell = (cell * sizes.len() + at) * 2 + usize::from(equal);
        }
        *self.cells.get(cell)?
    }

    /// Returns the program of the nearest bucket, and whether the bucket covers the request. The nearest is the
    /// cheapest bucket that covers the request but refuses padding, or else the bucket with the smallest sum of missing
    /// sizes.
    pub fn nearest(&self, request: &[i64]) -> Option<(usize, bool)> {
        let mut by_cost = self.by_cost.iter().map(|&bucket| &self.buckets[bucket]);
        if let Some(bucket) = by_cost.find(|bucket| covers(&bucket.sizes, request)) {
            return Some((bucket.program, true));
        }
        let short = |bucket: &Bucket| -> i64 {
            bucket
                .sizes
                .iter()
                .zip(request)
                .map(|(have, want)| want.saturating_sub(*have).max(0))
                .fold(0, i64::saturating_add)
        };
        let nearest = self.buckets.iter().min_by_key(|bucket| short(bucket));
        nearest.map(|bucket| (bucket.program, false))
    }

    fn scan(&self, request: &[i64]) -> Option<Route> {
        let mut cover = None;
        for &bucket in &self.by_cost {
            let have = &self.buckets[bucket];
            if have.sizes == request {
                return Some(Route::Exact(have.program));
            }
            if cover.is_none() && have.takes(request) {
                cover = Some(Route::Padded(have.program));
            }
        }
        cover
    }

    /// Returns the answer of a cell: that of the largest request in it.
    fn cell(&self, mut index: usize) -> Option<Route> {
        let mut at = vec![0; self.sizes.len()];
        for (dim, sizes) in self.sizes.iter().enumerate().rev() {
            let equal = index % 2 == 1;
            index /= 2;
            at[dim] = sizes[index % sizes.len()] - i64::from(!equal);
            index /= sizes.len();
        }
        self.scan(&at)
    }
}

impl Bucket {
    /// Returns whether a request has these sizes, or smaller ones where it may be padded.
    pub fn takes(&self, request: &[i64]) -> bool {
        let sizes = self.sizes.iter().zip(request).zip(&self.padded);
        sizes
            .into_iter()
            .all(|((have, want), padded)| have == want || (*padded && have > want))
    }
}

fn covers(have: &[i64], want: &[i64]) -> bool {
    have.iter().zip(want).all(|(have, want)| have >= want)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::*;

    fn bucket(sizes: &[i64], cost: f64) -> Bucket {
        Bucket {
            program: 0,
            sizes: sizes.to_vec(),
            padded: sizes.iter().map(|_| true).collect(),
            cost,
        }
    }

    /// Numbers the buckets, and builds their table.
    fn table(mut buckets: Vec<Bucket>) -> Table {
        for (at, bucket) in buckets.iter_mut().enumerate() {
            bucket.program = at;
        }
        Table::new(buckets)
    }

    #[test]
    fn exact_comes_before_cheaper_and_cover_is_by_cost() {
        let table = table(vec![
            bucket(&[8, 128], 900.0),
            bucket(&[1, 512], 40.0),
            bucket(&[1, 32], 50.0),
        ]);
        assert_eq!(table.route(&[1, 32]), Some(Route::Exact(2)));
        // The longer one is measured faster.
        assert_eq!(table.route(&[1, 31]), Some(Route::Padded(1)));
        assert_eq!(table.route(&[2, 5]), Some(Route::Padded(0)));
        assert_eq!(table.route(&[8, 129]), None);
        assert_eq!(table.nearest(&[8, 129]), Some((0, false)));
    }

    #[test]
    fn a_bucket_that_refuses_padding_answers_only_its_own_size() {
        let mut only = bucket(&[4], 1.0);
        only.padded = smallvec![false];
        let table = table(vec![only]);
        assert_eq!(table.route(&[4]), Some(Route::Exact(0)));
        assert_eq!(table.route(&[3]), None);
        assert_eq!(table.nearest(&[3]), Some((0, true)));
    }

    #[test]
    fn a_bucket_is_padded_in_the_dimensions_that_allow_it() {
        let mut rows = bucket(&[8, 128], 1.0);
        rows.padded = smallvec![true, false];
        let table = table(vec![rows, bucket(&[8, 256], 9.0)]);
        assert_eq!(table.route(&[3, 128]), Some(Route::Padded(0)));
        assert_eq!(table.route(&[3, 127]), Some(Route::Padded(1)));
        assert_eq!(table.route(&[8, 127]), Some(Route::Padded(1)));
    }

    #[test]
    fn a_module_without_dimensions_has_one_answer() {
        let one = table(vec![bucket(&[], 1.0)]);
        assert_eq!(one.route(&[]), Some(Route::Exact(0)));
        assert_eq!(Table::new(vec![]).route(&[]), None);
    }

    fn buckets() -> impl Strategy<Value = Vec<Bucket>> {
        let one = (
            prop::collection::vec(1..9i64, 2),
            any::<[bool; 2]>(),
            0..5u8,
        )
            .prop_map(|(sizes, padded, cost)| Bucket {
                program: 0,
                sizes,
                padded: padded.into_iter().collect(),
                cost: f64::from(cost),
            });
        prop::collection::vec(one, 1..12)
    }

    proptest! {
        #[test]
        fn the_grid_answers_like_the_definition(buckets in buckets(), request in prop::collection::vec(1..10i64, 2)) {
            let table = table(buckets.clone());
            let best = |fits: &dyn Fn(&Bucket) -> bool| {
                buckets.iter().filter(|b| fits(b)).map(|b| b.cost).min_by(f64::total_cmp)
            };
            match table.route(&request) {
                Some(Route::Exact(i)) => {
                    prop_assert_eq!(&buckets[i].sizes, &request);
                    prop_assert_eq!(Some(buckets[i].cost), best(&|b| b.sizes == request));
                }
                Some(Route::Padded(i)) => {
                    prop_assert!(buckets.iter().all(|b| b.sizes != request));
                    prop_assert!(buckets[i].takes(&request));
                    prop_assert_eq!(Some(buckets[i].cost), best(&|b| b.takes(&request)));
                }
                None => {
                    prop_assert!(buckets.iter().all(|b| b.sizes != request));
                    prop_assert!(!buckets.iter().any(|b| b.takes(&request)));
                }
            }
            prop_assert_eq!(table.route(&request), table.scan(&request));
        }
    }
}
