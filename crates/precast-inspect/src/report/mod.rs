//! The report: one HTML page with the content of releases, build times, speedups and failures.
//!
//! [`Page::read`] reads the store, [`Page::html`] renders the page. The page is one file: its charts are inline SVG, and a
//! content security policy forbids the browser to fetch anything. Without scripts it lacks only filters and sorting.

mod charts;
mod checks;
mod html;
mod model;

use precast_store::{GroupBy, Store, StoreError};
use serde::Serialize;

use super::{
    checks::Checks,
    stats::{self, Counts, ModuleStats},
    usage::{self, DiskUsage},
};

pub use model::{ArtifactLine, FailureLine, ModelPart, Module, ProgramLine};

/// Which part of a store the page is about.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Only this model.
    pub model: Option<String>,
    /// The release of that number instead of the newest one; needs `model`.
    pub release: Option<u64>,
    /// What production counted.
    pub counts: Vec<Counts>,
    /// What checks found.
    pub checks: Vec<Checks>,
}

/// Everything on the page.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Page {
    /// The store's folder.
    pub store: String,
    /// When this was read, in seconds since 1970.
    pub made: i64,
    /// Bytes of the store and of its parts.
    pub usage: DiskUsage,
    /// Every model that has programs, sorted by name.
    pub models: Vec<ModelPart>,
    /// The last attempts that failed.
    pub failures: Vec<FailureLine>,
    /// What files of counts say about calls, by module.
    pub production: Vec<ModuleStats>,
    /// What checks of these models found.
    pub checks: Vec<Checks>,
    /// What could not be read: one line each.
    pub damage: Vec<String>,
}

impl Page {
    /// Reads the page of a store; `made` is the time that it gives as its own, in seconds since 1970.
    ///
    /// What is damaged is named on the page and left out.
    pub fn read(store: &Store, choice: &Choice, made: i64) -> Result<Self, StoreError> {
        let mut damage = Vec::new();
        let mut failures = Vec::new();
        for failure in store.records().failures() {
            match failure {
                Ok((failure, at)) if choice.model.as_ref().is_none_or(|m| *m == failure.model) => {
                    failures.push(FailureLine::new(failure, at));
                }
                Ok(_) => {}
                Err(error) => damage.push(error.to_string()),
            }
        }
        let mut models = Vec::new();
        for name in store.releases().models()? {
            if choice.model.as_ref().is_none_or(|model| *model == name) {
                let release = choice.release.filter(|_| choice.model.is_some());
                models.push(ModelPart::read(
                    store,
                    &name,
                    release,
                    &failures,
                    &mut damage,
                )?);
            }
        }
        let counts: Vec<Counts> = match &choice.model {
            Some(model) => choice
                .counts
                .iter()
                .filter(|c| c.model == *model)
                .cloned()
                .collect(),
            None => choice.counts.clone(),
        };
        Ok(Self {
            store: store.path().display().to_string(),
            made,
            usage: usage::usage(store, GroupBy::Module)?,
            models,
            failures,
            production: stats::stats(&counts),
            checks: (choice.checks.iter())
                .filter(|checks| {
                    choice
                        .model
                        .as_ref()
                        .is_none_or(|model| *model == checks.model)
                })
                .cloned()
                .collect(),
            damage,
        })
    }

    /// Draws the page as one HTML file.
    pub fn html(&self) -> String {
        html::page(self).into_string()
    }
}
