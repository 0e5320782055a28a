//! Checks of a program's record: the values that its steps pass to each other, and the last reader of each.

use precast_store::record::{Layout, Program};

use super::{layout::same_strides, plan::PlanStep};

/// Returns the last reader of each value. Results and unused values have none.
///
/// Fails on value numbers out of range, values read before they are written or written twice, and a step that reads
/// one value twice as its last (it is shared then, not moved).
pub(super) fn last_uses(program: &Program) -> Result<Vec<Option<usize>>, String> {
    let outputs = program.steps.iter().map(|step| step.outputs.len());
    let given = program.inputs.len() + program.states.len();
    let max = given + outputs.sum::<usize>();
    if program.values > max {
        // Before memory is allocated for the values of the record.
        return Err(format!(
            "it has {} values, and inputs, states and steps make {max}",
            program.values
        ));
    }
    let mut written = vec![false; program.values];
    if given > program.values {
        return Err(format!(
            "{given} inputs and states and {} values",
            program.values
        ));
    }
    if program.results.len() != program.outputs.len() {
        return Err(format!(
            "{} results and {} outputs",
            program.results.len(),
            program.outputs.len()
        ));
    }
    written[..given].fill(true);
    let mut last = vec![None; program.values];
    for (i, step) in program.steps.iter().enumerate() {
        for &value in &step.inputs {
            if !written.get(value).copied().unwrap_or(false) {
                return Err(format!(
                    "step `{}` reads value {value}, which nothing wrote",
                    step.name
                ));
            }
            last[value] = Some(i);
        }
        for &value in &step.outputs {
            match written.get_mut(value) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    return Err(format!(
                        "step `{}` writes value {value}, which it may not",
                        step.name
                    ));
                }
            }
        }
        for &value in &step.inputs {
            if step.inputs.iter().filter(|&&other| other == value).count() > 1 {
                last[value] = None;
            }
        }
    }
    let checks = program.checks.iter().map(|check| &check.value);
    for &value in program.results.iter().chain(checks) {
        if !written.get(value).copied().unwrap_or(false) {
            return Err(format!("result {value} is never written"));
        }
        last[value] = None;
    }
    Ok(last)
}

/// Checks that the inputs of a step have the layouts that its artifact was compiled for.
pub(super) fn check_layouts(program: &Program, steps: &[PlanStep]) -> Result<(), String> {
    let mut layouts: Vec<Option<&Layout>> = vec![None; program.values];
    let inputs = program.inputs.iter().map(|input| &input.layout);
    let states = program.states.iter().map(|state| &state.layout);
    for (value, layout) in inputs.chain(states).enumerate() {
        layouts[value] = Some(layout);
    }
    for (step, record) in steps.iter().zip(&program.steps) {
        let artifact = &step.artifact;
        if artifact.inputs.len() != record.inputs.len()
            || artifact.outputs.len() != record.outputs.len()
        {
            return Err(format!(
                "step `{}` has other numbers of inputs or outputs than its artifact",
                record.name
            ));
        }
        for (&value, wants) in record.inputs.iter().zip(&artifact.inputs) {
            if !layouts[value].is_some_and(|has| fits(has, wants)) {
                return Err(format!(
                    "step `{}` gets value {value}, which its artifact was not compiled for",
                    record.name
                ));
            }
        }
        for (&value, layout) in record.outputs.iter().zip(&artifact.outputs) {
            layouts[value] = Some(layout);
        }
    }
    for (&value, output) in program.results.iter().zip(&program.outputs) {
        if !layouts[value]
            .is_some_and(|has| has.dtype == output.layout.dtype && has.shape == output.layout.shape)
        {
            return Err(format!(
                "output `{}` is not what value {value} is",
                output.name
            ));
        }
    }
    Ok(())
}

fn fits(has: &Layout, wants: &Layout) -> bool {
    has.dtype == wants.dtype
        && has.shape == wants.shape
        && same_strides(&has.shape, &has.stride, &wants.stride)
}
