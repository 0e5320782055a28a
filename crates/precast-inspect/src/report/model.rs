//! The part of the report for one model.

use std::collections::{BTreeMap, BTreeSet};

use precast_store::{
    Digest, Filter, Store, StoreError,
    record::{Failure, Program, Release, Sizes, TrainPart, session_bytes},
};
use serde::Serialize;

use crate::{
    coverage::{self, Grid},
    list::bucket_order,
    receipt::{Instead, ReceiptSummary},
};

/// A model's release, or all its programs if it has none.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModelPart {
    /// Name of the model.
    pub model: String,
    /// Number of the release; absent where the model has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<u64>,
    /// Programs that a narrowed build left out of it: with any it is a partial release.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    /// Programs of the previous whole release without a replacement here.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<String>,
    /// Name that the user gave the release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Names of the targets.
    pub targets: Vec<String>,
    /// Bytes of the weight set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<u64>,
    /// Modules that have programs here, sorted by name.
    pub modules: Vec<Module>,
    /// Distinct, in the order of their compiles.
    pub artifacts: Vec<ArtifactLine>,
    /// Number of artifact calls of programs: more than the number of artifacts if programs share them.
    pub calls: usize,
}

/// One module of a model.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Module {
    /// Name in the spec.
    pub name: String,
    /// Smallest bucket first.
    pub programs: Vec<ProgramLine>,
    /// Its buckets as a table, where they form one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grid: Option<Grid>,
}

/// One program.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProgramLine {
    /// The request key.
    pub id: Digest,
    /// As `batch=8 seq=128`, `dynamic` or `eager`.
    pub bucket: String,
    /// The bucket; for a dynamic program the sizes of its samples.
    pub sizes: Sizes,
    /// Calls of artifacts in one run.
    pub steps: usize,
    /// Distinct artifacts.
    pub artifacts: usize,
    /// Bytes of all that it calls, with the eager one.
    pub bytes: u64,
    /// Bytes of the states that a session has at this bucket.
    pub state_bytes: u64,
    /// Whether it is a bucket of the grid, and not the dynamic or the eager program of its module.
    pub fixed: bool,
    /// Whether smaller requests may be padded into it.
    pub padded: bool,
    /// The part of a training step that it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainPart>,
    /// Measurements of its build.
    pub receipt: ReceiptSummary,
    /// Eager in place of its artifacts, if that is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_instead: Option<Instead>,
}

/// One artifact.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ArtifactLine {
    /// The artifact key.
    pub id: Digest,
    /// The first step that calls it.
    pub step: String,
    /// Module and bucket of that step.
    pub bucket: String,
    /// Programs of this release that call it.
    pub programs: usize,
    /// Steps that call it.
    pub calls: usize,
    /// Bytes of its object.
    pub bytes: u64,
    /// Phase -> seconds.
    pub seconds: BTreeMap<String, f64>,
    /// Time of the end of its compile, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished: Option<i64>,
}

/// Something that could not be built.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailureLine {
    /// Its record.
    #[serde(flatten)]
    pub failure: Failure,
    /// Seconds since 1970.
    pub at: i64,
}

