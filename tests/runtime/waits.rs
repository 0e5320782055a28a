//! Calls that wait for others, and calls that others meddle with.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use precast::{Device, Runtime};

use crate::{
    fake::{Fake, Hooked, Memory},
    flat, map, twice, x,
};

#[test]
fn a_caller_waits_for_a_context_as_long_as_it_says() {
    let mut memory = Memory::with(&[Fake::sized(2, 2).behaving("HANGS")]);
    memory.add("g", &Fake::sized(2, 2));
    let source = memory.source();
    let runtime = || {
        let runtime = Runtime::over(source.clone(), Device::Cpu).unwrap();
        runtime.instances(1)
    };
    let limited = runtime().wait_limit(Duration::from_millis(30));
    let [model, limited] = [runtime(), limited].map(|one| Arc::new(one.load("fake").unwrap()));
    for model in [&model, &limited] {
        let (of_thread, hangs) = (model.clone(), map(&x(2, 2), |value| value - 1.0));
        let hung = thread::spawn(move || of_thread.run("f", &[hangs]).is_ok());
        // It is in the artifact when nobody else gets its context.
        while model.try_run("f", &[x(2, 2)]).is_ok() {
            thread::yield_now();
        }
        let told = match Arc::ptr_eq(model, &limited) {
            true => model.run("f", &[x(2, 2)]),
            false => {
                let begun = Instant::now();
                let deadline = begun + Duration::from_millis(30);
                let told = model.run_until("f", &[x(2, 2)], deadline);
                assert!(begun.elapsed() >= Duration::from_millis(30));
                told
            }
        };
        let error = told.unwrap_err();
        assert_eq!(error.name(), "Busy");
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"module `f` at batch=2 seq=2: all 1 slots are in use, and the call was to wait no longer");
        }
        // Other programs answer meanwhile, and this one afterwards.
        let out = model.try_run("g", &[x(2, 2)]).unwrap();
        assert_eq!(flat(&out[0]), flat(&twice(&x(2, 2))));
        assert!(!hung.is_finished(), "this took too long to show anything");
        assert!(hung.join().unwrap());
        let far = Instant::now() + Duration::from_secs(60);
        assert!(model.run_until("f", &[x(2, 2)], far).is_ok());
    }
}

#[test]
fn a_panic_where_a_context_is_made_loses_none() {
    let mut memory = Memory::default();
    memory.add_with_graph(&Fake::sized(4, 4).outputs(2).behaving("NO_SYMBOL"));
    let program = memory.programs.values().next().unwrap();
    let exported = memory.artifacts[&program.eager.as_ref().unwrap().artifact].object;
    let asked = AtomicUsize::new(0);
    let source = Hooked::over(memory, move |object| {
        let first = *object == exported && asked.fetch_add(1, Ordering::Relaxed) < 3;
        assert!(!first, "as meant");
        Ok(None)
    });
    let runtime = Runtime::over(source, Device::Cpu).unwrap();
    let model = runtime.instances(1).load("fake").unwrap();
    for _ in 0..3 {
        let run = || model.try_run("f", &[x(4, 4)]);
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    }
    assert!(model.try_run("f", &[x(4, 4)]).is_ok());
}
