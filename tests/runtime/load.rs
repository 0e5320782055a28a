//! Loads, and refusals before anything runs.

use precast::{
    Device, Digest, Runtime,
    plan::HeldKey,
    record::{Artifact, ArtifactKind, Program},
    runtime::RuntimeError,
};

use crate::{
    fake::{self, Fake, Memory},
    flat, load, without_ids, x,
};

#[test]
fn artifacts_that_do_not_load_are_errors_with_their_names() {
    let told = |memory: Memory| without_ids(&load(memory).unwrap_err().to_string());
    let plain = || Memory::with(&[Fake::default()]);
    insta::assert_snapshot!(told(Memory::with(&[Fake::of("NO_SYMBOL")])), @"object `[id]` lacks the function `AOTInductorModelContainerGetNumInputs`");
    insta::assert_snapshot!(told(Memory::with(&[Fake::of("NO_CONTAINER")])), @"artifact `[id]` gives no container: the fake has no container");

    let mut memory = Memory::with(&[Fake::default().salted(1)]);
    let object = memory.object_of(memory.programs.values().next().unwrap());
    memory.objects.get_mut(&object).unwrap()[5000] ^= 1;
    insta::assert_snapshot!(told(memory), @"object `[id]` has other bytes: they hash to `[id]`");

    let mut memory = plain();
    let text = memory.put(b"not a shared object".to_vec());
    let memory = memory.each_artifact(|artifact| artifact.object = text);
    insta::assert_snapshot!(told(memory), @"object `[id]` is not loadable: it is no shared object: invalid elf header size or alignment");

    let mut memory = Memory::with(&[Fake::default().constants(2)]);
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0])])));
    insta::assert_snapshot!(told(memory), @"constant `shift.0` of artifact `[id]` is not bound: the weight set has no tensor `shift.0`");

    let mut memory = plain();
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0, 3.0])])));
    insta::assert_snapshot!(told(memory), @"constant `scale` of artifact `[id]` is not bound: it is float32 [1], and `scale` in the weight set is float32 [2]");

    let memory = plain().each_program(|program| program.steps[0].binding.clear());
    insta::assert_snapshot!(told(memory), @"constant `scale` of artifact `[id]` is not bound: the program's binding does not name it");

    let memory =
        plain().each_artifact(|artifact| artifact.outputs.push(artifact.outputs[0].clone()));
    insta::assert_snapshot!(told(memory), @"program `[id]` is malformed: step `whole` has other numbers of inputs or outputs than its artifact");

    let memory = plain().each_program(|program| program.results = vec![7]);
    insta::assert_snapshot!(told(memory), @"program `[id]` is malformed: result 7 is never written");
}

/// Gives a fake artifact and its program keys that are explained, as a build does.
fn explained(memory: &mut Memory) -> (Digest, Digest) {
    let mut program = memory.programs.drain().next().unwrap().1;
    let mut artifact = memory.artifacts.drain().next().unwrap().1;
    let of = |kind, object: &Digest| {
        let key = HeldKey {
            kind,
            object,
            libraries: &[],
            target: &fake::target(),
        };
        key.explained()
    };
    (artifact.id, artifact.key) = of(ArtifactKind::Library, &artifact.object);
    program.steps[0].artifact = artifact.id;
    (program.id, program.request) = of(ArtifactKind::Constants, &program.id);
    let ids = (program.id, artifact.id);
    memory.artifacts.insert(artifact.id, artifact);
    memory.programs.insert(program.id, program);
    ids
}

#[test]
fn a_record_that_is_another_ones_is_refused_by_name() {
    let told = |change: &dyn Fn(&mut Artifact, &mut Program)| {
        let mut memory = Memory::with(&[Fake::default()]);
        let (program, artifact) = explained(&mut memory);
        let program = memory.programs.get_mut(&program).unwrap();
        change(memory.artifacts.get_mut(&artifact).unwrap(), program);
        match load(memory) {
            Ok(model) => {
                model.run("f", &[x(8, 4)]).unwrap();
                "it answers".to_owned()
            }
            Err(error) => without_ids(&error.to_string()),
        }
    };
    let other = || Digest::of(b"other");
    insta::assert_snapshot!(told(&|_, _| ()), @"it answers");
    insta::assert_snapshot!(told(&|a, _| a.id = other()), @"the record of artifact `[id]` is refused: it is the record of `[id]`");
    insta::assert_snapshot!(told(&|a, _| a.key["object"] = other().hex().into()), @"the record of artifact `[id]` is refused: its key hashes to `[id]`");
    insta::assert_snapshot!(told(&|a, _| a.key = serde_json::json!({"kind": "library"})), @"the record of artifact `[id]` is refused: its key hashes to `[id]`");
    insta::assert_snapshot!(told(&|a, _| a.target.torch_git = "0".into()), @"the record of artifact `[id]` is refused: its target is not that of its key");
    insta::assert_snapshot!(told(&|_, p| p.id = other()), @"the record of program `[id]` is refused: it is the record of `[id]`");
    insta::assert_snapshot!(told(&|_, p| p.request["object"] = other().hex().into()), @"the record of program `[id]` is refused: its key hashes to `[id]`");
    insta::assert_snapshot!(told(&|_, p| p.target.isa = "other".into()), @"the record of program `[id]` is refused: its target is not that of its key");
    insta::assert_snapshot!(told(&|a, _| a.key = serde_json::json!("nothing")), @"the record of artifact `[id]` is refused: its key hashes to `[id]`");
}

