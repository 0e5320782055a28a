//! Buckets from the sizes that requests have.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::cli::exit::Usage;

/// How many buckets a dimension gets at most.
const BUCKETS: usize = 4;
/// Sizes are rounded up to a multiple of this, so that buckets do not hang on one odd request.
const STEP: u64 = 8;

/// What a file of sizes says.
#[derive(Debug, PartialEq)]
pub(super) enum Wanted {
    /// Of the one dimension that is not the batch.
    Any(Vec<u64>),
    ByDimension(BTreeMap<String, Vec<u64>>),
}

/// Reads `[17, 33, …]`, `{"lengths": [17, …]}` or `{"batch": [1, …], "seq": [17, …]}`.
pub(super) fn read(path: &Path) -> Result<Wanted> {
    let text =
        fs::read_to_string(path).with_context(|| format!("can't read `{}`", path.display()))?;
    parse(&text).ok_or_else(|| {
        Usage {
            message: format!("`{}` has no sizes", path.display()),
            hint: "write a JSON list of numbers, or an object with a list for each dimension"
                .to_owned(),
        }
        .into()
    })
}

fn parse(text: &str) -> Option<Wanted> {
    let list = |value: &Value| -> Option<Vec<u64>> {
        let sizes: Option<Vec<u64>> = value.as_array()?.iter().map(Value::as_u64).collect();
        sizes.filter(|sizes| !sizes.is_empty() && sizes.iter().all(|size| *size > 0))
    };
    match serde_json::from_str(text).ok()? {
        Value::Object(map) => match map.get("lengths") {
            Some(lengths) => Some(Wanted::Any(list(lengths)?)),
            None => {
                let read = map
                    .iter()
                    .map(|(dim, sizes)| Some((dim.clone(), list(sizes)?)));
                Some(Wanted::ByDimension(read.collect::<Option<_>>()?)).filter(|_| !map.is_empty())
            }
        },
        value => Some(Wanted::Any(list(&value)?)),
    }
}

/// Returns the buckets of each dimension: from a file where it has its sizes, else those that were seen.
pub(super) fn buckets(
    seen: &BTreeMap<String, Vec<u64>>,
    wanted: Option<&Wanted>,
) -> Result<BTreeMap<String, Vec<u64>>, Usage> {
    let mut buckets: BTreeMap<String, Vec<u64>> = seen
        .iter()
        .map(|(dim, sizes)| (dim.clone(), choose(sizes, 1)))
        .collect();
    let known = || {
        let names: Vec<String> = seen.keys().map(|dim| format!("`{dim}`")).collect();
        format!("the inputs have the dimensions {}", names.join(", "))
    };
    match wanted {
        None => {}
        Some(Wanted::Any(sizes)) => {
            let mut others = seen.keys().filter(|dim| *dim != "batch");
            let (first, second) = (others.next(), others.next());
            let dim = match (first, second) {
                (Some(dim), None) => dim,
                (None, None) if seen.len() == 1 => &seen.keys().next().cloned().unwrap_or_default(),
                _ => {
                    return Err(Usage {
                        message: "the file of sizes does not say of which dimension they are"
                            .to_owned(),
                        hint: format!("write an object with a list for each; {}", known()),
                    });
                }
            };
            buckets.insert(dim.clone(), choose(sizes, STEP));
        }
        Some(Wanted::ByDimension(all)) => {
            for (dim, sizes) in all {
                if !seen.contains_key(dim) {
                    return Err(Usage {
                        message: format!("no input has the dimension `{dim}` of the file of sizes"),
                        hint: known(),
                    });
                }
                let step = if dim == "batch" { 1 } else { STEP };
                buckets.insert(dim.clone(), choose(sizes, step));
            }
        }
    }
    Ok(buckets)
}

