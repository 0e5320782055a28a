//! Statistics of production: the sum of the counts of runtimes.
//!
//! A runtime counts calls by module, request sizes and answer. A service writes the counts of its models to a file at
//! any time ([`Counts`] as JSON). The counts of any number of files and processes can be added.

use std::collections::BTreeMap;

use serde::Serialize;

pub use precast_store::record::{Calls, Counts};
use precast_store::record::{SCHEMA, Sizes};

/// The reason why a file of counts can't be read.
#[derive(Debug, thiserror::Error)]
pub enum CountsError {
    /// The file is not JSON, or lacks a field.
    #[error("it is not a file of counts")]
    Json(#[from] serde_json::Error),
    /// Another version of precast wrote the file.
    #[error("its schema is {found}, this precast knows {SCHEMA}")]
    Schema {
        /// Version in the file.
        found: u32,
    },
}

impl CountsError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Json(_) => {
                "a service writes one from the counts of its model, and `precast run` with `--counts FILE`"
            }
            Self::Schema { .. } => {
                "update precast, or write the counts with the precast that reads them"
            }
        }
    }
}

/// Parses a file of counts.
pub fn parse(text: &[u8]) -> Result<Counts, CountsError> {
    let counts: Counts = serde_json::from_slice(text)?;
    if counts.schema != SCHEMA {
        let found = counts.schema;
        return Err(CountsError::Schema { found });
    }
    Ok(counts)
}

/// Calls of one module.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModuleStats {
    /// Name of the model.
    pub model: String,
    /// Name of the module in the spec.
    pub module: String,
    /// All calls, refused ones included.
    pub calls: u64,
    /// Rung -> calls.
    pub rungs: BTreeMap<String, u64>,
    /// The share of padding in all bucketed calls, 0 to 1; absent without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waste: Option<f64>,
    /// Requests without a bucket of exactly their size, most frequent first.
    pub misses: Vec<Miss>,
}

/// Requests of one size without a bucket of exactly that size.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Miss {
    /// Empty if requests of many sizes were counted together.
    pub sizes: Sizes,
    /// The kind of the answer: `padded`, `dynamic`, `eager` or `refused`.
    pub rung: String,
    /// The bucket that answered, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<Sizes>,
    /// Number of calls.
    pub count: u64,
    /// The share of the bucket that was padding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waste: Option<f64>,
}

impl ModuleStats {
    /// Returns the share of calls that a bucket of exactly their size answered.
    pub fn hit_rate(&self) -> f64 {
        let exact = self.rungs.get("exact").copied().unwrap_or(0);
        exact as f64 / self.calls.max(1) as f64
    }
}

/// The sums of one module.
#[derive(Default)]
struct Sum {
    stats: ModuleStats,
    /// By requested sizes, answering bucket and rung.
    misses: BTreeMap<(Sizes, Option<Sizes>, String), Miss>,
    /// Elements of the requests of bucketed calls, and elements of their buckets.
    asked: f64,
    computed: f64,
}

/// Adds up counts by model and module.
pub fn stats(all: &[Counts]) -> Vec<ModuleStats> {
    let mut sums: BTreeMap<(&str, &str), Sum> = BTreeMap::new();
    for counts in all {
        for calls in &counts.calls {
            let sum = sums.entry((&counts.model, &calls.module)).or_default();
            sum.stats.calls += calls.count;
            *sum.stats.rungs.entry(calls.rung.clone()).or_default() += calls.count;
            let bucket = calls.bucket.as_ref().filter(|_| !calls.sizes.is_empty());
            let volumes = bucket.map(|bucket| (volume(&calls.sizes), volume(bucket)));
            if let Some((asked, computed)) = volumes {
                sum.asked += asked * calls.count as f64;
                sum.computed += computed * calls.count as f64;
            }
            if calls.rung != "exact" {
                let place = (
                    calls.sizes.clone(),
                    calls.bucket.clone(),
                    calls.rung.clone(),
                );
                let miss = || Miss {
                    sizes: calls.sizes.clone(),
                    rung: calls.rung.clone(),
                    bucket: calls.bucket.clone(),
                    count: 0,
                    waste: volumes.map(|(asked, computed)| 1.0 - asked / computed),
                };
                sum.misses.entry(place).or_insert_with(miss).count += calls.count;
            }
        }
    }
    let modules = sums.into_iter().map(|((model, module), sum)| {
        let mut misses: Vec<Miss> = sum.misses.into_values().collect();
        misses.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.sizes.cmp(&b.sizes)));
        ModuleStats {
            model: model.to_owned(),
            module: module.to_owned(),
            waste: (sum.computed > 0.0).then(|| 1.0 - sum.asked / sum.computed),
            misses,
            ..sum.stats
        }
    });
    modules.collect()
}

fn volume(sizes: &Sizes) -> f64 {
    sizes
        .values()
        .map(|size| *size as f64)
        .product::<f64>()
        .max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(seq: i64, bucket: Option<i64>, rung: &str, count: u64) -> Calls {
        let sizes = |seq| BTreeMap::from([("seq".to_owned(), seq)]);
        Calls {
            module: "encode".into(),
            sizes: sizes(seq),
            bucket: bucket.map(sizes),
            rung: rung.into(),
            count,
        }
    }

    #[test]
    fn files_add_up_and_misses_come_by_frequency() {
        let one = Counts {
            schema: 1,
            model: "m".into(),
            since: 0,
            until: 10,
            calls: vec![
                calls(32, Some(32), "exact", 6),
                calls(16, Some(32), "padded", 2),
            ],
        };
        let text = serde_json::to_vec(&one).unwrap();
        assert_eq!(parse(&text).unwrap(), one);
        let two = Counts {
            calls: vec![
                calls(16, Some(32), "padded", 1),
                calls(64, None, "eager", 1),
                calls(64, None, "eager", 1),
            ],
            ..one.clone()
        };
        let [module] = &stats(&[one, two])[..] else {
            panic!()
        };
        assert_eq!(module.calls, 11);
        assert_eq!(module.hit_rate(), 6.0 / 11.0);
        assert_eq!(module.rungs["padded"], 3);
        // 6 * 32 + 3 * 16 requested, 9 * 32 computed.
        assert!((module.waste.unwrap() - (1.0 - 240.0 / 288.0)).abs() < 1e-9);
        let eager = &module.misses[1];
        assert_eq!((module.misses[0].count, eager.count), (3, 2));
        assert_eq!((&eager.bucket, eager.waste), (&None, None));
        assert!(parse(b"{}").is_err());
        assert!(matches!(
            parse(br#"{"schema":9,"model":"m","since":0,"until":0,"calls":[]}"#),
            Err(CountsError::Schema { found: 9 })
        ));
    }
}