impl ModelPart {
    pub(super) fn read(
        store: &Store,
        model: &str,
        seq: Option<u64>,
        failures: &[FailureLine],
        damage: &mut Vec<String>,
    ) -> Result<Self, StoreError> {
        let release = match seq {
            Some(seq) => store.releases().at(model, seq),
            None => store.releases().get(model, None),
        };
        let release = release.unwrap_or_else(|error| {
            damage.push(error.to_string());
            None
        });
        let ids = match &release {
            Some(release) => release.programs.clone(),
            None => of_model(store, model)?,
        };
        let mut part = Self {
            model: model.to_owned(),
            release: release.as_ref().map(|release| release.seq),
            lacks: release.iter().flat_map(|r| r.lacks.clone()).collect(),
            lost: vec![],
            name: release.as_ref().and_then(|release| release.name.clone()),
            targets: vec![],
            weights: None,
            modules: vec![],
            artifacts: vec![],
            calls: 0,
        };
        if let Some(release) = &release {
            let whole = |before: &Release| before.seq < release.seq && !before.is_partial();
            let before = store.releases().find(model, whole);
            let lost = before.and_then(|before| match before {
                Some(before) => store.releases().lost(&before, release),
                None => Ok(vec![]),
            });
            part.lost = lost.unwrap_or_else(|error| {
                damage.push(error.to_string());
                vec![]
            });
        }
        if let Some(weights) = release.and_then(|release| release.weights) {
            part.weights = store.objects().row(&weights)?.map(|object| object.size);
        }
        let mut known = BTreeSet::new();
        let mut modules: BTreeMap<String, Vec<ProgramLine>> = BTreeMap::new();
        let mut targets = BTreeSet::new();
        for id in ids {
            match store.records().program(&id) {
                Ok(Some(program)) => {
                    targets.insert(program.target.name());
                    part.count(store, &program, &mut known, damage);
                    let bytes = store.records().program_row(&id)?.map_or(0, |row| row.bytes);
                    let line = line(&program, bytes);
                    modules.entry(program.module).or_default().push(line);
                }
                Ok(None) => damage.push(format!("program {} is not in the store", id.short())),
                Err(error) => damage.push(error.to_string()),
            }
        }
        part.targets = targets.into_iter().collect();
        part.artifacts
            .sort_by(|a, b| (a.finished, &a.step).cmp(&(b.finished, &b.step)));
        for (name, mut programs) in modules {
            programs.sort_by(|a, b| bucket_order(&a.bucket, &b.bucket));
            let buckets = programs.iter().filter(|program| program.fixed);
            let there: Vec<Sizes> = buckets.map(|program| program.sizes.clone()).collect();
            let failed = failures.iter().map(|line| &line.failure);
            let failed = failed.filter(|it| it.model == model && it.module == name);
            let wanted: Vec<Sizes> = failed.map(|failure| failure.sizes.clone()).collect();
            part.modules.push(Module {
                grid: coverage::grid(&there, &wanted),
                name,
                programs,
            });
        }
        Ok(part)
    }

    /// Counts the artifacts that a program calls.
    fn count(
        &mut self,
        store: &Store,
        program: &Program,
        known: &mut BTreeSet<Digest>,
        damage: &mut Vec<String>,
    ) {
        let mut seen = BTreeSet::new();
        for step in &program.steps {
            let id = step.artifact;
            self.calls += 1;
            if known.insert(id) {
                match store.records().artifact(&id) {
                    Ok(Some(artifact)) => self.artifacts.push(ArtifactLine {
                        id,
                        step: step.name.clone(),
                        bucket: format!("{} {}", program.module, program.bucket()),
                        programs: 0,
                        calls: 0,
                        bytes: artifact.size,
                        seconds: artifact.receipt.seconds,
                        finished: artifact.provenance.created,
                    }),
                    Ok(None) => {
                        damage.push(format!("artifact {} is not in the store", id.short()));
                    }
                    Err(error) => damage.push(error.to_string()),
                }
            }
            if let Some(line) = self.artifacts.iter_mut().find(|line| line.id == id) {
                line.calls += 1;
                line.programs += usize::from(seen.insert(id));
            }
        }
    }

    /// Returns every program of the model.
    pub fn programs(&self) -> impl Iterator<Item = (&Module, &ProgramLine)> {
        self.modules
            .iter()
            .flat_map(|module| module.programs.iter().map(move |line| (module, line)))
    }

    /// Returns the total seconds of all compiles and captures.
    pub fn seconds(&self) -> f64 {
        let compiles = self
            .artifacts
            .iter()
            .flat_map(|artifact| artifact.seconds.values());
        let programs = self
            .programs()
            .flat_map(|(_, line)| line.receipt.seconds.values());
        compiles.chain(programs).sum()
    }
}

fn line(program: &Program, bytes: u64) -> ProgramLine {
    let artifacts: BTreeSet<Digest> = program.steps.iter().map(|step| step.artifact).collect();
    ProgramLine {
        id: program.id,
        bucket: program.bucket(),
        sizes: program.sizes.clone(),
        steps: program.steps.len(),
        artifacts: artifacts.len(),
        bytes,
        state_bytes: session_bytes([program]),
        fixed: program.dynamic.is_none(),
        padded: program.sizes.keys().all(|dim| program.padding.allows(dim)),
        train: program.train.as_ref().map(|train| train.part),
        receipt: ReceiptSummary::of(program),
        eager_instead: Instead::of(program),
    }
}

/// Returns the programs of a model without a release.
fn of_model(store: &Store, model: &str) -> Result<Vec<Digest>, StoreError> {
    let filter = Filter {
        model: Some(model.to_owned()),
        ..Filter::default()
    };
    store
        .records()
        .programs(filter)
        .map(|row| Ok(row?.id))
        .collect()
}
