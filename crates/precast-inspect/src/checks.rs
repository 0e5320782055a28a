//! The findings of a check: the document of `precast check --format json`, which `precast report --check` reads.

use std::collections::BTreeMap;

use precast_builder::{
    CheckedModule, Forecast,
    protocol::{Cost, Finding, Free, KeptOut, Recompiles, Repeated, Severity},
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
    /// One entry for each module that was looked at.
    pub modules: Vec<ModuleChecks>,
    /// Entries of `[[check.allow]]` that no finding matches.
    pub unused: Vec<Allow>,
    /// The compiles of a build.
    pub build: Forecast,
    /// The cost of padding the sizes of a file, by dimension; empty without a file.
    pub padding: Vec<Padding>,
}

/// The findings of one module.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModuleChecks {
    /// The module's title in the spec, or the submodule's name.
    pub module: String,
    /// The submodule; empty for the model itself.
    pub path: String,
    /// Whether a build needs it: its findings can fail the check.
    pub needed: bool,
    /// The bucket that was looked at.
    pub bucket: String,
    /// How many buckets it has.
    pub buckets: usize,
    /// Whether a build can capture it; null where it was not looked at.
    pub captured: Option<bool>,
    /// Calls of artifacts at one bucket.
    pub steps: Option<u64>,
    /// Distinct artifacts at one bucket.
    pub artifacts: Option<u64>,
    /// Bucketed dimension -> the sizes that a dynamic artifact holds for; null where the code fixes it.
    pub dynamic: Option<BTreeMap<String, Option<Free>>>,
    /// Lists of submodules, and how many artifacts each needs.
    pub lists: Vec<Repeated>,
    /// The operations that a CUDA graph can't contain.
    pub graph: Vec<KeptOut>,
    /// The recompiles under torch.compile; null without `--recompiles`.
    pub recompiles: Option<Recompiles>,
    /// The minimum cost of its buckets; null without `--cost`.
    pub cost: Option<Cost>,
    /// Findings by severity, then by place.
    pub findings: Vec<FindingLine>,
    /// Open questions, one line each.
    pub unknown: Vec<String>,
    /// Seconds that the check took.
    pub seconds: f64,
}

/// A finding, and why it is intended.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FindingLine {
    /// The finding.
    #[serde(flatten)]
    pub finding: Finding,
    /// The reason in `[[check.allow]]`, where the spec has one for it.
    pub allowed: Option<String>,
}

/// The cost of padding the sizes of a file to the buckets of a dimension.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Padding {
    /// Name of the dimension.
    pub dim: String,
    /// Sizes that the spec has buckets for.
    pub buckets: Vec<u64>,
    /// How many sizes the file has, and how many of them no bucket covers.
    pub sizes: usize,
    /// How many of these sizes are above the largest bucket.
    pub uncovered: usize,
    /// The share of padding in the covered sizes, 0 to 1; none without any.
    pub waste: Option<f64>,
    /// The same number of buckets, chosen for the least padding of all sizes of the file.
    pub best: Vec<u64>,
    /// The share of padding with `best`, 0 to 1.
    pub best_waste: f64,
}

impl ModuleChecks {
    /// Returns a module with the reasons that a spec has for its findings.
    pub fn new(module: CheckedModule, spec: &Spec) -> Self {
        let checked = module.checked;
        let line = |finding: Finding| FindingLine {
            allowed: allowed(spec, &finding).map(|allow| allow.reason.clone()),
            finding,
        };
        Self {
            module: module.module,
            path: module.path,
            needed: module.needed,
            bucket: module.bucket,
            buckets: module.buckets,
            captured: checked.captured,
            steps: checked.steps,
            artifacts: checked.artifacts,
            dynamic: checked.dynamic,
            lists: checked.lists,
            graph: checked.graph,
            recompiles: checked.recompiles,
            cost: checked.cost,
            findings: checked.findings.into_iter().map(line).collect(),
            unknown: checked.unknown,
            seconds: checked.seconds,
        }
    }
}

/// Returns the spec's entry for an intended finding. A finding that stops a build can't be allowed.
fn allowed<'a>(spec: &'a Spec, finding: &Finding) -> Option<&'a Allow> {
    let mut own = spec.allowed.iter();
    own.find(|allow| finding.severity < Severity::High && is_about(allow, finding))
}

/// Returns whether an entry of `[[check.allow]]` matches a finding of any severity.
pub fn is_about(allow: &Allow, finding: &Finding) -> bool {
    allow.matches(&finding.category, finding.function.as_deref())
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
    /// The reason why it is intended.
    pub allowed: Option<&'a str>,
}

impl Checks {
    /// Returns the findings of all modules, each once, by severity.
    pub fn rows(&self) -> Vec<FindingRow<'_>> {
        rows(&self.modules)
    }
}

/// Returns the findings of modules, each once, by severity.
pub fn rows(modules: &[ModuleChecks]) -> Vec<FindingRow<'_>> {
    let mut rows: Vec<FindingRow<'_>> = Vec::new();
    for module in modules {
        for line in &module.findings {
            let finding = &line.finding;
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
                    allowed: line.allowed.as_deref(),
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
