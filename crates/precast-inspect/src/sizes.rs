//! Sizes of requests, read from a file: buckets for them, and the cost of padding to buckets.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::checks::Padding;

/// The largest number of buckets that a dimension gets.
const BUCKETS: usize = 4;
/// Sizes are rounded up to a multiple of this, so that buckets do not depend on one odd request.
const STEP: u64 = 8;

/// The content of a file of sizes.
#[derive(Debug, PartialEq)]
pub enum RequestSizes {
    /// Sizes of the one dimension that is not the batch.
    Any(Vec<u64>),
    /// Sizes of each dimension.
    ByDimension(BTreeMap<String, Vec<u64>>),
}

/// A file of sizes can't be used.
#[derive(Debug, thiserror::Error)]
pub enum SizesError {
    /// It can't be read.
    #[error("can't read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// It is no JSON of sizes.
    #[error("`{}` has no sizes", path.display())]
    NoSizes {
        /// The file.
        path: PathBuf,
    },
    /// It is a list, and the inputs have several dimensions.
    #[error("the file of sizes does not say of which dimension they are")]
    WhichDimension {
        /// The dimensions of the inputs.
        dims: Vec<String>,
    },
    /// It names a dimension that no input has.
    #[error("no input has the dimension `{dim}` of the file of sizes")]
    UnknownDimension {
        /// The dimension.
        dim: String,
        /// The dimensions of the inputs.
        dims: Vec<String>,
    },
}

impl SizesError {
    /// Returns a hint for the user; none if the hint depends on the source of the error.
    pub fn hint(&self) -> Option<String> {
        let known = |dims: &[String]| {
            let names: Vec<String> = dims.iter().map(|dim| format!("`{dim}`")).collect();
            format!("the inputs have the dimensions {}", names.join(", "))
        };
        match self {
            Self::Read { .. } => None,
            Self::NoSizes { .. } => {
                let hint =
                    "write a JSON list of numbers, or an object with a list for each dimension";
                Some(hint.to_owned())
            }
            Self::WhichDimension { dims } => {
                let dims = known(dims);
                Some(format!("write an object with a list for each; {dims}"))
            }
            Self::UnknownDimension { dims, .. } => Some(known(dims)),
        }
    }
}

impl RequestSizes {
    /// Reads `[17, 33, …]`, `{"lengths": [17, …]}` or `{"batch": [1, …], "seq": [17, …]}`.
    pub fn read(path: &Path) -> Result<Self, SizesError> {
        let path = path.to_owned();
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text).ok_or(SizesError::NoSizes { path }),
            Err(source) => Err(SizesError::Read { path, source }),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let list = |value: &Value| -> Option<Vec<u64>> {
            let sizes: Option<Vec<u64>> = value.as_array()?.iter().map(Value::as_u64).collect();
            sizes.filter(|sizes| !sizes.is_empty() && sizes.iter().all(|size| *size > 0))
        };
        match serde_json::from_str(text).ok()? {
            Value::Object(map) => match map.get("lengths") {
                Some(lengths) => Some(Self::Any(list(lengths)?)),
                None if map.is_empty() => None,
                None => {
                    let read = map.iter();
                    let read = read.map(|(dim, sizes)| Some((dim.clone(), list(sizes)?)));
                    read.collect::<Option<_>>().map(Self::ByDimension)
                }
            },
            value => Some(Self::Any(list(&value)?)),
        }
    }
}

/// Returns the buckets of each dimension: from a file if it has sizes of the dimension, else the observed sizes.
pub fn buckets(
    seen: &BTreeMap<String, Vec<u64>>,
    wanted: Option<&RequestSizes>,
) -> Result<BTreeMap<String, Vec<u64>>, SizesError> {
    let own = seen.iter();
    let own = own.map(|(dim, sizes)| (dim.clone(), choose(BUCKETS, sizes, 1)));
    let mut buckets: BTreeMap<String, Vec<u64>> = own.collect();
    if let Some(wanted) = wanted {
        for (dim, sizes) in by_dimension(seen, wanted)? {
            // Sizes without a name are lengths, for every name of the dimension.
            let exact = dim == "batch" && matches!(wanted, RequestSizes::ByDimension(_));
            let step = if exact { 1 } else { STEP };
            buckets.insert(dim.to_owned(), choose(BUCKETS, sizes, step));
        }
    }
    Ok(buckets)
}