/// Returns the buckets, at most [`BUCKETS`], that pad these sizes least. The largest size is always covered.
fn choose(sizes: &[u64], step: u64) -> Vec<u64> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for size in sizes {
        *counts
            .entry(size.div_ceil(step).saturating_mul(step))
            .or_default() += 1;
    }
    let distinct: Vec<(u64, u64)> = counts.into_iter().collect();
    // best[n][end]: the least that requests of the first `end` sizes take in `n` buckets, and where the last one begins.
    let count = distinct.len();
    let mut best = vec![vec![(u64::MAX, 0); count + 1]; BUCKETS.min(count) + 1];
    best[0][0] = (0, 0);
    for buckets in 1..best.len() {
        for end in 1..=count {
            let mut requests = 0;
            for begin in (0..end).rev() {
                requests += distinct[begin].1;
                let before = best[buckets - 1][begin].0;
                let took = before.saturating_add(requests.saturating_mul(distinct[end - 1].0));
                if before != u64::MAX && took < best[buckets][end].0 {
                    best[buckets][end] = (took, begin);
                }
            }
        }
    }
    let (mut buckets, mut end, mut left) = (Vec::new(), count, best.len() - 1);
    while end > 0 {
        buckets.push(distinct[end - 1].0);
        end = best[left][end].1;
        left -= 1;
    }
    buckets.reverse();
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What padding to buckets adds to the sizes.
    fn took(sizes: &[u64], buckets: &[u64]) -> u64 {
        let cover = |size: &u64| buckets.iter().find(|bucket| *bucket >= size).unwrap();
        sizes.iter().map(cover).sum()
    }

    #[test]
    fn buckets_pad_least() {
        assert_eq!(choose(&[5], 1), [5]);
        assert_eq!(choose(&[1, 8, 1, 1], 1), [1, 8]);
        assert_eq!(choose(&[3, 3, 3, 9, 9, 27, 81, 82], 1), [3, 9, 27, 82]);
        assert_eq!(choose(&[17, 33, 120], 8), [24, 40, 120]);
        let sizes: Vec<u64> = (0..200).map(|i| 1 + (i * i) % 97).collect();
        let chosen = choose(&sizes, 1);
        assert_eq!((chosen.len(), chosen.last()), (4, sizes.iter().max()));
        let best = took(&sizes, &chosen);
        let top = *sizes.iter().max().unwrap();
        for a in (1..top).step_by(3) {
            for b in (a + 1..top).step_by(3) {
                for c in (b + 1..top).step_by(3) {
                    assert!(best <= took(&sizes, &[a, b, c, top]), "{a} {b} {c}");
                }
            }
        }
    }

    #[test]
    fn files_of_sizes() {
        assert_eq!(parse("[1, 2]"), Some(Wanted::Any(vec![1, 2])));
        assert_eq!(
            parse("{\"schema\": 1, \"lengths\": [7]}"),
            Some(Wanted::Any(vec![7]))
        );
        let by = Wanted::ByDimension([("seq".to_owned(), vec![3])].into());
        assert_eq!(parse("{\"seq\": [3]}"), Some(by));
        for wrong in ["", "[]", "{}", "[0]", "[1.5]", "{\"seq\": 3}", "3"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_list_is_of_the_dimension_that_is_not_the_batch() {
        let seen = |dims: &[&str]| {
            dims.iter()
                .map(|dim| ((*dim).to_owned(), vec![2]))
                .collect()
        };
        let any = Wanted::Any(vec![17]);
        let chosen = buckets(&seen(&["batch", "seq"]), Some(&any)).unwrap();
        assert_eq!(chosen["seq"], [24]);
        assert_eq!(chosen["batch"], [2]);
        assert_eq!(
            buckets(&seen(&["batch"]), Some(&any)).unwrap()["batch"],
            [24]
        );
        for wrong in [&["batch", "height", "width"][..], &[]] {
            assert!(buckets(&seen(wrong), Some(&any)).is_err(), "{wrong:?}");
        }
        let other = Wanted::ByDimension([("tokens".to_owned(), vec![3])].into());
        let error = buckets(&seen(&["batch"]), Some(&other)).unwrap_err();
        assert_eq!(error.hint, "the inputs have the dimensions `batch`");
    }
}
