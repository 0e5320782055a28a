//! The report: one HTML page with the content of releases, build times, speedups and failures.
//!
//! [`Page::read`] reads the store, [`Page::html`] renders the page. The page is one file: its charts are inline SVG,
//! and a content security policy forbids the browser to fetch anything. Without scripts it lacks only filters and
//! sorting.

mod charts;
mod checks;
mod html;
mod model;
mod table;
mod training;

use precast_store::{GroupBy, Store, StoreError};
use serde::Serialize;

use super::{
    checks::Checks,
    stats::{self, Counts, ModuleStats},
    training::Training,
    usage::{self, DiskUsage},
};

pub use model::{ArtifactLine, FailureLine, ModelPart, Module, ProgramLine};

/// The content of the page.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Only this model.
    pub model: Option<String>,
    /// The release of that number instead of the newest one; needs `model`.
    pub release: Option<u64>,
    /// Counts of production.
    pub counts: Vec<Counts>,
    /// Results of checks.
    pub checks: Vec<Checks>,
    /// Figures of processes that trained.
    pub training: Vec<Training>,
}

/// The data of the page.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Page {
    /// The store's folder.
    pub store: String,
    /// Time at which the store was read, in seconds since 1970.
    pub made: i64,
    /// Bytes of the store and of its parts.
    pub usage: DiskUsage,
    /// Every model that has programs, sorted by name.
    pub models: Vec<ModelPart>,
    /// The last attempts that failed.
    pub failures: Vec<FailureLine>,
    /// Calls in production, by module.
    pub production: Vec<ModuleStats>,
    /// Training steps of these models beside eager, as builds and processes that trained measured them.
    pub training: Vec<Training>,
    /// Results of checks of these models.
    pub checks: Vec<Checks>,
    /// Parts of the store that could not be read, one line each.
    pub damage: Vec<String>,
}

impl Page {
    /// Reads the page of a store. `made` is the page's time, in seconds since 1970.
    ///
    /// Damaged parts are listed and left out.
    pub fn read(store: &Store, choice: &Choice, made: i64) -> Result<Self, StoreError> {
        let (mut damage, mut failures, mut models) = (Vec::new(), Vec::new(), Vec::new());
        let chosen = |model: &str| choice.model.as_ref().is_none_or(|own| own == model);
        for failure in store.records().failures() {
            match failure {
                Ok((failure, at)) if chosen(&failure.model) => {
                    failures.push(FailureLine { failure, at });
                }
                Ok(_) => {}
                Err(error) => damage.push(error.to_string()),
            }
        }
        let names = store.releases().models()?;
        for name in names.iter().filter(|name| chosen(name)) {
            let release = choice.release.filter(|_| choice.model.is_some());
            let part = ModelPart::read(store, name, release, &failures, &mut damage)?;
            models.push(part);
        }
        let counts = choice.counts.iter().filter(|counts| chosen(&counts.model));
        let checks = choice.checks.iter().filter(|checks| chosen(&checks.model));
        let runs = choice.training.iter().filter(|it| chosen(&it.model));
        let mut figures: Vec<Training> = models.iter().flat_map(training::built).collect();
        figures.extend(runs.cloned());
        Ok(Self {
            store: store.path().display().to_string(),
            made,
            usage: usage::usage(store, GroupBy::Module)?,
            models,
            failures,
            training: figures,
            production: stats::stats(&counts.cloned().collect::<Vec<_>>()),
            checks: checks.cloned().collect(),
            damage,
        })
    }

    /// Draws the page as one HTML file.
    pub fn html(&self) -> String {
        html::page(self).into_string()
    }
}
