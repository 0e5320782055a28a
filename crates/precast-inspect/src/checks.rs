//! The findings of a check: the document of `precast check --format json`, which `precast report --check` reads.

use precast_builder::{
    CheckedModule, Forecast,
    protocol::{Finding, Severity},
    spec::{Spec, check::Allow},
};
use precast_store::record::SCHEMA;
use serde::{Deserialize, Serialize};

/// `precast check --format json`
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Checks {
    /// Name of the model in the spec.
    pub model: String,
    /// Whether the exit code is 1.
    pub failed: bool,
    /// One entry for each checked module.
    pub modules: Vec<CheckedModule>,
    /// Entries of `[[check.allow]]` that no finding matches.
    pub unused: Vec<Allow>,
    /// The compiles of a build.
    pub build: Forecast,
    /// The cost of padding the sizes of a file, by dimension; empty without a file.
    pub padding: Vec<Padding>,
}

/// The cost of padding the sizes of a file to the buckets of a dimension.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Padding {
    /// Name of the dimension.
    pub dim: String,
    /// Sizes that the spec has buckets for.
    pub buckets: Vec<u64>,
    /// Number of sizes in the file, and number of sizes that no bucket covers.
    pub sizes: usize,
    /// Number of these sizes above the largest bucket.
    pub uncovered: usize,
    /// The share of padding in the covered sizes, 0 to 1; none without any.
    pub waste: Option<f64>,
    /// The same number of buckets, chosen for the least padding of all sizes of the file.
    pub best: Vec<u64>,
    /// The share of padding with `best`, 0 to 1.
    pub best_waste: f64,
}

/// Adds the reasons of a spec to intended findings. A finding that stops a build can't be allowed.
pub fn allow(modules: &mut [CheckedModule], spec: &Spec) {
    for finding in modules.iter_mut().flat_map(|it| &mut it.checked.findings) {
        let mut own = spec.allowed.iter().filter(|allow| finding.is_of(allow));
        let allow = own.next().filter(|_| finding.severity < Severity::High);
        finding.allowed = allow.map(|allow| allow.reason.clone());
    }
}

/// One finding with all its modules.
#[derive(Debug)]
pub struct FindingRow<'a> {
    /// The finding in the first of the modules.
    pub finding: &'a Finding,
    /// Names of the modules.
    pub modules: Vec<&'a str>,
    /// Whether a build needs one of them.
    pub needed: bool,
}

/// Returns the findings of modules, each once, by severity.
pub fn rows(modules: &[CheckedModule]) -> Vec<FindingRow<'_>> {
    let mut rows: Vec<FindingRow<'_>> = Vec::new();
    for module in modules {
        for finding in &module.checked.findings {
            let same = |row: &&mut FindingRow<'_>| {
                row.modules.last() != Some(&module.module.as_str())
                    && row.finding.category == finding.category
                    && row.finding.location == finding.location
                    && row.finding.severity == finding.severity
                    && (finding.location.is_some() || row.finding.why == finding.why)
            };
            match rows.iter_mut().find(same) {
                Some(row) => {
                    row.modules.push(&module.module);
                    row.needed |= module.needed;
                }
                None => rows.push(FindingRow {
                    finding,
                    modules: vec![&module.module],
                    needed: module.needed,
                }),
            }
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.finding.severity));
    rows
}

/// Parses the output of a check; none for other text and for another schema.
pub fn parse(text: &[u8]) -> Option<Checks> {
    let document: serde_json::Value = serde_json::from_slice(text).ok()?;
    let known = document["schema"].as_u64() == Some(SCHEMA.into());
    known.then(|| serde_json::from_value(document).ok())?
}
