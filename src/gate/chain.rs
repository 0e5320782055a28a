//! A chain: `prefill` and steps of `decode` in one session of the artifacts, and in one of eager.
//!
//! Modules that fill states are called first, on drawn inputs. Both sessions get the same tokens: a drawn prompt, then
//! the tokens that eager chooses greedily. Other inputs are zero, or the minimum of their range. The outputs of each call
//! are compared as in the gate of one call. A token that the artifacts choose may differ only if its logit is as high as
//! that of eager's token, within the measured difference of the logits.

use std::collections::{BTreeMap, BTreeSet};

use precast_builder::gate::{ChainProgram, ChainRequest, Verdict};
use precast_runtime::{
    Model, Outputs, Runtime, RuntimeError, Session, Tensor, Trial, Value, command::trial_memory,
};
use precast_store::{
    Device, Digest,
    record::{Dtype, First, Input, Program, receipt::Gate},
};

use super::{
    Fallible,
    compare::{Choice, Tolerances, compare, equal, last_row, single},
    first, open, samples,
};

/// Compares a chain with eager.
pub(super) fn check(request: &ChainRequest) -> Verdict {
    match run(request) {
        Ok(Ok(tokens)) => Verdict::Passed {
            report: Box::new(Gate {
                steps: tokens.map(u64::from),
                ..Gate::default()
            }),
        },
        Ok(Err(message)) => Verdict::Failed { message },
        Err(error) => Verdict::Failed {
            message: error.to_string(),
        },
    }
}

/// The inputs of a chain.
struct Inputs {
    prompt: Vec<i64>,
    /// The inputs of `prefill` beside tokens and positions.
    prefill: Vec<Value>,
    /// The same of `decode`.
    decode: Vec<Value>,
    /// Number of tokens to generate.
    tokens: u32,
}

/// Returns the number of generated tokens, or the difference from eager. None for modules that no session calls with
/// tokens.
fn run(request: &ChainRequest) -> Fallible<Result<Option<u32>, String>> {
    let Some(inputs) = inputs(request)? else {
        return Ok(Ok(None));
    };
    let store = open(&request.store)?;
    let device = first(request.chain[0].program.target.device);
    let trial = Trial::here().remember(trial_memory(store.path()));
    let runtime = Runtime::new(&store, device)?
        .eager_fallback(false)
        .trial(trial);
    let [compiled, eager] = [true, false].map(|compiled| load(&runtime, request, compiled));
    let (compiled, eager) = (compiled?, eager?);
    let known: BTreeMap<Digest, &ChainProgram> = request
        .chain
        .iter()
        .map(|one| (one.program.id, one))
        .collect();
    let (mut own, mut other) = (compiled.session()?, eager.session()?);
    let weights = runtime.weights(request.weights.object)?;
    let call = |session: &mut Session<'_>, next: Option<i64>| {
        // Each side reads weights in another form: together they would take twice the memory.
        weights.release();
        match next {
            None => session.prefill(&inputs.prompt, &inputs.prefill),
            Some(token) => session.decode(token, &inputs.decode),
        }
    };
    for module in fillers(&request.chain) {
        let mut programs = request.chain.iter().map(|one| &one.program);
        let Some(program) = programs.find(|program| program.module == module) else {
            return Ok(Ok(None));
        };
        let inputs = samples(program, &program.sizes, device)?;
        let expected = other.run(module, &inputs)?;
        let got = own.run(module, &inputs);
        let compared = got
            .map_err(|error| error.to_string())
            .and_then(|got| differences(&got, &expected, &known));
        if let Err(why) = compared {
            return Ok(Err(format!("`{module}`, before a session's tokens: {why}")));
        }
    }
    let mut next = None;
    for made in 0..=inputs.tokens {
        let expected = match call(&mut other, next) {
            Err(error) if is_of_inputs(&error) => return Ok(Ok(None)),
            expected => expected?,
        };
        let got = call(&mut own, next);
        let compared = got
            .map_err(|error| error.to_string())
            .and_then(|got| differences(&got, &expected, &known));
        if let Err(why) = compared {
            let place = match next {
                None => "`prefill`".to_owned(),
                Some(_) => format!("`decode`, token {made} of a session"),
            };
            return Ok(Err(format!("{place}: {why}")));
        }
        let Some(token) = choice(&expected)? else {
            return Ok(Ok(None));
        };
        next = Some(token);
    }
    Ok(Ok(Some(inputs.tokens)))
}

/// Returns the modules whose outputs are first values of states.
fn fillers(chain: &[ChainProgram]) -> BTreeSet<&str> {
    let states = chain.iter().flat_map(|one| &one.program.states);
    let modules = states.filter_map(|state| match &state.first {
        First::Output { module, .. } => Some(module.as_str()),
        _ => None,
    });
    modules.collect()
}

/// Loads the programs, or their exported graphs.
fn load(runtime: &Runtime, request: &ChainRequest, compiled: bool) -> Fallible<Model> {
    let programs = request.chain.iter().map(|one| {
        let mut program = one.program.clone();
        if !compiled {
            program.steps.clear();
        }
        program
    });
    let programs: Vec<Program> = programs.collect();
    Ok(runtime.load_programs(
        &programs[0].model.clone(),
        programs,
        std::slice::from_ref(&request.shim),
        request.weights.object,
        request.weights.aliases.clone(),
    )?)
}

