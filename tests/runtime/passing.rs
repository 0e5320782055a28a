//! A temporary lack of a host's resource sets no program aside for good.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicUsize, Ordering},
    },
};

use precast::{
    Device, Model, Runtime,
    runtime::{Loading, counters::Rung},
};

use crate::{
    fake::{Fake, Hooked, Memory},
    flat, twice, until, x,
};

const NUMBERS: [i32; 4] = [libc::EMFILE, libc::ENOMEM, libc::EIO, libc::EAGAIN];

/// Loads a model of which shared objects of the bucket 2 x 2 can't be read while the number is not 0.
fn hooked(memory: Memory, loading: Loading) -> (Model, Arc<AtomicI32>, Arc<AtomicUsize>) {
    let small = |program: &&precast::record::Program| program.sizes["batch"] == 2;
    let program = memory.programs.values().find(small).unwrap();
    let object = memory.object_of(program);
    let (number, asked) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicUsize::new(0)));
    let (of_hook, count) = (number.clone(), asked.clone());
    let source = Hooked::over(memory, move |wanted| {
        let number = of_hook.load(Ordering::Relaxed);
        if *wanted != object || number == 0 {
            return Ok(None);
        }
        count.fetch_add(1, Ordering::Relaxed);
        let cause = io::Error::from_raw_os_error(number);
        Err(Box::new(io::Error::other(Cause(cause))))
    });
    let runtime = Runtime::over(source, Device::Cpu).unwrap();
    number.store(NUMBERS[0], Ordering::Relaxed);
    let model = runtime.loading(loading).load("fake").unwrap();
    (model, number, asked)
}

/// The system's error is not the outermost one.
#[derive(Debug, thiserror::Error)]
#[error("it can't be read")]
struct Cause(#[source] io::Error);

fn rung(model: &Model) -> Rung {
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(flat(&out[0]), flat(&twice(&x(2, 2))));
    out.served().rung()
}

#[test]
fn a_program_that_could_not_be_read_is_tried_again_at_a_later_call() {
    for (salt, loading) in [(100, Loading::Before), (101, Loading::OnDemand)] {
        let small = Fake::sized(2, 2).salted(salt);
        let memory = Memory::with(&[Fake::sized(4, 4), small]);
        let (model, number, asked) = hooked(memory, loading);
        for next in NUMBERS {
            number.store(next, Ordering::Relaxed);
            let before = asked.load(Ordering::Relaxed);
            // The ladder answers meanwhile.
            until("it is tried again", || {
                assert_eq!(rung(&model), Rung::Padded);
                asked.load(Ordering::Relaxed) > before
            });
            assert_eq!(model.quarantined().len(), 1, "said once");
        }
        // Not with every call.
        let before = asked.load(Ordering::Relaxed);
        (0..100).for_each(|_| assert_eq!(rung(&model), Rung::Padded));
        assert!(asked.load(Ordering::Relaxed) - before <= 2);
        number.store(0, Ordering::Relaxed);
        until("it answers", || rung(&model) == Rung::Exact);
        assert!(model.quarantined().is_empty());
    }
}

#[test]
fn eager_answers_only_until_the_artifact_can_be_read() {
    let mut memory = Memory::default();
    memory.add_with_graph(&Fake::sized(4, 4).outputs(2).salted(102));
    let program = memory.programs.values_mut().next().unwrap();
    program.sizes.insert("batch".to_owned(), 4);
    let object = memory.artifacts[&program.steps[0].artifact].object;
    let short = Arc::new(AtomicI32::new(libc::EMFILE));
    let of_hook = short.clone();
    let source = Hooked::over(memory, move |wanted| {
        match of_hook.load(Ordering::Relaxed) {
            number if number != 0 && *wanted == object => {
                Err(io::Error::from_raw_os_error(number).into())
            }
            _ => Ok(None),
        }
    });
    let runtime = Runtime::over(source, Device::Cpu).unwrap();
    let model = runtime.load("fake").unwrap();
    let rung = || model.run("f", &[x(4, 4)]).unwrap().served().rung();
    assert_eq!(rung(), Rung::Eager);
    short.store(0, Ordering::Relaxed);
    until("the artifact answers", || rung() == Rung::Exact);
}

#[test]
fn a_defect_is_not_tried_again() {
    let failing = |number, salt| {
        let memory = Memory::with(&[Fake::sized(4, 4), Fake::sized(2, 2).salted(salt)]);
        let (model, error, asked) = hooked(memory, Loading::OnDemand);
        error.store(number, Ordering::Relaxed);
        move || (rung(&model), asked.load(Ordering::Relaxed))
    };
    let (defect, lack) = (failing(libc::ENOENT, 103), failing(libc::EMFILE, 104));
    assert_eq!(defect(), (Rung::Padded, 1));
    until("a lack is tried again", || lack().1 > 1);
    assert_eq!(defect(), (Rung::Padded, 1));
}