#[test]
fn an_artifact_that_imports_what_libtorch_lacks_is_refused_by_name() {
    let error = load(Memory::with(&[Fake::of("NEEDS_NEWER")])).unwrap_err();
    let RuntimeError::LackingLibtorch {
        functions,
        built_with,
        torch,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(functions[..], ["aoti_torch_of_a_later_version"]);
    assert_eq!(*built_with, crate::fake::target().torch);
    assert!(built_with.starts_with(torch.as_str()), "{error}");
    let said = format!(
        "object `[id]`, built with torch {built_with}, imports the function `aoti_torch_of_a_later_version`, \
         which torch {torch} of this process lacks"
    );
    assert_eq!(without_ids(&error.to_string()), said);
    assert!(error.hint().contains("or a newer one"), "{}", error.hint());

    // The ladder answers where it can, and a refusal stays.
    for _ in 0..2 {
        let mut memory = Memory::with(&[Fake::sized(4, 4)]);
        let lacking = Fake::sized(2, 2).behaving("NEEDS_NEWER");
        memory.add("f", &lacking);
        let model = load(memory).unwrap();
        assert!(model.run("f", &[x(2, 2)]).is_ok());
        let lost = model.quarantined();
        assert_eq!((lost.len(), lost[0].error.name()), (1, "LackingLibtorch"));
    }
}

#[test]
fn an_artifact_for_another_host_is_refused_whatever_its_program_says() {
    let mut memory = Memory::with(&[Fake::default()]).each_artifact(|artifact| {
        artifact.target.torch_git = "other".to_owned();
        artifact.target.features.push("avx9000".to_owned());
    });
    // Not as far as the object, which is not there.
    let code = |bytes: &[u8]| bytes.starts_with(b"\x7fELF");
    memory.objects.retain(|_, bytes| !code(bytes));
    let error = load(memory).unwrap_err();
    let RuntimeError::WrongArtifact { mismatches, .. } = &error else {
        panic!("{error}");
    };
    let fields: Vec<_> = mismatches.iter().map(|mismatch| mismatch.field).collect();
    assert_eq!(fields, ["torch_git", "isa"]);

    // The ladder answers where it can.
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    let small = memory.add("f", &Fake::sized(2, 2));
    let artifact = memory.artifacts.get_mut(&small.steps[0].artifact).unwrap();
    artifact.target.torch_git = "other".to_owned();
    let model = memory.load();
    assert!(model.run("f", &[x(2, 2)]).is_ok());
    assert_eq!(model.quarantined().len(), 1);
}

#[test]
fn steps_pass_values_and_aliases_find_tied_weights() {
    let mut memory = Memory::default();
    let fake = Fake::sized(2, 2);
    let mut program = memory.add("f", &fake);
    memory.programs.clear();
    // (x * a) * b, where `b` is tied to `a` under another name; and the first value again as an output.
    let mut step = program.steps[0].clone();
    program.steps[0].binding.insert("scale".into(), "a".into());
    step.binding.insert("scale".into(), "b".into());
    (step.inputs, step.outputs) = (vec![1], vec![2]);
    program.steps.push(step);
    (program.values, program.results) = (3, vec![2, 1, 2]);
    program.outputs = vec![program.outputs[0].clone(); 3];
    memory.programs.insert(program.id, program);
    memory.weights = Some(memory.put(fake::weights(&[("a", &[3.0])])));
    memory.aliases.insert("b".into(), "a".into());
    let model = load(memory).unwrap();
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(flat(&out[0]), [0.0, 9.0, 18.0, 27.0]);
    assert_eq!(flat(&out[1]), [0.0, 3.0, 6.0, 9.0]);
    assert_eq!(flat(&out[2]), flat(&out[0]));
}

#[test]
fn tensors_that_the_code_makes_are_bound_beside_the_weights() {
    let mut memory = Memory::default();
    let fake = Fake::sized(2, 2).constants(2);
    let program = memory.add("f", &fake);
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0])])));
    let object = memory.put(fake::weights(&[("shift.0", &[10.0])]));
    let mut extras = fake.artifact(object);
    (extras.id, extras.kind) = (Digest::of(b"extras"), ArtifactKind::Constants);
    memory.programs.get_mut(&program.id).unwrap().constants = Some(extras.id);
    memory.artifacts.insert(extras.id, extras);
    let out = memory.load().run("f", &[x(2, 2)]).unwrap();
    assert_eq!(flat(&out[0]), [10.0, 12.0, 14.0, 16.0]);
}

#[test]
fn a_model_or_a_release_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = precast::Store::create(folder.path().join("store")).unwrap();
    Memory::with(&[Fake::default()]).publish(&store, "fake");
    fake::libtorch();
    let runtime = Runtime::new(&store, Device::Cpu).unwrap();
    let told = |model: &str| {
        let error = runtime.load(model).unwrap_err();
        assert_eq!(error.name(), "NoRelease");
        format!("{error}; {}", error.hint())
    };
    insta::assert_snapshot!(told("nosuch"), @"there is no model `nosuch`; the store has fake");
    insta::assert_snapshot!(told("fake@9"), @"there is no release `fake@9`; `precast release ls` lists the releases; gc may have deleted this one");
}

#[test]
fn no_device_and_one_device_twice_are_refused() {
    // Before a device is looked for.
    for devices in [vec![], vec![Device::Cuda(0), Device::Cpu, Device::Cuda(0)]] {
        let refused = Runtime::over(Memory::default().source(), devices);
        assert_eq!(refused.err().unwrap().name(), "Devices");
    }
}
