//! The time at which programs are loaded, programs that are quarantined, and the faster one of two rungs.

use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use precast::{
    Device, Digest, Model, Runtime,
    runtime::{Loading, Tensor, counters::Rung},
};
use serde_json::json;

use crate::{
    fake::{self, Fake, Hooked, Memory},
    until, without_ids, x,
};

/// Notes which objects are read but for the shim, and can hold back all but the first.
#[derive(Default)]
struct Watch {
    read: Mutex<Vec<Digest>>,
    hold: AtomicBool,
}

impl Watch {
    fn reads(&self) -> usize {
        self.read.lock().unwrap().len()
    }

    fn note(&self, object: &Digest) {
        // The first test of the process opens the shim, and others find it open.
        if precast_shim::testing::compiled().file_of(object).is_none() {
            self.read.lock().unwrap().push(*object);
            while self.reads() > 1 && self.hold.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Returns a runtime, and what is read in it.
fn watched(memory: Memory) -> (Arc<Watch>, Runtime) {
    let watch = Arc::<Watch>::default();
    let of_hook = watch.clone();
    let source = Hooked::over(memory, move |object| {
        of_hook.note(object);
        Ok(None)
    });
    (watch, Runtime::over(source, Device::Cpu).unwrap())
}

fn first(tensor: &Tensor) -> f64 {
    tensor.to_vec::<f32>().unwrap()[1].into()
}

fn salted(salt: u32, rows: i64) -> Fake {
    Fake::sized(rows, 4).salted(salt)
}

fn runners(model: &Model) -> Vec<(i64, &'static str)> {
    let stats = model.stats().remove(0);
    let rows = stats.buckets.iter();
    let mut rows: Vec<_> = rows.map(|row| (row.bucket["batch"], row.runner)).collect();
    rows.sort_unstable();
    rows
}

#[test]
fn on_demand_loads_only_the_program_of_a_request() {
    let memory = Memory::with(&[salted(100, 2), salted(101, 4), salted(102, 8)]);
    let (watch, runtime) = watched(memory);
    let model = runtime.loading(Loading::OnDemand).load("fake").unwrap();
    assert_eq!(watch.reads(), 0);
    assert_eq!(model.timings().first_answer, None);
    let out = model.run("f", &[x(3, 4)]).unwrap();
    assert_eq!((first(&out[0]), watch.reads()), (2.0, 1));
    let loaded = [(2, "not loaded"), (4, "artifact"), (8, "not loaded")];
    assert_eq!(runners(&model), loaded);
    assert!(model.timings().first_answer.unwrap() >= model.timings().loaded);
    assert_eq!(model.timings().complete, None);
    model.warm_up().unwrap();
    assert_eq!(watch.reads(), 3);
    assert!(model.timings().complete.is_some());
    let loaded = [2, 4, 8].map(|rows| (rows, "artifact"));
    assert_eq!(runners(&model), loaded);
}

#[test]
fn in_the_background_one_is_there_at_once_and_the_rest_by_priority() {
    let memory = Memory::with(&[salted(110, 2), salted(111, 4), salted(112, 8)]);
    let object = |rows: i64| {
        let program = memory.programs.values().find(|p| p.sizes["batch"] == rows);
        memory.object_of(program.unwrap())
    };
    let wanted = [object(4), object(8), object(2)];
    let (watch, runtime) = watched(memory);
    // 4 is wanted most, then 8.
    let runtime = runtime
        .loading(Loading::Background)
        .priority(|program| [0, 0, 0, 0, 9, 0, 0, 0, 5][program.sizes["batch"] as usize]);
    let model = runtime.load("fake").unwrap();
    until("it never ends", || model.timings().complete.is_some());
    assert_eq!(*watch.read.lock().unwrap(), wanted);
    assert!(model.timings().complete.unwrap() >= model.timings().loaded);
    let out = model.run("f", &[x(8, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Exact);
}

#[test]
fn a_call_waits_for_no_other_program_and_a_model_ends_while_it_loads() {
    let memory = Memory::with(&[salted(120, 2), salted(121, 4), salted(122, 8)]);
    let (watch, runtime) = watched(memory);
    // Every object but the first is held back.
    watch.hold.store(true, Ordering::SeqCst);
    let model = runtime.loading(Loading::Background).load("fake").unwrap();
    assert_eq!(first(&model.run("f", &[x(2, 4)]).unwrap()[0]), 2.0);
    until("no second read", || watch.reads() >= 2);
    // The thread is in the middle of the second one, and the first answers still.
    assert_eq!(first(&model.run("f", &[x(1, 4)]).unwrap()[0]), 2.0);
    let released = watch.clone();
    let dropping = Path::new("/proc").join(fs::read_link("/proc/thread-self").unwrap());
    let release = std::thread::spawn(move || {
        // The other thread sleeps in the drop below.
        until("it never comes", || {
            let stat = fs::read_to_string(dropping.join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('S')
        });
        released.hold.store(false, Ordering::SeqCst);
    });
    drop(model);
    let held = watch.hold.load(Ordering::SeqCst);
    assert!(!held, "it ended with its thread");
    release.join().unwrap();
    assert_eq!(watch.reads(), 2);
}

#[test]
fn a_program_loaded_after_a_swap_has_the_new_weights() {
    let mut memory = Memory::with(&[salted(130, 2), salted(131, 4)]);
    let tuned = memory.put(fake::weights(&[("scale", &[7.0])]));
    let runtime = memory.runtime().loading(Loading::OnDemand);
    let model = runtime.load("fake").unwrap();
    assert_eq!(first(&model.run("f", &[x(2, 4)]).unwrap()[0]), 2.0);
    model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap();
    for rows in [2, 4] {
        assert_eq!(first(&model.run("f", &[x(rows, 4)]).unwrap()[0]), 7.0);
    }
}

#[test]
fn broken_programs_are_quarantined_once_and_the_ladder_answers() {
    let mut memory = Memory::with(&[salted(140, 8)]);
    let small = memory.add("f", &salted(141, 2).behaving("NO_SYMBOL"));
    // Damaged, as the runtime finds out itself.
    let damaged = memory.add("f", &salted(142, 4));
    let [small, damaged] = [small, damaged].map(|program| memory.object_of(&program));
    memory.objects.get_mut(&damaged).unwrap()[5000] ^= 1;
    let (watch, mut runtime) = watched(memory);
    for loading in [Loading::Before, Loading::OnDemand] {
        runtime = runtime.loading(loading);
        let model = runtime.load("fake").unwrap();
        for rows in [2, 4, 2, 4, 1, 3] {
            let out = model.run("f", &[x(rows, 4)]).unwrap();
            assert_eq!(out.served().rung(), Rung::Padded);
            assert_eq!((first(&out[0]), out[0].shape()[0]), (2.0, rows));
        }
        // Once each, and not with every call.
        assert_eq!(model.quarantined().len(), 2);
        assert_eq!(runners(&model)[..2], [(2, "none"), (4, "none")]);
    }
    // A missing function stays missing, so the second model did not read that object again. Damage may be repaired.
    let read = watch.read.lock().unwrap();
    let reads = |object| read.iter().filter(|one| **one == object).count();
    assert_eq!((reads(small), reads(damaged)), (1, 2));
}

#[test]
fn a_module_of_which_nothing_loads_says_why() {
    let runtime = Memory::with(&[salted(150, 2).behaving("NO_CONTAINER")]).runtime();
    assert_eq!(runtime.load("fake").unwrap_err().name(), "NoContainer");
    let model = runtime.loading(Loading::OnDemand).load("fake").unwrap();
    for _ in 0..2 {
        let error = model.run("f", &[x(2, 4)]).unwrap_err();
        let message = "the programs of module `f` for batch=2 seq=4 can't be loaded";
        assert_eq!(error.to_string(), message);
        let cause = std::error::Error::source(&error).unwrap().to_string();
        let reason = "artifact `[id]` gives no container: the fake has no container";
        assert_eq!(without_ids(&cause), reason);
    }
}

/// Returns a program that has an exported graph, and a receipt that calls this one the faster.
fn with_receipt(faster: &str) -> Memory {
    let mut memory = Memory::with(&[]);
    let fake = Fake::sized(4, 4).outputs(2).salted(160);
    let mut program = memory.add("f", &fake);
    memory.export(&mut program, &fake);
    let sign_test =
        json!({ "rounds": 20, "eager_faster": 20, "exclusive": true, "faster": faster });
    let gate = json!({ "artifact_us": 300.0, "eager_us": 200.0, "sign_test": sign_test });
    program.receipt = serde_json::from_value(json!({ "gate": gate })).unwrap();
    memory.programs.insert(program.id, program);
    memory
}

#[test]
fn an_artifact_slower_than_eager_is_marked_and_eager_answers() {
    // An undecided measurement changes nothing.
    for (faster, rung, marked) in [
        ("eager", Rung::Eager, 1),
        ("artifact", Rung::Exact, 0),
        ("neither", Rung::Exact, 0),
    ] {
        let model = with_receipt(faster).load();
        let out = model.run("f", &[x(4, 4)]).unwrap();
        let got = (out.served().rung(), model.faster_as_eager().len());
        assert_eq!(got, (rung, marked), "{faster}");
    }
    let strict = with_receipt("eager").runtime().eager_fallback(false);
    let out = strict.load("fake").unwrap().run("f", &[x(4, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Exact);
}

#[test]
fn an_artifact_is_kept_when_eager_can_not_run_in_its_place() {
    let mut memory = with_receipt("eager");
    let broken = memory.put(b"no list of calls".to_vec());
    let exported = Digest::of(b"exported");
    memory.artifacts.get_mut(&exported).unwrap().object = broken;
    let model = memory.load();
    let out = model.run("f", &[x(4, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Exact);
}

#[test]
fn a_larger_bucket_that_runs_comes_before_eager_in_place_of_one_that_does_not() {
    let mut memory = Memory::with(&[salted(170, 8)]);
    let fake = salted(171, 4).behaving("NO_SYMBOL");
    let mut program = memory.add("f", &fake);
    memory.export(&mut program, &fake);
    memory.programs.insert(program.id, program);
    let model = memory.load();
    let out = model.run("f", &[x(4, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    assert_eq!(out.served().bucket().unwrap()["batch"], 8);
}

#[test]
fn the_costs_of_receipts_choose_between_buckets() {
    for (tall, wide, chosen) in [(9e6, 8e6, 2), (7e6, 8e6, 64)] {
        let fakes = [Fake::sized(64, 4), Fake::sized(2, 2048)];
        let memory = Memory::with(&fakes.map(|fake| fake.salted(180)));
        let memory = memory.each_program(|program| {
            let micros = match program.sizes["batch"] {
                64 => tall,
                _ => wide,
            };
            let receipt = json!({ "gate": { "artifact_us": micros } });
            program.receipt = serde_json::from_value(receipt).unwrap();
        });
        let model = memory.load();
        let outputs = model.run("f", &[x(1, 2)]).unwrap();
        assert_eq!(outputs.served().bucket().unwrap()["batch"], chosen);
    }
}
