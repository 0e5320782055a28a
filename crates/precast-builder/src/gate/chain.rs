//! The programs of a chain: those of `prefill` and `decode` in a release, and of the modules that fill their states.

use std::collections::BTreeSet;

use precast_store::record::{First, Program};

use super::ChainProgram;

/// The modules of a chain, as a session calls them.
const MODULES: [&str; 2] = ["prefill", "decode"];

/// The number of tokens that `decode` generates.
pub(crate) const TOKENS: u32 = 32;

/// Returns whether a release has the modules of a chain, with states.
pub(crate) fn has_chain(programs: &[Program]) -> bool {
    let has = |module: &&str| {
        let mut programs = programs.iter();
        programs.any(|program| program.module == **module && !program.states.is_empty())
    };
    MODULES.iter().all(has)
}

/// Returns the programs of a chain among those of a release; none if a module of it has none.
///
/// Programs without states or without a graph that eager could run are left out, as are modules that are not `checked`.
/// `tolerances` are those of a program, relative and absolute.
pub(crate) fn programs(
    all: Vec<Program>,
    checked: impl Fn(&Program) -> bool,
    tolerances: impl Fn(&Program) -> (Option<f64>, Option<f64>),
) -> Option<Vec<ChainProgram>> {
    let in_chain =
        |program: &Program| MODULES.contains(&&*program.module) && !program.states.is_empty();
    let fillers: BTreeSet<String> = all
        .iter()
        .filter(|program| in_chain(program))
        .flat_map(|program| &program.states)
        .filter_map(|state| match &state.first {
            First::Output { module, .. } => Some(module.clone()),
            _ => None,
        })
        .collect();
    let fits = |program: &Program| {
        let named = in_chain(program) || fillers.contains(&program.module);
        named && program.eager.is_some() && checked(program)
    };
    let one = |program: Program| {
        let (rtol, atol) = tolerances(&program);
        let given = program.receipt.gate_given.as_ref();
        ChainProgram {
            rtol,
            atol,
            compute_dtypes: given.map_or(vec![], |given| given.compute_dtypes.clone()),
            program,
        }
    };
    let found: Vec<ChainProgram> = all.into_iter().filter(fits).map(one).collect();
    let has = |module: &str| found.iter().any(|one| one.program.module == module);
    let mut wanted = MODULES
        .into_iter()
        .chain(fillers.iter().map(String::as_str));
    wanted.all(has).then_some(found)
}
