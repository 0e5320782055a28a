//! Sessions over fake artifacts: states, refusals, and calls that fail.

use std::time::Duration;

use precast::{
    record::{Dtype, First, State},
    runtime::{Loading, RuntimeError, Tensor},
};

use crate::{
    fake::{self, Fake, Memory},
    flat, ok, tensor, x,
};

fn totals() -> Fake {
    Fake::sized(1, 2).constants(0).stateful()
}

fn given() -> Tensor {
    tensor(&[1.0_f32, 2.0], [1, 2])
}

#[test]
fn a_refused_call_changes_nothing_and_a_failed_one_ends_the_session() {
    let model = ok(&[totals().behaving("FAILS_BELOW")]);
    let mut session = model.session().unwrap();
    session.run("f", &[given()]).unwrap();
    let refused = session.run("f", &[x(1, 3)]).unwrap_err();
    assert_eq!(refused.name(), "NoBucket", "{refused}");
    let refused = session.run::<Tensor>("f", &[]).unwrap_err();
    assert_eq!(refused.name(), "InputCount", "{refused}");
    assert_eq!(flat(&session.state("total").unwrap()), [1.0, 2.0]);

    // It has written into its state when it fails.
    let negative = tensor(&[-1.0_f32, -2.0], [1, 2]);
    let failed = session.run("f", &[negative]).unwrap_err();
    assert_eq!(failed.name(), "Failed", "{failed}");
    for _ in 0..2 {
        let error = session.run("f", &[given()]).unwrap_err();
        let RuntimeError::SessionFailed { cause } = &error else {
            panic!("{error}");
        };
        assert!(cause.contains("negative"), "{cause}");
        assert_eq!(session.fork().err().unwrap().name(), "SessionFailed");
    }
    session.reset();
    assert_eq!(flat(&session.run("f", &[given()]).unwrap()[0]), [2.0, 4.0]);
    // Others never notice.
    let mut other = model.session().unwrap();
    assert_eq!(flat(&other.run("f", &[given()]).unwrap()[0]), [2.0, 4.0]);
}

#[test]
fn a_module_with_states_needs_a_session_and_another_one_does_not() {
    let model = ok(&[totals()]);
    let sizes = [("batch".to_owned(), 1), ("seq".to_owned(), 2)].into();
    // Callers who don't know of sessions may have other inputs.
    let refused = [
        model.run("f", &[given()]).err(),
        model.run::<Tensor>("f", &[]).err(),
        model.run_named("f", &[("token", given())]).err(),
        model.fixed("f", &sizes).err(),
    ];
    let says = "module `f` keeps states from call to call, and was called without a session";
    for error in refused {
        let error = error.unwrap();
        assert_eq!((error.name(), &*error.to_string()), ("NeedsSession", says));
    }
    model.warm_up().unwrap();

    let plain = ok(&[Fake::sized(1, 2)]);
    let mut session = plain.session().unwrap();
    assert_eq!(flat(&session.run("f", &[given()]).unwrap()[0]), [2.0, 4.0]);
    assert_eq!((session.bytes(), plain.session_bytes()), (0, 0));
}

/// Returns a model whose module `f` reads a total that `start` fills.
fn filled(start: Fake) -> Memory {
    let mut memory = Memory::default();
    let mut program = memory.add("f", &totals());
    program.states[0].first = First::Output {
        module: "start".to_owned(),
        index: 0,
    };
    memory.programs.insert(program.id, program);
    memory.add("start", &start.constants(0).salted(7));
    memory
}

#[test]
fn a_state_has_no_value_before_its_module_was_called() {
    let model = filled(Fake::sized(1, 2)).load();
    let mut session = model.session().unwrap();
    let missing = |session: &mut precast::runtime::Session<'_>| {
        let error = session.run("f", &[given()]).unwrap_err().to_string();
        let why =
            "it has no value yet: module `start` fills it, and the session has not called that";
        assert_eq!(error, format!("state `total`: {why}"));
    };
    missing(&mut session);
    missing(&mut session.fork().unwrap());
    // The fake without weights returns its input.
    let tens = tensor(&[10.0_f32, 20.0], [1, 2]);
    session.run("start", &[tens]).unwrap();
    let mut fork = session.fork().unwrap();
    for session in [&mut session, &mut fork] {
        let out = session.run("f", &[given()]).unwrap();
        assert_eq!(flat(&out[0]), [12.0, 24.0]);
        assert_eq!(flat(&session.state("total").unwrap()), [11.0, 22.0]);
    }
    // It can be called again at any time.
    session.run_named("start", &[("x", given())]).unwrap();
    assert_eq!(flat(&session.state("total").unwrap()), [1.0, 2.0]);
    session.reset();
    missing(&mut session);
    let more = tensor(&[3.0_f32, 4.0], [1, 2]);
    session.set_state("total", &more).unwrap();
    assert_eq!(flat(&session.run("f", &[given()]).unwrap()[0]), [5.0, 8.0]);
    drop(session);
    missing(&mut model.session().unwrap());
    // Without a session it is a module as any other.
    let out = model.run("start", &[given()]).unwrap();
    assert_eq!(flat(&out[0]), [1.0, 2.0]);
}