/// Returns the sizes of a file by dimension; `known` are the dimensions of the inputs.
fn by_dimension<'a>(
    known: &'a BTreeMap<String, Vec<u64>>,
    wanted: &'a RequestSizes,
) -> Result<Vec<(&'a String, &'a [u64])>, SizesError> {
    let dims = || known.keys().cloned().collect();
    match wanted {
        RequestSizes::Any(sizes) => {
            let others: Vec<_> = known.keys().filter(|dim| *dim != "batch").collect();
            match (&others[..], known.keys().next()) {
                (&[dim], _) | ([], Some(dim)) => Ok(vec![(dim, sizes)]),
                _ => Err(SizesError::WhichDimension { dims: dims() }),
            }
        }
        RequestSizes::ByDimension(all) => {
            if let Some(dim) = all.keys().find(|dim| !known.contains_key(*dim)) {
                let (dim, dims) = (dim.clone(), dims());
                return Err(SizesError::UnknownDimension { dim, dims });
            }
            Ok(all.iter().map(|(dim, sizes)| (dim, &sizes[..])).collect())
        }
    }
}

/// Returns the cost of padding in each dimension of a file. `buckets` are those of the spec by dimension.
pub fn padding(
    buckets: &BTreeMap<String, Vec<u64>>,
    wanted: &RequestSizes,
) -> Result<Vec<Padding>, SizesError> {
    let one = |(dim, sizes): (&String, &[u64])| {
        let own = &buckets[dim];
        let in_own = covered(sizes, own);
        let step = if dim == "batch" { 1 } else { STEP };
        let best = choose(own.len().max(1), sizes, step);
        Padding {
            dim: dim.clone(),
            buckets: own.clone(),
            sizes: sizes.len(),
            uncovered: sizes.len() - in_own.len(),
            waste: waste(&in_own),
            best_waste: waste(&covered(sizes, &best)).unwrap_or(0.0),
            best,
        }
    };
    Ok(by_dimension(buckets, wanted)?
        .into_iter()
        .map(one)
        .collect())
}

/// Returns the sizes that have a covering bucket, each with the smallest of them; `buckets` are in order.
fn covered(sizes: &[u64], buckets: &[u64]) -> Vec<(u64, u64)> {
    let cover = |size: &u64| buckets.iter().copied().find(|bucket| bucket >= size);
    let pairs = sizes.iter().filter_map(|size| Some((*size, cover(size)?)));
    pairs.collect()
}

/// Returns the share of padding in the computed sizes, from pairs of a size and its bucket.
fn waste(pairs: &[(u64, u64)]) -> Option<f64> {
    let sum = |(asked, computed), (size, bucket): &(u64, u64)| {
        (asked + *size as f64, computed + *bucket as f64)
    };
    let (asked, computed) = pairs.iter().fold((0.0, 0.0), sum);
    (computed > 0.0).then(|| 1.0 - asked / computed)
}

