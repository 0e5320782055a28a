//! The chain of a release: `prefill` and steps of `decode` in one session, compared with eager.
//!
//! The gate of a program compares one call of it. A session makes many calls of several programs, and each reads the
//! states that the others wrote. So a release with modules of these names is compared once more as a whole
//! ([`ChainRequest`]), with its weights, before it is published. A release with the programs and the weights of the
//! newest one is not compared again.

use std::collections::BTreeSet;

use precast_store::{
    StoreError,
    record::{First, Program, Release, Shim},
};

use super::{
    BuildError,
    gate::{ChainProgram, ChainRequest, GateProcess, LIMIT, StoredWeights},
    limits::{Limits, Stop},
    options::Options,
};
use crate::plan::Plan;

/// The modules of a chain, as a session calls them.
const MODULES: [&str; 2] = ["prefill", "decode"];

/// The number of tokens that `decode` generates.
const TOKENS: u32 = 32;

/// Compares the modules with states of a release with eager. Returns the number of generated tokens; none if the release
/// has no such modules, or if one of them has `healthcheck = false`.
pub(super) fn check(
    options: &Options<'_>,
    plan: &Plan,
    release: &Release,
    weights: &StoredWeights,
    shim: &Shim,
) -> Result<Option<u64>, BuildError> {
    let programs = programs(options, plan, release)?;
    let has = |module: &&str| programs.iter().any(|one| one.program.module == **module);
    if !MODULES.iter().all(has) {
        return Ok(None);
    }
    let request = ChainRequest {
        store: options.store.path().to_owned(),
        chain: programs,
        shim: shim.clone(),
        weights: weights.clone(),
        tokens: TOKENS,
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

/// Returns the programs of a chain and of the modules that fill its states, with the tolerances of their modules.
/// Programs without states or without a graph that eager could run are left out, as are modules that the spec does not
/// check.
fn programs(
    options: &Options<'_>,
    plan: &Plan,
    release: &Release,
) -> Result<Vec<ChainProgram>, StoreError> {
    let modules = &options.spec.modules;
    let unchecked = |name: &str| {
        let mut items = plan.items.iter().chain(&plan.beyond);
        items.any(|item| modules[item.module].name == name && !item.settings.compile.healthcheck)
    };
    let mut programs = Vec::new();
    for id in &release.programs {
        programs.extend(options.store.records().program(id)?);
    }
    let in_chain =
        |program: &Program| MODULES.contains(&&*program.module) && !program.states.is_empty();
    let fillers: BTreeSet<String> = programs
        .iter()
        .filter(|program| in_chain(program))
        .flat_map(|program| &program.states)
        .filter_map(|state| match &state.first {
            First::Output { module, .. } => Some(module.clone()),
            _ => None,
        })
        .collect();
    let mut found = Vec::new();
    for program in programs {
        let name = program.module.as_str();
        let fits = in_chain(&program) || fillers.contains(name);
        if !fits || program.eager.is_none() || unchecked(name) {
            continue;
        }
        let module = modules.iter().find(|module| module.name == name);
        let given = program.receipt.gate_given.as_ref();
        found.push(ChainProgram {
            rtol: module.and_then(|module| module.gate.rtol),
            atol: module.and_then(|module| module.gate.atol),
            compute_dtypes: given.map_or(vec![], |given| given.compute_dtypes.clone()),
            program,
        });
    }
    Ok(found)
}
