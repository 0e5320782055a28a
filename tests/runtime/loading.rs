//! The time at which programs are loaded, programs that are quarantined, and the faster one of two rungs.

use std::{
    fs::{self, File},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use precast::{
    Device, Digest, Mapped, Model, Runtime,
    record::{Artifact, Program, Release},
    runtime::{
        Loading, RuntimeError, Tensor,
        counters::Rung,
        sources::{Source, SourceError},
    },
};
use serde_json::json;

use crate::{
    fake::{self, Fake, Memory},
    until,
};

/// A source that notes which objects are read but for the shim, and can hold back all but the first.
struct Watched {
    memory: Memory,
    read: Mutex<Vec<Digest>>,
    hold: AtomicBool,
}

impl Watched {
    fn new(memory: Memory) -> Arc<Self> {
        Arc::new(Self {
            memory,
            read: Mutex::default(),
            hold: AtomicBool::new(false),
        })
    }

    fn runtime(self: &Arc<Self>) -> Runtime {
        Runtime::over(self.clone(), Device::Cpu).unwrap()
    }

    fn reads(&self) -> usize {
        self.read.lock().unwrap().len()
    }
}

impl Source for Watched {
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError> {
        self.memory.release(model, name)
    }

    fn program(&self, id: &Digest) -> Result<Program, SourceError> {
        self.memory.program(id)
    }

    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError> {
        self.memory.artifact(key)
    }

    fn memfd(&self, object: &Digest) -> Result<File, SourceError> {
        // The first test of the process opens the shim, and others find it open.
        if precast_shim::testing::compiled().file_of(object).is_some() {
            return self.memory.memfd(object);
        }
        self.read.lock().unwrap().push(*object);
        while self.reads() > 1 && self.hold.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.memory.memfd(object)
    }

    fn map(&self, object: &Digest) -> Result<Mapped, SourceError> {
        self.memory.map(object)
    }
}

fn x(rows: i64, cols: i64) -> Tensor {
    let data: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
    Tensor::from_slice(&data, &[rows, cols]).unwrap()
}

fn first(tensor: &Tensor) -> f64 {
    tensor.to_vec::<f32>().unwrap()[1].into()
}

fn salted(salt: u32, rows: i64) -> Fake {
    Fake::sized(rows, 4).salted(salt)
}

fn runners(model: &Model) -> Vec<(i64, &'static str)> {
    let stats = model.stats().remove(0);
    let mut rows: Vec<_> = stats
        .buckets
        .iter()
        .map(|bucket| (bucket.bucket["batch"], bucket.runner))
        .collect();
    rows.sort_unstable();
    rows
}

#[test]
fn on_demand_loads_only_the_program_of_a_request() {
    let source = Watched::new(Memory::with(&[
        salted(100, 2),
        salted(101, 4),
        salted(102, 8),
    ]));
    let model = source
        .runtime()
        .loading(Loading::OnDemand)
        .load("fake")
        .unwrap();
    assert_eq!(source.reads(), 0);
    assert_eq!(model.timings().first_answer, None);
    let out = model.run("f", &[x(3, 4)]).unwrap();
    assert_eq!((first(&out[0]), source.reads()), (2.0, 1));
    let loaded = [(2, "not loaded"), (4, "artifact"), (8, "not loaded")];
    assert_eq!(runners(&model), loaded);
    assert!(model.timings().first_answer.unwrap() >= model.timings().loaded);
    assert_eq!(model.timings().complete, None);
    model.warm_up().unwrap();
    assert_eq!(source.reads(), 3);
    assert!(model.timings().complete.is_some());
    assert!(
        runners(&model)
            .iter()
            .all(|(_, runner)| *runner == "artifact")
    );
}

#[test]
fn in_the_background_one_is_there_at_once_and_the_rest_by_priority() {
    let memory = Memory::with(&[salted(110, 2), salted(111, 4), salted(112, 8)]);
    let object = |rows: i64| {
        let program = memory.programs.values().find(|p| p.sizes["batch"] == rows);
        memory.artifacts[&program.unwrap().steps[0].artifact].object
    };
    let wanted = [object(4), object(8), object(2)];
    let source = Watched::new(memory);
    let runtime = source
        .runtime()
        .loading(Loading::Background)
        // 4 is wanted most, then 8.
        .priority(|program| [0, 0, 0, 0, 9, 0, 0, 0, 5][program.sizes["batch"] as usize]);
    let model = runtime.load("fake").unwrap();
    until("it never ends", || model.timings().complete.is_some());
    assert_eq!(*source.read.lock().unwrap(), wanted);
    assert!(model.timings().complete.unwrap() >= model.timings().loaded);
    assert_eq!(
        model.run("f", &[x(8, 4)]).unwrap().served().rung(),
        Rung::Exact
    );
}

#[test]
fn a_call_waits_for_no_other_program_and_a_model_ends_while_it_loads() {
    let source = Watched::new(Memory::with(&[
        salted(120, 2),
        salted(121, 4),
        salted(122, 8),
    ]));
    // Every object but the first is held back.
    source.hold.store(true, Ordering::SeqCst);
    let runtime = source.runtime().loading(Loading::Background);
    let model = runtime.load("fake").unwrap();
    assert_eq!(first(&model.run("f", &[x(2, 4)]).unwrap()[0]), 2.0);
    until("no second read", || source.reads() >= 2);
    // The thread is in the middle of the second one, and the first answers still.
    assert_eq!(first(&model.run("f", &[x(1, 4)]).unwrap()[0]), 2.0);
    let released = source.clone();
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
    assert!(
        !source.hold.load(Ordering::SeqCst),
        "it ended with its thread"
    );
    release.join().unwrap();
    assert_eq!(source.reads(), 2);
}

#[test]
fn a_program_loaded_after_a_swap_has_the_new_weights() {
    let mut memory = Memory::with(&[salted(130, 2), salted(131, 4)]);
    let tuned = memory.put(fake::weights(&[("scale", &[7.0])]));
    let source = Watched::new(memory);
    let runtime = source.runtime().loading(Loading::OnDemand);
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
    let mut small = salted(141, 2);
    small.behaviour = "NO_SYMBOL";
    memory.add("f", &small);
    // Damaged, as the runtime finds out itself.
    let damaged = memory.add("f", &salted(142, 4));
    let object = memory.artifacts[&damaged.steps[0].artifact].object;
    memory.objects.get_mut(&object).unwrap()[5000] ^= 1;
    let source = Watched::new(memory);
    for loading in [Loading::Before, Loading::OnDemand] {
        let model = source.runtime().loading(loading).load("fake").unwrap();
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
    let program = source
        .memory
        .programs
        .values()
        .find(|p| p.sizes["batch"] == 2);
    let small = source.memory.artifacts[&program.unwrap().steps[0].artifact].object;
    let reads = |object| {
        source
            .read
            .lock()
            .unwrap()
            .iter()
            .filter(|o| **o == object)
            .count()
    };
    assert_eq!((reads(small), reads(object)), (1, 2));
}

#[test]
fn a_module_of_which_nothing_loads_says_why() {
    let memory = || Memory::with(&[salted(150, 2).behaving("NO_CONTAINER")]);
    let error = Watched::new(memory()).runtime().load("fake").unwrap_err();
    assert!(matches!(error, RuntimeError::NoContainer { .. }), "{error}");
    let source = Watched::new(memory());
    let model = source.runtime().loading(Loading::OnDemand).load("fake");
    for _ in 0..2 {
        let error = model.as_ref().unwrap().run("f", &[x(2, 4)]).unwrap_err();
        let artifact = source
            .memory
            .artifacts
            .keys()
            .next()
            .unwrap()
            .short()
            .to_string();
        let reason = format!("artifact `{artifact}` gives no container: the fake has no container");
        let message = "the programs of module `f` for batch=2 seq=4 can't be loaded";
        assert_eq!(error.to_string(), message);
        let cause = std::error::Error::source(&error).unwrap();
        assert_eq!(cause.to_string(), reason);
    }
}

/// Returns a source whose program has an exported graph, and a receipt that calls this one the faster.
fn with_receipt(faster: &str) -> Arc<Watched> {
    let mut memory = Memory::with(&[]);
    let fake = Fake::sized(4, 4).outputs(2).salted(160);
    let mut program = memory.add("f", &fake);
    memory.export(&mut program, &fake);
    let sign_test =
        json!({ "rounds": 20, "eager_faster": 20, "exclusive": true, "faster": faster });
    program.receipt = serde_json::from_value(
        json!({ "gate": { "artifact_us": 300.0, "eager_us": 200.0, "sign_test": sign_test } }),
    )
    .unwrap();
    memory.programs.insert(program.id, program);
    Watched::new(memory)
}

#[test]
fn an_artifact_slower_than_eager_is_marked_and_eager_answers() {
    let rung = |source: &Arc<Watched>| {
        let model = source.runtime().load("fake").unwrap();
        let out = model.run("f", &[x(4, 4)]).unwrap();
        (out.served().rung(), model.faster_as_eager().len())
    };
    assert_eq!(rung(&with_receipt("eager")), (Rung::Eager, 1));
    assert_eq!(rung(&with_receipt("artifact")), (Rung::Exact, 0));
    // An undecided measurement changes nothing.
    assert_eq!(rung(&with_receipt("neither")), (Rung::Exact, 0));
    let strict = with_receipt("eager").runtime().eager_fallback(false);
    let out = strict.load("fake").unwrap().run("f", &[x(4, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Exact);
}

#[test]
fn an_artifact_is_kept_when_eager_can_not_run_in_its_place() {
    let source = with_receipt("eager");
    let mut memory = Memory::with(&[]);
    memory.programs = source.memory.programs.clone();
    memory.artifacts = source.memory.artifacts.clone();
    memory.objects = source.memory.objects.clone();
    let broken = memory.put(b"no list of calls".to_vec());
    let exported = Digest::of(b"exported");
    memory.artifacts.get_mut(&exported).unwrap().object = broken;
    let model = Watched::new(memory).runtime().load("fake").unwrap();
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
    let model = Watched::new(memory).runtime().load("fake").unwrap();
    let out = model.run("f", &[x(4, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    assert_eq!(out.served().bucket().unwrap()["batch"], 8);
}

#[test]
fn the_costs_of_receipts_choose_between_buckets() {
    for (tall, wide, chosen) in [(9e6, 8e6, 2), (7e6, 8e6, 64)] {
        let fakes = [Fake::sized(64, 4), Fake::sized(2, 2048)];
        let mut memory = Memory::with(&fakes.map(|fake| fake.salted(180)));
        for program in memory.programs.values_mut() {
            let micros = match program.sizes["batch"] {
                64 => tall,
                _ => wide,
            };
            let receipt = json!({ "gate": { "artifact_us": micros } });
            program.receipt = serde_json::from_value(receipt).unwrap();
        }
        let model = Watched::new(memory).runtime().load("fake").unwrap();
        let outputs = model.run("f", &[x(1, 2)]).unwrap();
        assert_eq!(outputs.served().bucket().unwrap()["batch"], chosen);
    }
}