/// Returns at most `max` buckets with the least padding of these sizes. The largest size is always covered.
fn choose(max: usize, sizes: &[u64], step: u64) -> Vec<u64> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for size in sizes {
        *counts
            .entry(size.div_ceil(step).saturating_mul(step))
            .or_default() += 1;
    }
    let distinct: Vec<(u64, u64)> = counts.into_iter().collect();
    // best[n][end]: the minimum of the computed sizes for the first `end` sizes in `n` buckets, and the start of the
    // last bucket.
    let count = distinct.len();
    let mut best = vec![vec![(u64::MAX, 0); count + 1]; max.min(count) + 1];
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

    /// Returns the sum of the sizes after padding.
    fn took(sizes: &[u64], buckets: &[u64]) -> u64 {
        let cover = |size: &u64| buckets.iter().find(|bucket| *bucket >= size).unwrap();
        sizes.iter().map(cover).sum()
    }

    /// Returns requests of one size in one dimension.
    fn of(dim: &str, size: u64) -> RequestSizes {
        RequestSizes::ByDimension([(dim.to_owned(), vec![size])].into())
    }

    #[test]
    fn buckets_pad_least() {
        assert_eq!(choose(BUCKETS, &[5], 1), [5]);
        assert_eq!(choose(BUCKETS, &[1, 8, 1, 1], 1), [1, 8]);
        let sizes = [3, 3, 3, 9, 9, 27, 81, 82];
        assert_eq!(choose(BUCKETS, &sizes, 1), [3, 9, 27, 82]);
        assert_eq!(choose(BUCKETS, &[17, 33, 120], 8), [24, 40, 120]);
        let sizes: Vec<u64> = (0..200).map(|i| 1 + (i * i) % 97).collect();
        let chosen = choose(BUCKETS, &sizes, 1);
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
    fn padding_is_a_share_of_the_computed_sizes() {
        let buckets = [("batch", vec![1, 8]), ("seq", vec![32, 128])];
        let buckets = buckets.map(|(dim, sizes)| (dim.to_owned(), sizes)).into();
        let list = RequestSizes::Any(vec![16, 32, 64, 200]);
        let costs = padding(&buckets, &list).unwrap();
        let expected = Padding {
            dim: "seq".to_owned(),
            buckets: vec![32, 128],
            sizes: 4,
            uncovered: 1,
            waste: Some(1.0 - 112.0 / 192.0),
            best: vec![64, 200],
            best_waste: 1.0 - 312.0 / 392.0,
        };
        assert_eq!(costs, [expected]);
        let batch = of("batch", 9);
        let costs = padding(&buckets, &batch).unwrap();
        assert_eq!((costs[0].uncovered, costs[0].waste), (1, None));
        let other = of("tokens", 3);
        assert!(padding(&buckets, &other).is_err());
    }

    #[test]
    fn files_of_sizes() {
        for (text, sizes) in [
            ("[1, 2]", RequestSizes::Any(vec![1, 2])),
            (
                "{\"schema\": 1, \"lengths\": [7]}",
                RequestSizes::Any(vec![7]),
            ),
            ("{\"seq\": [3]}", of("seq", 3)),
        ] {
            assert_eq!(RequestSizes::parse(text), Some(sizes), "{text}");
        }
        for wrong in ["", "[]", "{}", "[0]", "[1.5]", "{\"seq\": 3}", "3"] {
            assert_eq!(RequestSizes::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_list_is_of_the_dimension_that_is_not_the_batch() {
        let seen = |dims: &[&str]| {
            let dims = dims.iter();
            dims.map(|dim| ((*dim).to_owned(), vec![2])).collect()
        };
        let any = RequestSizes::Any(vec![17]);
        let chosen = buckets(&seen(&["batch", "seq"]), Some(&any)).unwrap();
        assert_eq!(chosen["seq"], [24]);
        assert_eq!(chosen["batch"], [2]);
        let chosen = buckets(&seen(&["batch"]), Some(&any)).unwrap();
        assert_eq!(chosen["batch"], [24]);
        for wrong in [&["batch", "height", "width"][..], &[]] {
            assert!(buckets(&seen(wrong), Some(&any)).is_err(), "{wrong:?}");
        }
        let error = buckets(&seen(&["batch"]), Some(&of("tokens", 3))).unwrap_err();
        assert_eq!(
            error.hint().unwrap(),
            "the inputs have the dimensions `batch`"
        );
    }
}
