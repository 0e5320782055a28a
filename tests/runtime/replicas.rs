//! A model on several devices. Here the CPU is used twice, because the choice between replicas does not depend on their
//! devices. `tests/gpu/replicas.rs` has the same with two CUDA devices.

use precast::{
    Device, Model, Runtime, Value,
    runtime::{Session, counters::DeviceStats},
};

use crate::{
    fake::{self, Fake, Memory},
    until,
};

fn load(fake: Fake, devices: usize) -> Model {
    let runtime = Runtime::over(Memory::with(&[fake]).source(), vec![Device::Cpu; devices]);
    runtime.unwrap().instances(1).load("fake").unwrap()
}

fn x(rows: usize, value: f32) -> Value {
    Value::new(&vec![value; rows * 2], &[rows, 2]).unwrap()
}

fn answered(model: &Model) -> Vec<u64> {
    let devices = model.devices();
    devices.iter().map(|device| device.answered).collect()
}

#[test]
fn one_caller_has_them_in_turns_and_counts_are_by_device() {
    let model = load(Fake::sized(2, 2), 3);
    for _ in 0..30 {
        let out = model.run("f", &[x(2, 3.0)]).unwrap();
        assert_eq!(out.array::<f32>(0).unwrap().data(), [6.0; 4]);
    }
    model.run("f", &[x(1, 3.0)]).unwrap();
    assert_eq!(answered(&model), [11, 10, 10]);
    let first = DeviceStats {
        device: "cpu".to_owned(),
        in_flight: 0,
        answered: 11,
        failed: 0,
        broken: None,
    };
    assert_eq!(model.devices()[0], first);
    assert_eq!(model.stats().len(), 3, "a row by module and device");
    // Requests are counted over all replicas.
    let counts = model.counts().calls;
    let mut counts: Vec<_> = counts.iter().map(|row| (&*row.rung, row.count)).collect();
    counts.sort_unstable();
    assert_eq!(counts, [("exact", 30), ("padded", 1)]);
}

#[test]
fn a_call_goes_where_the_fewest_are_under_way() {
    // A call with numbers below 0 takes a second; other calls meanwhile go to the other replica.
    let model = &load(Fake::sized(2, 2).behaving("HANGS"), 2);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            model.run("f", &[x(2, -1.0)]).unwrap();
        });
        let busy = || {
            let devices = model.devices();
            devices.iter().position(|device| device.in_flight > 0)
        };
        until("no replica is busy", || busy().is_some());
        let busy = busy().unwrap();
        for _ in 0..20 {
            model.run("f", &[x(2, 1.0)]).unwrap();
        }
        // Unless that took more than a second.
        if model.devices()[busy].in_flight > 0 {
            let idle = answered(model)[1 - busy];
            assert_eq!(idle, 20, "a call went to the busy replica");
        }
    });
    assert_eq!(answered(model).iter().sum::<u64>(), 21);
    assert!(model.devices().iter().all(|device| device.in_flight == 0));
}

#[test]
fn every_replica_has_the_weights_that_were_swapped_in() {
    let mut memory = Memory::with(&[Fake::sized(2, 2)]);
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let devices = [Device::Cpu, Device::Cpu];
    let runtime = Runtime::over(memory.source(), devices).unwrap();
    let model = runtime.load("fake").unwrap();
    model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap();
    for _ in 0..4 {
        let out = model.run("f", &[x(2, 3.0)]).unwrap();
        assert_eq!(out.array::<f32>(0).unwrap().data(), [15.0; 4]);
    }
    assert_eq!(answered(&model), [2, 2]);
}

#[test]
fn callers_on_several_threads_use_all_of_them() {
    let model = load(Fake::sized(2, 2), 2);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let model = &model;
            scope.spawn(move || {
                let value = f32::from(thread);
                for _ in 0..500 {
                    let out = model.run("f", &[x(2, value)]).unwrap();
                    assert_eq!(out.array::<f32>(0).unwrap().data(), [value * 2.0; 4]);
                }
            });
        }
    });
    let answered = answered(&model);
    assert_eq!(answered.iter().sum::<u64>(), 2000);
    // How many each is up to the machine: a thread that is put off in the middle of a call leaves the others one
    // replica.
    assert!(answered.iter().all(|&n| n > 0), "{answered:?}");
}

#[test]
fn a_session_is_opened_on_the_device_with_the_fewest() {
    let model = load(Fake::sized(2, 2).constants(0).stateful(), 2);
    let open = || model.session().unwrap();
    let mut sessions: Vec<_> = (0..4).map(|_| open()).collect();
    let call = |session: &mut Session<'_>| {
        let before = answered(&model);
        session.run("f", &[x(2, 1.0)]).unwrap();
        let after = answered(&model);
        (0..2).find(|&at| after[at] > before[at]).unwrap()
    };
    let on: Vec<usize> = sessions.iter_mut().map(call).collect();
    assert_eq!(on, [0, 1, 0, 1]);
    // Idle sessions count as well: the next two replace those that are closed.
    drop(sessions.remove(2));
    drop(sessions.remove(0));
    let mut new = [open(), open()];
    assert_eq!(new.each_mut().map(call), [0, 0]);
}
