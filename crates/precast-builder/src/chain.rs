//! The chain of a release: `prefill` and steps of `decode` in one session, compared with eager.
//!
//! The gate of a program compares one call of it. A session makes many calls of several programs, and each reads the
//! states that the others wrote. So a release with modules of these names is compared once more as a whole
//! ([`ChainRequest`]), with its weights, before it is published. A release with the programs and the weights of the
//! newest one is not compared again.

use precast_store::{
    StoreError,
    record::{Program, Release, Shim},
};

use super::{
    BuildError,
    gate::{ChainRequest, GateProcess, LIMIT, StoredWeights, chain},
    limits::{Limits, Stop},
    options::Options,
};
use crate::plan::Plan;

/// Compares the modules with states of a release with eager. Returns the number of generated tokens; none if the release
/// has no such modules, or if one of them has `healthcheck = false`.
pub(super) fn check(
    options: &Options<'_>,
    plan: &Plan,
    release: &Release,
    weights: &StoredWeights,
    shim: &Shim,
) -> Result<Option<u64>, BuildError> {
    let modules = &options.spec.modules;
    let checked = |program: &Program| {
        let mut items = plan.items.iter().chain(&plan.beyond);
        items.all(|item| {
            modules[item.module].name != program.module || item.settings.compile.healthcheck
        })
    };
    let tolerances = |program: &Program| {
        let module = modules.iter().find(|module| module.name == program.module);
        module.map_or((None, None), |module| (module.gate.rtol, module.gate.atol))
    };
    let records = options.store.records();
    let programs = release.programs.iter().map(|id| records.program(id));
    let programs = programs.filter_map(Result::transpose);
    let programs = programs.collect::<Result<Vec<_>, StoreError>>()?;
    let Some(programs) = chain::programs(programs, checked, tolerances) else {
        return Ok(None);
    };
    let request = ChainRequest {
        store: options.store.path().to_owned(),
        chain: programs,
        shim: shim.clone(),
        weights: weights.clone(),
        tokens: chain::TOKENS,
    };
    let process = GateProcess {
        command: &options.gate,
        limits: &Limits::new(options.memory),
        limit: options.timeout.unwrap_or(LIMIT),
        stop: &Stop::new(&options.cancel),
    };
    match process.ask(&request) {
        Ok(gate) => Ok(gate.steps),
        Err(BuildError::Gate { message, .. }) => Err(BuildError::Chain { message }),
        Err(error) => Err(error),
    }
}
