//! Which fields change a key, and the exact digests of a few keys.

mod knobs;

use std::{collections::BTreeSet, path::Path};

use precast_store::{
    record::{Dtype, Pad},
    target::DeviceKind,
};

use super::*;
use crate::{
    plan::forms,
    spec::{Overrides, Spec},
};

const SPEC: &str = r#"schema = 1
[model]
name = "tiny"
entry = "model:load"
[target]
device = "cpu"
[compile]
options = { epilogue_fusion = true, "triton.x" = 1 }
[[module]]
name = "encode"
path = "body"
regions = ["layer.*"]
passes = ["passes:fold"]
[module.inputs]
ids = { dtype = "int64", shape = ["batch", 4], pad = 0 }
mask = { dtype = "bool", shape = ["batch", 4] }
[module.buckets]
batch = [2]
[module.gate]
rtol = 1e-4
"#;

/// Everything outside the spec that a request key sees.
#[derive(Clone)]
struct World {
    sources: Vec<SourceFile>,
    packages: Vec<Package>,
    target: Target,
}

fn source(name: &str) -> SourceFile {
    SourceFile {
        path: format!("{name}.py"),
        digest: Digest::of(name.as_bytes()),
    }
}

fn world() -> World {
    World {
        sources: ["model", "layers"].map(source).into(),
        packages: vec![Package {
            name: "torch".into(),
            version: "2.11.0".into(),
        }],
        target: Target {
            os: "linux".into(),
            arch: "x86_64".into(),
            isa: "native".into(),
            features: vec!["avx2".into(), "fma".into()],
            device: DeviceKind::Cpu,
            sm: None,
            torch: "2.11.0+cu130".into(),
            torch_git: "70d99e9".into(),
            cuda: Some("13.0".into()),
            cxx11_abi: true,
        },
    }
}

/// Checks that a digest follows from the key, as a record keeps it.
fn same_again((digest, explained): (Digest, Value)) -> (Digest, Value) {
    let text = serde_json::to_string(&explained).unwrap();
    let read: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(canon::digest(&read), digest, "{text}");
    (digest, explained)
}

/// Returns the request key of the first module at its first bucket.
fn request(text: &str, world: &World) -> (Digest, Value) {
    asked(text, world, false)
}

/// The same, tuned or not.
fn asked(text: &str, world: &World, tuned: bool) -> (Digest, Value) {
    with_inputs(text, world, tuned, |_| ())
}

/// The same, with a change of the inputs.
fn with_inputs(
    text: &str,
    world: &World,
    tuned: bool,
    change: impl Fn(&mut [Input]),
) -> (Digest, Value) {
    let spec = Spec::parse(text, Path::new("precast.toml"))
        .map_err(|error| error.render())
        .unwrap();
    let target = Target {
        isa: match spec.target.isa.as_str() {
            "native" => world.target.isa.clone(),
            level => level.to_owned(),
        },
        device: match spec.target.device {
            DeviceKind::Cpu => world.target.device,
            DeviceKind::Cuda => DeviceKind::Cuda,
        },
        ..world.target.clone()
    };
    let common = Common {
        unsaved: &spec.unsaved(),
        model: &spec.model.name,
        entry: &spec.model.entry,
        samples: spec.model.samples.as_deref(),
        context: spec.model.context,
        weights_file: spec.model.weights.file().is_some(),
        sources: &world.sources,
        packages: &world.packages,
        target: &target,
    };
    let module = &spec.modules[0];
    let mut inputs = module.sized_inputs(&module.buckets[0]);
    change(inputs.as_deref_mut().unwrap_or_default());
    let settings = spec.settings(module, &Overrides::default(), &Overrides::default());
    let shared = common.shared();
    let forms = forms(module, &settings.compile);
    // With `dynamic`, the program that `dynamic` adds is compared.
    let added = forms
        .iter()
        .find(|form| form.compiled && form.dynamic.is_some());
    let form = added.unwrap_or(&forms[0]);
    let key = RequestKey {
        common: &shared,
        module: &module.name,
        path: &module.path,
        method: &module.method,
        inputs: inputs.as_deref(),
        state: &module.sized_state(&module.buckets[0], &spec.modules),
        sizes: &form.sizes,
        dynamic: form.dynamic.as_ref(),
        compiled: form.compiled,
        regions: &module.regions,
        settings: &settings.compile,
        padding: module.padding,
        train: module.train.as_ref(),
        pair: module.pair.as_ref(),
        tuned,
    };
    assert_eq!(key.digest(), key.explained().0);
    same_again(key.explained())
}

