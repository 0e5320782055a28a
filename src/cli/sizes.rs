//! Sizes of requests, read from a file: buckets for them, and the cost of padding to buckets.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::exit::Usage;
use crate::inspect::checks::Padding;

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
    let own = seen
        .iter()
        .map(|(dim, sizes)| (dim.clone(), choose(sizes, 1)));
    let mut buckets: BTreeMap<String, Vec<u64>> = own.collect();
    if let Some(wanted) = wanted {
        let dims: Vec<&str> = seen.keys().map(String::as_str).collect();
        for (dim, sizes) in by_dimension(&dims, wanted)? {
            buckets.insert(dim.to_owned(), choose(sizes, step(dim, wanted)));
        }
    }
    Ok(buckets)
}

/// Returns what buckets of a dimension are multiples of. Sizes without a name are lengths, whatever they are called.
fn step(dim: &str, wanted: &Wanted) -> u64 {
    match wanted {
        Wanted::ByDimension(_) if dim == "batch" => 1,
        _ => STEP,
    }
}

/// Returns the sizes of a file by dimension; `dims` are those of the inputs, in alphabetic order.
fn by_dimension<'a>(
    dims: &[&'a str],
    wanted: &'a Wanted,
) -> Result<BTreeMap<&'a str, &'a [u64]>, Usage> {
    let known = || {
        let names: Vec<String> = dims.iter().map(|dim| format!("`{dim}`")).collect();
        format!("the inputs have the dimensions {}", names.join(", "))
    };
    match wanted {
        Wanted::Any(sizes) => {
            let others: Vec<&&str> = dims.iter().filter(|dim| **dim != "batch").collect();
            let dim = match (&others[..], dims) {
                ([dim], _) => **dim,
                ([], [dim]) => *dim,
                _ => {
                    return Err(Usage {
                        message: "the file of sizes does not say of which dimension they are"
                            .to_owned(),
                        hint: format!("write an object with a list for each; {}", known()),
                    });
                }
            };
            Ok([(dim, &sizes[..])].into())
        }
        Wanted::ByDimension(all) => {
            if let Some(dim) = all.keys().find(|dim| !dims.contains(&dim.as_str())) {
                return Err(Usage {
                    message: format!("no input has the dimension `{dim}` of the file of sizes"),
                    hint: known(),
                });
            }
            Ok(all
                .iter()
                .map(|(dim, sizes)| (dim.as_str(), &sizes[..]))
                .collect())
        }
    }
}

/// Returns what padding costs in each dimension of a file. `buckets` are those of the spec by dimension.
pub(super) fn padding(
    buckets: &BTreeMap<String, Vec<u64>>,
    wanted: &Wanted,
) -> Result<Vec<Padding>, Usage> {
    let dims: Vec<&str> = buckets.keys().map(String::as_str).collect();
    let one = |(dim, sizes): (&str, &[u64])| {
        let own = &buckets[dim];
        let in_own = covered(sizes, own);
        let step = if dim == "batch" { 1 } else { STEP };
        let best = choose_up_to(own.len().max(1), sizes, step);
        Padding {
            dim: dim.to_owned(),
            buckets: own.clone(),
            sizes: sizes.len(),
            uncovered: sizes.len() - in_own.len(),
            waste: waste(&in_own),
            best_waste: waste(&covered(sizes, &best)).unwrap_or(0.0),
            best,
        }
    };
    Ok(by_dimension(&dims, wanted)?.into_iter().map(one).collect())
}

/// Returns the sizes that have a covering bucket, each with the smallest of them; `buckets` are in order.
fn covered(sizes: &[u64], buckets: &[u64]) -> Vec<(u64, u64)> {
    let cover = |size: &u64| buckets.iter().copied().find(|bucket| bucket >= size);
    let pairs = sizes.iter().filter_map(|size| Some((*size, cover(size)?)));
    pairs.collect()
}

/// Returns the part of what is computed that is padding, of pairs of a size and its bucket.
fn waste(pairs: &[(u64, u64)]) -> Option<f64> {
    let sum = |(asked, computed), (size, bucket): &(u64, u64)| {
        (asked + *size as f64, computed + *bucket as f64)
    };
    let (asked, computed) = pairs.iter().fold((0.0, 0.0), sum);
    (computed > 0.0).then(|| 1.0 - asked / computed)
}

fn choose(sizes: &[u64], step: u64) -> Vec<u64> {
    choose_up_to(BUCKETS, sizes, step)
}

/// Returns the buckets, at most so many, that pad these sizes least. The largest size is always covered.
fn choose_up_to(most: usize, sizes: &[u64], step: u64) -> Vec<u64> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for size in sizes {
        *counts
            .entry(size.div_ceil(step).saturating_mul(step))
            .or_default() += 1;
    }
    let distinct: Vec<(u64, u64)> = counts.into_iter().collect();
    // best[n][end]: the least that requests of the first `end` sizes take in `n` buckets, and where the last one begins.
    let count = distinct.len();
    let mut best = vec![vec![(u64::MAX, 0); count + 1]; most.min(count) + 1];
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
    fn what_padding_costs() {
        let buckets = [
            ("batch".to_owned(), vec![1, 8]),
            ("seq".to_owned(), vec![32, 128]),
        ]
        .into();
        let list = Wanted::Any(vec![16, 32, 64, 200]);
        let told = padding(&buckets, &list).unwrap();
        let expected = Padding {
            dim: "seq".to_owned(),
            buckets: vec![32, 128],
            sizes: 4,
            uncovered: 1,
            waste: Some(1.0 - 112.0 / 192.0),
            best: vec![64, 200],
            best_waste: 1.0 - 312.0 / 392.0,
        };
        assert_eq!(told, [expected]);
        let batch = Wanted::ByDimension([("batch".to_owned(), vec![9])].into());
        let told = padding(&buckets, &batch).unwrap();
        assert_eq!((told[0].uncovered, told[0].waste), (1, None));
        let other = Wanted::ByDimension([("tokens".to_owned(), vec![3])].into());
        assert!(padding(&buckets, &other).is_err());
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
