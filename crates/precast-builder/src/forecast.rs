//! A forecast of a build: its programs, artifacts and time, from a check of the modules and the receipts in the store.

use std::path::Path;

use precast_store::Store;
use serde::{Deserialize, Serialize};

use super::{BuildError, check::CheckedModule, estimate::Estimate};
use crate::{
    plan::{self, PlanRequest, State},
    spec::Spec,
};

/// The forecast of a build.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Forecast {
    /// Programs that the store lacks.
    pub missing: usize,
    /// Number of those whose modules can't be captured.
    #[serde(default)]
    pub stopped: usize,
    /// Number of programs that the spec requests.
    pub programs: usize,
    /// Maximum number of artifacts to compile for the other programs: buckets may share artifacts. Absent if a module
    /// was not checked.
    pub artifacts: Option<u64>,
    /// Estimated seconds with so many workers; none without an earlier build.
    pub seconds: Option<f64>,
    /// Number of workers in the estimate.
    pub workers: usize,
    /// Number of artifacts of earlier builds in the estimate.
    pub receipts: u32,
}

/// Returns the forecast of a build of a spec, after a check of its modules. `torch` is the folder of the package
/// `torch` for the build. Without it, the torch of the last build counts.
pub fn forecast(
    spec: &Spec,
    store: Option<&Store>,
    checked: &[CheckedModule],
    workers: usize,
    torch: Option<&Path>,
) -> Result<Forecast, BuildError> {
    let known = match store {
        Some(store) => plan::known(spec, store, torch)?,
        None => None,
    };
    let plan = plan::plan(spec, store, known, &PlanRequest::default())?;
    let of = |index| checked.iter().find(|one| one.index == Some(index));
    let compiled = plan.missing().filter(|item| {
        let there = matches!(&item.state, State::Miss { capture_only, .. } if *capture_only);
        let captured = of(item.module).is_none_or(|one| one.checked.captured != Some(false));
        item.form.compiled && item.left_to_eager.is_none() && !there && captured
    });
    let artifacts = compiled
        .map(|item| of(item.module).and_then(|one| one.checked.artifacts))
        .sum::<Option<u64>>();
    let missing = plan.missing().count();
    let stopped = |module| of(module).is_some_and(|one| one.checked.captured == Some(false));
    let stopped = plan.missing().filter(|item| stopped(item.module)).count();
    let estimate = match store {
        Some(store) => Estimate::new(&plan, store),
        None => Estimate::default(),
    };
    Ok(Forecast {
        missing,
        stopped,
        programs: plan.wanted(),
        artifacts,
        seconds: artifacts.and_then(|count| estimate.of(missing - stopped, count, workers)),
        workers,
        receipts: estimate.receipts(),
    })
}