fn artifact(change: impl Fn(&mut Value)) -> (Digest, Value) {
    // The JSON form has every leaf, and each one can be changed.
    let layout = |shape: [i64; 2]| serde_json::json!({"dtype": "float32", "shape": shape, "stride": [shape[1], 1]});
    let mut knobs = serde_json::json!({
        "graph": Digest::of(b"graph"),
        "inputs": [layout([2, 4]), layout([1, 1])],
        "outputs": [layout([2, 8])],
        "constants": [{"name": "c0", "dtype": "float32", "shape": [8, 4], "stride": [4, 1]}],
        "backend": "inductor",
        "mode": "default",
        "options": {"epilogue_fusion": true},
        "passes": ["passes:fold", Digest::of(b"pass")],
        "target": world().target,
    });
    change(&mut knobs);
    fn field<T: serde::de::DeserializeOwned>(knobs: &Value, name: &str) -> T {
        serde_json::from_value(knobs[name].clone()).unwrap()
    }
    let (callable, source) = field(&knobs, "passes");
    let key = ArtifactKey {
        graph: &field(&knobs, "graph"),
        inputs: &field::<Vec<Layout>>(&knobs, "inputs"),
        outputs: &field::<Vec<Layout>>(&knobs, "outputs"),
        constants: &field::<Vec<Constant>>(&knobs, "constants"),
        backend: field(&knobs, "backend"),
        mode: field(&knobs, "mode"),
        options: &field(&knobs, "options"),
        passes: &[Pass { callable, source }],
        target: &field(&knobs, "target"),
    }
    .explained();
    same_again(key)
}

#[test]
fn a_digest_follows_from_the_key_in_a_record() {
    let (object, target) = (Digest::of(b"object"), world().target);
    for libraries in [&[][..], &[Digest::of(b"a"), Digest::of(b"b")]] {
        use ArtifactKind as Kind;
        for kind in [Kind::Library, Kind::Constants, Kind::Graph] {
            let key = HeldKey {
                kind,
                object: &object,
                libraries,
                target: &target,
            };
            same_again(key.explained());
        }
    }
    // Numbers that JSON does not have, and one that needs all its digits.
    for pad in [f64::NEG_INFINITY, f64::NAN, f64::from(f32::MIN), -0.0, 0.1] {
        with_inputs(SPEC, &world(), false, |inputs| {
            inputs[0].layout.dtype = Dtype::Float64;
            inputs[0].pad = Pad::Float(pad);
        });
    }
    let (key, explained) = request(SPEC, &world());
    let changed = |path: &str, value: Value| {
        let mut explained = explained.clone();
        *explained.pointer_mut(path).unwrap() = value;
        canon::digest(&explained)
    };
    assert_ne!(changed("/common/target/torch_git", "0".into()), key);
    assert_ne!(changed("/mode", "max-autotune".into()), key);
    let mut longer = explained.clone();
    longer["more"] = 1.into();
    assert_ne!(canon::digest(&longer), key);
    assert_eq!(*canon::target_of(&explained), canon::target(&target));
}

