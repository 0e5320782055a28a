//! Hosts that are not those of the target, and artifacts that do not load.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use precast::{Device, Digest, Runtime, Target, runtime::RuntimeError, target::DeviceKind};

use crate::{
    Random,
    fake::{Fake, Hooked, Memory},
    flat,
    report::Tally,
    runtime, x,
};

/// Loads programs for other hosts: every set of differences, one program in a release of two, and devices that are not
/// there. Each is refused with exactly the fields that differ, and no code is read.
pub fn hosts() -> Tally {
    type Field = (&'static str, fn(&mut Target));
    const FIELDS: [Field; 9] = [
        ("os", |target| target.os = "plan9".into()),
        ("arch", |target| target.arch = "riscv64".into()),
        ("device", |target| target.device = DeviceKind::Cuda),
        // Newer than this host's torch: refused, whatever gates passed here.
        ("torch", |target| target.torch = "2.99.0+cu126".into()),
        ("torch_git", |target| {
            target.torch_git = "0123456789abcdef".into()
        }),
        // Of a CUDA target alone do these two decide.
        ("cuda", |target| target.cuda = Some("12.6".into())),
        ("sm", |target| target.sm = Some("100".into())),
        ("cxx11_abi", |target| target.cxx11_abi = !target.cxx11_abi),
        ("isa", |target| target.features.push("avx1024".into())),
    ];
    let mut outcome = Tally::of(["refused", "code_read"]);
    for set in 1u32..1 << FIELDS.len() {
        let mut memory = Memory::with(&[Fake::sized(4, 4), Fake::sized(2, 3)]);
        let id = *memory.programs.keys().min().unwrap();
        let target = &mut memory.programs.get_mut(&id).unwrap().target;
        let at = |field: &str| FIELDS.iter().position(|(name, _)| *name == field).unwrap();
        let has = |field: &str| set >> at(field) & 1 == 1;
        let changed = FIELDS.iter().filter(|(field, _)| has(field));
        changed.clone().for_each(|(_, change)| change(target));
        let (on_cuda, on_arch) = (has("device"), has("arch"));
        // On another architecture there is nothing to say about its features.
        let counts = |field: &str| match field {
            "cuda" | "sm" => on_cuda,
            "isa" => !on_arch,
            _ => true,
        };
        let fields = changed.map(|(field, _)| *field);
        let mut expected: Vec<&str> = fields.filter(|field| counts(field)).collect();
        if expected.is_empty() {
            continue;
        }
        let code = Arc::new(AtomicU64::new(0));
        let counted = code.clone();
        let source = Hooked::over(memory, move |_| {
            counted.fetch_add(1, Relaxed);
            Ok(None)
        });
        let error = runtime(source).load("fake").err();
        let read = code.load(Relaxed);
        outcome.add("code_read", read);
        match error {
            Some(RuntimeError::WrongTarget {
                mismatches,
                program,
                ..
            }) if program == id && read == 0 => {
                let mut fields: Vec<&str> = mismatches.iter().map(|m| m.field).collect();
                // A CUDA target always differs in the compute capability from a host without one.
                fields.retain(|field| has(field) || !["cuda", "sm"].contains(field));
                fields.sort_unstable();
                expected.sort_unstable();
                match fields == expected {
                    true => outcome.add("refused", 1),
                    false => outcome.fail(format!("{expected:?} reported as {fields:?}")),
                }
            }
            other => outcome.fail(format!("{expected:?}: {other:?}, {read} reads")),
        }
    }
    let nowhere = [Device::Cuda(0), Device::Cuda(7), Device::Cuda(usize::MAX)];
    for device in nowhere {
        if device == Device::Cuda(0) && std::path::Path::new("/dev/nvidiactl").exists() {
            continue;
        }
        for devices in [vec![device], vec![Device::Cpu, device]] {
            match Runtime::over(Memory::with(&[Fake::default()]).source(), devices) {
                Err(RuntimeError::NoDevice { device: named, .. }) if named == device => {
                    outcome.add("refused", 1)
                }
                other => outcome.fail(format!("{device}: {:?}", other.err())),
            }
        }
    }
    outcome
}

/// Loads a model one of whose two buckets is broken in a seeded way, again and again: it is set aside once, by name,
/// and the other bucket answers its requests.
pub fn broken(loads: u64, seed: u64) -> Tally {
    let mut random = Random(seed);
    let mut outcome = Tally::of(["loads", "set_aside"]);
    for _ in 0..loads {
        let whole = Fake::sized(4, 4);
        let mut memory = Memory::with(std::slice::from_ref(&whole));
        let way = random.below(7);
        let behaviour = match way {
            0 => "NO_SYMBOL",
            1 => "NO_CONTAINER",
            _ => "OK",
        };
        let program = memory.add("f", &Fake::sized(2, 2).behaving(behaviour));
        let artifact = program.steps[0].artifact;
        // Bytes nobody has loaded: an object that is in the process already is not read again.
        let mut bytes = memory.objects[&memory.artifacts[&artifact].object].clone();
        bytes.extend(random.draw().to_le_bytes());
        let object = memory.put(bytes.clone());
        memory.artifacts.get_mut(&artifact).unwrap().object = object;
        let what = match way {
            0 | 1 => behaviour.to_owned(),
            2 => {
                // The digest does not know of it.
                let at = random.below(bytes.len());
                bytes[at] ^= 1 << random.below(8);
                memory.objects.insert(object, bytes);
                format!("byte {at} changed")
            }
            3 => {
                let length = random.below(bytes.len());
                bytes.truncate(length);
                memory.objects.insert(object, bytes);
                format!("cut to {length}")
            }
            4 => {
                // Whole by its digest, and no shared object the loader takes.
                let length = random.below(4096);
                bytes.truncate(length);
                let other = memory.put(bytes);
                memory.artifacts.get_mut(&artifact).unwrap().object = other;
                format!("published with {length} bytes")
            }
            5 => {
                let other = memory.put((0..5000).map(|_| random.draw() as u8).collect());
                memory.artifacts.get_mut(&artifact).unwrap().object = other;
                "noise".to_owned()
            }
            _ => {
                let record = memory.artifacts.get_mut(&artifact).unwrap();
                record.inputs.push(record.inputs[0].clone());
                "another number of inputs".to_owned()
            }
        };
        outcome.add("loads", 1);
        let id = program.id;
        let loaded = runtime(memory.source()).load("fake");
        let model = match loaded {
            Ok(model) => model,
            // A record that is wrong in itself is no artifact's fault, and says so.
            Err(RuntimeError::Malformed { .. }) if way == 6 => continue,
            Err(error) => {
                outcome.fail(format!("{what}: the model does not load: {error}"));
                continue;
            }
        };
        let lost = model.quarantined();
        let aside: Vec<Digest> = lost.iter().map(|lost| lost.program).collect();
        let answer = model.run("f", &[x(2, 2)]).map(|out| flat(&out[0]));
        if aside != [id] || answer.as_ref().ok() != Some(&flat(&(x(2, 2) * 2))) {
            outcome.fail(format!("{what}: set aside {aside:?}, then {answer:?}"));
        }
        outcome.add("set_aside", 1);
    }
    outcome
}
