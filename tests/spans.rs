//! The spans that a `tracing` subscriber receives. A binary of its own, because a subscriber is set for a whole
//! process.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod fake;
mod traced;

use fake::{Fake, Memory};
use precast::{Device, Runtime, Value};
use traced::spans;

fn x(rows: usize, cols: usize) -> Value {
    Value::new(&vec![1.0_f32; rows * cols], &[rows, cols]).unwrap()
}

/// Opens the shim, as the first load of a process does: its span is in none of these tests.
fn opened() {
    let source = Memory::with(&[Fake::sized(3, 5)]).source();
    drop(
        Runtime::over(source, Device::Cpu)
            .unwrap()
            .load("fake")
            .unwrap(),
    );
}

#[test]
fn spans_say_what_a_call_did() {
    opened();
    let spans = spans(|| {
        let source = Memory::with(&[Fake::sized(2, 2)]).source();
        let runtime = Runtime::over(source, Device::Cpu).unwrap();
        let model = runtime.load("fake").unwrap();
        model.run("f", &[x(2, 2)]).unwrap();
        model.run("f", &[x(1, 2)]).unwrap();
        model.run("f", &[x(3, 2)]).unwrap_err();
    });
    insta::assert_snapshot!(spans.made.lock().unwrap().join("\n"), @r#"
    weights
    map
    load module="f"
    artifact
    container
    bind
    run module="f" bucket="batch=2 seq=2" rung="exact"
    run module="f" bucket="batch=2 seq=2" rung="padded"
    pad module="f"
    run module="f"
    "#);
    assert_eq!(spans.entered.lock().unwrap().len(), 10);
}

#[test]
fn eager_has_a_span_within_the_call_that_it_answers() {
    opened();
    let spans = spans(|| {
        let mut memory = Memory::default();
        memory.add_with_graph(&Fake::sized(4, 4).behaving("NO_SYMBOL").outputs(2));
        let runtime = memory.runtime();
        let model = runtime.load("fake").unwrap();
        model.run("f", &[x(4, 4)]).unwrap();
        model.run("f", &[x(3, 4)]).unwrap();
    });
    insta::assert_snapshot!(spans.made.lock().unwrap().join("\n"), @r#"
    weights
    map
    load module="f"
    artifact
    run module="f" bucket="batch=4 seq=4" rung="eager"
    eager module="f"
    run module="f" bucket="batch=4 seq=4" rung="eager"
    pad module="f"
    eager module="f"
    "#);
}
