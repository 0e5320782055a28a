//! The smoke run: programs that a build found in the store answer with the weights of before and with the new ones.

use precast_builder::gate::{SmokeRequest, StoredWeights, Verdict};
use precast_runtime::{Runtime, Tensor, Trial, command::trial_memory};
use precast_store::{
    Device,
    record::{Dtype, Program, receipt::Gate},
};

use super::{Fallible, first, open, samples};

/// Runs every program of a request.
pub(super) fn check(request: &SmokeRequest) -> Verdict {
    let failed = |message| Verdict::Failed { message };
    match run(request) {
        Ok(None) => Verdict::Passed {
            report: Box::new(Gate::default()),
        },
        Ok(Some(message)) => failed(message),
        Err(error) => failed(error.to_string()),
    }
}

/// Returns the defect of an answer with the new weights.
fn run(request: &SmokeRequest) -> Fallible<Option<String>> {
    let Some(program) = request.programs.first() else {
        return Ok(None);
    };
    let store = open(&request.store)?;
    let device = first(program.target.device);
    let trial = Trial::here().remember(trial_memory(store.path()));
    let runtime = Runtime::new(&store, device)?
        .eager_fallback(false)
        .trial(trial);
    // The programs share them.
    let _after = runtime.weights(request.after.object)?;
    for program in &request.programs {
        let inputs = samples(program, &program.sizes, device)?;
        let outputs = |weights: &StoredWeights| -> Fallible<Vec<Vec<f64>>> {
            answers(&runtime, request, program, weights, &inputs)
        };
        let before = match request.before.as_ref().map(outputs) {
            // A sample that fails with the previous weights proves nothing about the new ones.
            Some(Err(_)) => continue,
            before => before.transpose()?,
        };
        let name = format!("`{} {}`", program.module, program.bucket());
        let after = match outputs(&request.after) {
            Ok(after) => after,
            Err(error) => return Ok(Some(format!("{name} fails with them: {error}"))),
        };
        for (index, after) in after.iter().enumerate() {
            let wrong = match before.as_ref().map(|before| &before[index]) {
                Some(before) => {
                    let mut pairs = before.iter().zip(after);
                    pairs.any(|(before, after)| before.is_finite() && !after.is_finite())
                }
                None => after.iter().any(|after| after.is_nan()),
            };
            if wrong {
                let output = &program.outputs[index].name;
                let what = format!("output `{output}` of {name} has NaN or infinity with them");
                return Ok(Some(what));
            }
        }
    }
    Ok(None)
}

/// Runs a program, and returns the values of its outputs; none for an output of integers.
fn answers(
    runtime: &Runtime,
    request: &SmokeRequest,
    program: &Program,
    weights: &StoredWeights,
    inputs: &[Tensor],
) -> Fallible<Vec<Vec<f64>>> {
    let model = runtime.load_programs(
        &program.model,
        vec![program.clone()],
        std::slice::from_ref(&request.shim),
        weights.object,
        weights.aliases.clone(),
    )?;
    let mut session = model.session()?;
    session.without_fillers();
    let out = session.run(&program.module, inputs)?;
    out.check()?;
    let values = out.iter().map(|output| -> Fallible<Vec<f64>> {
        if !output.dtype().is_some_and(Dtype::is_float) {
            return Ok(vec![]);
        }
        let values = output.to_device(Device::Cpu)?.to_dtype(Dtype::Float64)?;
        Ok(values.to_vec::<f64>()?)
    });
    values.collect()
}