#[test]
fn an_output_that_does_not_fit_its_state_changes_nothing() {
    let model = filled(Fake::sized(1, 3)).load();
    let mut session = model.session().unwrap();
    session.set_state("total", &given()).unwrap();
    let other = session.set_state("total", &x(1, 3)).unwrap_err();
    let unknown = session.state("sum").unwrap_err();
    let error = session.run("start", &[x(1, 3)]).unwrap_err();
    insta::assert_snapshot!(other, @"state `total`: it is float32 [1, 2], not float32 [1, 3]");
    insta::assert_snapshot!(unknown, @"state `sum`: the model has no state of this name");
    insta::assert_snapshot!(error, @"state `total`: it is float32 [1, 2], and module `start` gave float32 [1, 3]");
    assert_eq!(flat(&session.state("total").unwrap()), [1.0, 2.0]);
}

/// The sizes and the states of a program. An axis of a state is a dimension of the sizes, or has 3 elements.
type Stateful<'a> = (&'a [(&'a str, i64)], States<'a>);
type States<'a> = &'a [(&'a str, &'a [&'a str])];

fn stateful(programs: &[Stateful<'_>]) -> Memory {
    let mut memory = Memory::default();
    for (salt, (sizes, states)) in programs.iter().enumerate() {
        let mut program = memory.add("f", &totals().salted(salt as u32));
        let sizes = sizes.iter().map(|&(dim, size)| (dim.to_owned(), size));
        program.sizes = sizes.collect();
        let state = |&(name, axes): &(&str, &[&str])| {
            let size = |dim: &&str| program.sizes.get(*dim).copied().unwrap_or(3);
            let shape: Vec<i64> = axes.iter().map(size).collect();
            let dims = axes.iter().map(|dim| (*dim).to_owned());
            State {
                name: name.to_owned(),
                layout: fake::layout(Dtype::Float32, &shape),
                dims: dims
                    .map(|dim| program.sizes.contains_key(&dim).then_some(dim))
                    .collect(),
                first: First::Zeros,
            }
        };
        program.states = states.iter().map(state).collect();
        memory.programs.insert(program.id, program);
    }
    memory
}

#[test]
fn a_limit_in_bytes_counts_the_tensors_of_every_bucket_of_a_session() {
    let most = |programs: &[Stateful<'_>]| {
        let runtime = stateful(programs).runtime().loading(Loading::OnDemand);
        match runtime.session_limit(0).load("fake") {
            Err(RuntimeError::SessionLimit { bytes, .. }) => bytes,
            other => panic!("{:?}", other.err()),
        }
    };
    let cache: States<'_> = &[("k", &["heads", "context"])];
    let (small, large): (Stateful<'_>, Stateful<'_>) =
        ((&[("context", 16)], cache), (&[("context", 64)], cache));
    assert_eq!(most(&[small]), 3 * 16 * 4);
    // Programs of one bucket share it, and a session that grows keeps the smaller one.
    assert_eq!(most(&[small, small]), 3 * 16 * 4);
    assert_eq!(most(&[small, large]), 3 * (16 + 64) * 4);
    // A state of one size is in each bucket.
    let both: States<'_> = &[("k", &["heads", "context"]), ("count", &["heads"])];
    let (small, large) = (
        (&[("context", 16)][..], both),
        (&[("context", 64)][..], both),
    );
    assert_eq!(most(&[small, large]), 3 * (16 + 64) * 4 + 2 * 3 * 4);
    // Modules with sizes of their own: a session can be at each of them and at both.
    let rows: States<'_> = &[("r", &["batch"])];
    let (small, one): (Stateful<'_>, Stateful<'_>) =
        ((&[("context", 16)], cache), (&[("batch", 2)], rows));
    assert_eq!(most(&[small, one]), 3 * (3 * 16 * 4 + 2 * 4));
}

#[test]
fn a_limit_in_bytes_bounds_the_open_sessions() {
    let load = |limit: u64| {
        let runtime = Memory::with(&[totals()]).runtime();
        let runtime = runtime.sessions(3).wait_limit(Duration::ZERO);
        runtime.session_limit(limit).load("fake")
    };
    // A session takes 8 bytes.
    for (limit, open) in [(8, 1), (23, 2), (24, 3), (u64::MAX, 3)] {
        let model = load(limit).unwrap();
        let sessions: Vec<_> = (0..open).map(|_| model.session().unwrap()).collect();
        let says = format!("model `fake`: all {open} sessions are in use");
        for error in [model.session().err(), sessions[0].fork().err()] {
            assert_eq!(error.unwrap().to_string(), says);
        }
        drop(sessions);
        model.session().unwrap();
    }
    let error = load(7).err().unwrap().to_string();
    let expected = "a session of model `fake` takes up to 8 bytes, and all sessions may take 7";
    assert_eq!(error, expected);
    // A model without states needs none.
    let plain = Memory::with(&[Fake::sized(1, 2)])
        .runtime()
        .session_limit(0);
    plain.load("fake").unwrap().session().unwrap();
}