/// Returns whether a session can't call these modules with tokens.
fn is_of_inputs(error: &RuntimeError) -> bool {
    matches!(
        error,
        RuntimeError::BadInput { .. }
            | RuntimeError::InputCount { .. }
            | RuntimeError::InputNames { .. }
            | RuntimeError::NoBucket { .. }
    )
}

/// Returns the inputs of a chain: the prompt fills the smallest bucket of `prefill`. None if the modules have others.
fn inputs(request: &ChainRequest) -> Fallible<Option<Inputs>> {
    let smallest = |module: &str| {
        let programs = request.chain.iter().map(|one| &one.program);
        let own = programs.filter(|program| program.module == module && program.dynamic.is_none());
        let sized = own.filter_map(|program| {
            let tokens = &program.inputs[tokens_of(program)?].layout;
            Some((tokens.shape.last().copied(), program))
        });
        sized
            .min_by_key(|(size, _)| *size)
            .map(|(_, program)| program)
    };
    let (Some(prefill), Some(decode)) = (smallest("prefill"), smallest("decode")) else {
        return Ok(None);
    };
    let (Some(at), Some(before), Some(after)) =
        (tokens_of(prefill), others(prefill), others(decode))
    else {
        return Ok(None);
    };
    let drawn = samples(prefill, &prefill.sizes, Device::Cpu)?;
    let prompt: Vec<i64> = drawn[at].to_vec()?;
    let all = request.chain.iter().flat_map(|one| &one.program.inputs);
    let positions = all.filter(|input| input.within.is_some());
    let ends = positions.filter_map(|input| input.range.map(|[_, end]| end));
    let room = ends.max().unwrap_or(i64::MAX) - i64::try_from(prompt.len())?;
    Ok(Some(Inputs {
        prompt,
        prefill: before,
        decode: after,
        tokens: room.clamp(0, request.tokens.into()).try_into()?,
    }))
}

/// Returns the index of the input for the tokens of a session, if its dtype is theirs.
fn tokens_of(program: &Program) -> Option<usize> {
    let mut inputs = program.inputs.iter();
    let at = inputs.position(|input| input.within.is_none())?;
    (program.inputs[at].layout.dtype == Dtype::Int64).then_some(at)
}

/// Returns the inputs of a program beside tokens and positions; none if one has no fixed size or another dtype.
fn others(program: &Program) -> Option<Vec<Value>> {
    let inputs = program.inputs.iter().filter(|input| input.within.is_none());
    let value = |input: &Input| {
        let shape = input
            .layout
            .shape
            .iter()
            .map(|&size| usize::try_from(size).ok());
        let shape: Vec<usize> = shape.collect::<Option<_>>()?;
        let count = shape.iter().product();
        let [low, _] = input.bounds.or(input.range).unwrap_or_default();
        if input.dims.iter().any(Option::is_some) {
            return None;
        }
        match input.layout.dtype {
            Dtype::Float32 => Value::new(&vec![0.0_f32; count], &shape).ok(),
            Dtype::Int64 => Value::new(&vec![low; count], &shape).ok(),
            _ => None,
        }
    };
    inputs.skip(1).map(value).collect()
}

/// Compares the outputs of one call.
fn differences(
    got: &Outputs,
    expected: &Outputs,
    known: &BTreeMap<Digest, &ChainProgram>,
) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("can't be compared: {error}");
    got.check().map_err(|error| error.to_string())?;
    let id = got.served().program().id;
    let one = known.get(&id).ok_or("another program answered")?;
    let on_host = |outputs: &Outputs| -> Result<Vec<Tensor>, String> {
        let copies = outputs.iter().map(|tensor| tensor.to_device(Device::Cpu));
        copies
            .collect::<Result<_, _>>()
            .map_err(|error| failed(&error))
    };
    let (got, expected) = (on_host(got)?, on_host(expected)?);
    let outputs = || one.program.outputs.iter().enumerate();
    let mut logits = None;
    for (index, output) in outputs().filter(|(_, output)| output.layout.dtype.is_float()) {
        let tolerances = Tolerances {
            rtol: one.rtol,
            atol: one.atol,
            compute_dtype: one.compute_dtypes.get(index).copied().flatten(),
            ..Tolerances::default()
        };
        let row = compare(tolerances, output, &got[index], &expected[index]);
        let row = row.map_err(|refused| format!("output `{}` {}", output.name, refused.why))?;
        logits = logits.or(Some((index, row.max_abs.unwrap_or(0.0))));
    }
    for (index, output) in outputs().filter(|(_, output)| !output.layout.dtype.is_float()) {
        let (got, eager) = (&got[index], &expected[index]);
        let same = equal(got, eager).map_err(|error| failed(&error))?;
        let tied = || {
            let (at, error) = logits?;
            let choices = Choice::all(&expected[at], got, eager, error)?;
            Some(choices.iter().all(Choice::tied))
        };
        if !same && tied() != Some(true) {
            return Err(format!("output `{}` differs from eager's", output.name));
        }
    }
    Ok(())
}

/// Returns the token that outputs choose: an integer among them, or else the index of the largest logit.
fn choice(outputs: &Outputs) -> Fallible<Option<i64>> {
    let copies = outputs.iter().map(|tensor| tensor.to_device(Device::Cpu));
    let copies: Vec<Tensor> = copies.collect::<Result<_, _>>()?;
    if let Some(token) = copies.iter().find_map(single) {
        return Ok(Some(token));
    }
    let Some(row) = copies.iter().find_map(last_row) else {
        return Ok(None);
    };
    let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    Ok(best.map(i64::try_from).transpose()?)
}