#[test]
fn every_knob_of_an_artifact_moves_its_key() {
    let mut seen = BTreeSet::from([artifact(|_| ()).0]);
    let digest = serde_json::to_value(Digest::of(b"other")).unwrap();
    let changes: &[(&str, Value)] = &[
        ("/graph", digest.clone()),
        ("/inputs/0/dtype", "float16".into()),
        ("/inputs/0/shape/0", 3.into()),
        ("/inputs/0/stride/0", 8.into()),
        ("/outputs/0/shape/1", 9.into()),
        ("/constants/0/name", "c1".into()),
        ("/constants/0/dtype", "bfloat16".into()),
        ("/constants/0/shape/0", 9.into()),
        ("/constants/0/stride/1", 2.into()),
        ("/backend", "eager".into()),
        ("/mode", "max-autotune".into()),
        ("/options/epilogue_fusion", false.into()),
        ("/options", serde_json::json!({})),
        ("/passes/0", "passes:unfold".into()),
        ("/passes/1", digest),
        ("/inputs", serde_json::json!([])),
        ("/constants", serde_json::json!([])),
        ("/target/sm", "90".into()),
        ("/target/features", serde_json::json!([])),
    ];
    for (knob, value) in changes {
        let (key, _) = artifact(|knobs| *knobs.pointer_mut(knob).unwrap() = value.clone());
        assert!(seen.insert(key), "{knob}");
    }
    let (swapped, _) = artifact(|knobs| knobs["inputs"].as_array_mut().unwrap().swap(0, 1));
    assert!(seen.insert(swapped), "order of inputs");
    let (request, _) = request(SPEC, &world());
    assert!(seen.insert(request), "a request key is no artifact key");
}

#[test]
fn a_tuned_program_has_a_key_of_its_own_and_a_reason_for_it() {
    let (plain, before) = request(SPEC, &world());
    let (tuned, after) = asked(SPEC, &world(), true);
    assert_ne!(plain, tuned);
    let reasons = |old: &Value, new: &Value| {
        let reasons = crate::plan::reasons(old, new);
        reasons.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let (there, back) = (reasons(&before, &after), reasons(&after, &before));
    assert_eq!(there, ["`tuned` changed: `false` -> `true`"]);
    assert_eq!(back, ["`tuned` changed: `true` -> `false`"]);
}

/// If this fails, every key of every store out there misses: raise [`canon::FORMAT`], or undo the change.
#[test]
fn the_bytes_of_a_few_keys_are_pinned() {
    let version = (canon::FORMAT, PROTOCOL);
    assert_eq!(version, (2, 2), "pin the keys of the new version below");
    insta::assert_snapshot!(request(SPEC, &world()).0.hex(), @"534810c862c63a43a0a62b00323d874d7b1a1b98162561eb5b2a26e599e91e21");
    insta::assert_snapshot!(artifact(|_| ()).0.hex(), @"de7fa529d84983f99a9d0669182256406e866ff0370eba78c291ae6381455b1c");
    insta::assert_snapshot!(request("schema = 1\nmodel = { name = \"m\", entry = \"m:f\" }\n[[module]]\nname = \"f\"", &world()).0.hex(), @"0efbc8bd6ce65f3029427c06361e00c23a24c6f0b2bb2bbdf59f6ea7f86f8983");
}

#[test]
fn a_key_shows_every_field_that_was_hashed() {
    insta::assert_snapshot!(request(SPEC, &world()).1, @r#"{"kind":"request","format":2,"protocol":2,"common":{"model":"tiny","entry":"model:load","samples":null,"sources":{"layers.py":"e3b816898ca5ba5fbe6b8e6ee8e5d028da790352f5e65ac760fb59635882f6cd","model.py":"9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4"},"packages":{"torch":"2.11.0"},"target":{"os":"linux","arch":"x86_64","isa":"native","features":["avx2","fma"],"device":"cpu","sm":null,"torch":"2.11.0+cu130","torch_git":"70d99e9","cuda":"13.0","cxx11_abi":true},"weights":"auto"},"module":"encode","path":"body","method":"forward","inputs":[{"name":"ids","dtype":"int64","shape":[2,4],"stride":[4,1],"dims":["batch",null],"pad":0,"range":null,"within":null},{"name":"mask","dtype":"bool","shape":[2,4],"stride":[4,1],"dims":["batch",null],"pad":false,"range":null,"within":null}],"state":[],"sizes":{"batch":2},"regions":["layer.*"],"compiles":true,"dynamic":null,"backend":"inductor","mode":"default","options":{"epilogue_fusion":true,"freezing":true,"triton.x":1},"passes":["passes:fold"],"padding":"checked","tuned":false}"#);
}
