//! Every printed error of a spec, and a test that no text makes the parser panic.

mod keys;
mod shapes;

use std::path::Path;

use super::*;

const GOOD: &str = r#"schema = 1

[model]
name = "minilm"
entry = "model:load"

[target]
device = "cpu"

[compile]
mode = "default"
options = { "triton.cudagraphs" = false, epilogue_fusion = true }

[[module]]
name = "encode"
regions = ["encoder.layer.*"]
mode = "max-autotune"
[module.inputs]
input_ids = { dtype = "int64", shape = ["batch", "seq"], pad = 1, range = [0, 30522] }
attention_mask = { dtype = "int64", shape = ["batch", "seq"] }
[module.buckets]
seq = [128, 32]
batch = [8, 1]
[module.gate]
rtol = 1e-4
atol = 1e-5
"#;

fn parse(text: &str) -> Result<Spec, SpecError> {
    Spec::parse(text, Path::new("precast.toml"))
}

/// Returns the error of the good spec with `from` replaced by `to`.
fn broken(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    message(&GOOD.replacen(from, to, 1))
}

/// Returns the problems of the good spec with `from` replaced by `to`, as [`brief_of`] writes them.
fn brief(from: &str, to: &str) -> String {
    shorten(&broken(from, to))
}

/// Returns the problems of a spec, one a line: `line:column+length message = help`.
fn brief_of(text: &str) -> String {
    shorten(&message(text))
}

pub(super) fn shorten(rendered: &str) -> String {
    let problems = rendered.trim_end().split("\n\n").map(|problem| {
        let part = |mark: &str| {
            let mut lines = problem.lines().filter_map(|line| line.split_once(mark));
            lines.next().unwrap_or_else(|| panic!("{problem}")).1
        };
        let carets = problem
            .lines()
            .filter(|line| line.trim_end().ends_with('^'));
        let length = carets.map(|line| line.matches('^').count()).sum::<usize>();
        let (_, place) = part(" --> ").split_once(':').unwrap();
        let message = part("error: ");
        format!("{place}+{length} {message} = {}", part("= help: "))
    });
    problems.collect::<Vec<_>>().join("\n")
}

fn message(text: &str) -> String {
    match parse(text) {
        Ok(spec) => panic!("accepted: {spec:?}"),
        Err(error) => error.render(),
    }
}

/// Returns the names of a module's inputs.
fn names(module: &Module) -> Vec<&str> {
    let inputs = module.inputs.iter().flatten();
    inputs.map(|input| input.name.as_str()).collect()
}

/// Returns the names of a module's buckets.
fn buckets(module: &Module) -> String {
    let names = module
        .buckets
        .iter()
        .map(precast_store::record::bucket_name);
    names.collect::<Vec<_>>().join(", ")
}

#[test]
fn a_whole_spec_is_read() {
    let spec = parse(GOOD).unwrap();
    assert_eq!(spec.root, Path::new("."));
    assert_eq!(spec.file, Path::new("precast.toml"));
    assert_eq!(spec.model.weights, WeightsFrom::Auto);
    let target = (spec.target.device, spec.target.isa.as_str());
    assert_eq!(target, (DeviceKind::Cpu, "native"));
    let module = &spec.modules[0];
    let in_call_order = ["input_ids", "attention_mask"];
    assert_eq!(names(module), in_call_order);
    assert_eq!((&*module.path, &*module.method), ("", "forward"));
    assert_eq!(
        (module.gate.rtol, module.gate.atol),
        (Some(1e-4), Some(1e-5))
    );
    let all = "batch=1 seq=32, batch=1 seq=128, batch=8 seq=32, batch=8 seq=128";
    assert_eq!(buckets(module), all);
    let settings = spec.settings(module, &Overrides::default(), &Overrides::default());
    assert_eq!(settings.compile.mode, Mode::MaxAutotune);
    assert_eq!(settings.origin("mode"), Origin::Module);
    assert_eq!(settings.origin("options.triton.cudagraphs"), Origin::Spec);
}

#[test]
fn inputs_get_the_sizes_of_a_bucket() {
    let spec = parse(GOOD).unwrap();
    let module = &spec.modules[0];
    let inputs = module.sized_inputs(&module.buckets[3]).unwrap();
    insta::assert_snapshot!(serde_json::to_string(&inputs[0]).unwrap(), @r#"{"name":"input_ids","dtype":"int64","shape":[8,128],"stride":[128,1],"dims":["batch","seq"],"pad":1,"range":[0,30522]}"#);
    assert_eq!(contiguous(&[2, 3, 4]), [12, 4, 1]);
    assert_eq!(contiguous(&[]), [0; 0]);
}

#[test]
fn inputs_written_as_tables_keep_their_order() {
    let text = GOOD.replace(
        "attention_mask = { dtype = \"int64\", shape = [\"batch\", \"seq\"] }\n",
        "[module.inputs.b]\ndtype = \"float32\"\nshape = [\"batch\"]\n[module.inputs.a]\ndtype = \"bool\"\nshape = []\n",
    );
    let spec = parse(&text).unwrap();
    assert_eq!(names(&spec.modules[0]), ["input_ids", "b", "a"]);
}

#[test]
fn a_module_without_bucketed_dimensions_has_one_bucket() {
    let text = "schema = 1\nmodel = { name = \"m\", entry = \"m:f\" }\n[[module]]\nname = \"f\"\n";
    let spec = parse(text).unwrap();
    assert_eq!(spec.modules[0].buckets, [Sizes::new()]);
    assert_eq!(spec.modules[0].inputs, None);
    assert_eq!(spec.modules[0].sized_inputs(&Sizes::new()), None);
}

#[test]
fn points_are_sorted_and_options_of_a_group_are_dotted() {
    let text = GOOD.replace(
        "seq = [128, 32]\nbatch = [8, 1]",
        "points = [{ seq = 9, batch = 2 }, { batch = 1, seq = 99 }]",
    );
    let text = text.replace(
        "\"triton.cudagraphs\" = false",
        "triton = { cudagraphs = false }, table = { b = 1, a = 2 }",
    );
    let spec = parse(&text).unwrap();
    assert_eq!(buckets(&spec.modules[0]), "batch=1 seq=99, batch=2 seq=9");
    let options = serde_json::to_string(&spec.compile.options).unwrap();
    let dotted = r#"{"epilogue_fusion":true,"table":{"a":2,"b":1},"triton.cudagraphs":false}"#;
    assert_eq!(options, dotted);
}

#[test]
fn dynamic_is_a_switch_or_a_table() {
    let with = |value: &str| {
        let spec = parse(&GOOD.replace("mode = \"default\"", value));
        spec.unwrap().compile.dynamic.unwrap()
    };
    assert_eq!(with("dynamic = true"), Dynamic::All(true));
    let dims = [("seq".to_owned(), Bounds { min: 1, max: 512 })];
    let table = with("dynamic.seq = { min = 1, max = 512 }");
    assert_eq!(table, Dynamic::Dims(dims.into()));
}

#[test]
fn variants_share_a_name_and_twins_do_not() {
    let variant = "[[module]]\nname = \"encode\"\n[module.inputs]\nimage = { dtype = \"uint8\", shape = [3] }\n";
    assert_eq!(parse(&format!("{GOOD}{variant}")).unwrap().modules.len(), 2);
    insta::assert_snapshot!(message(&format!("{GOOD}[[module]]\nname = \"encode\"\n")), @r"
    error: a second module is named `encode` and can't be told from the one in line 14
      --> precast.toml:27:1
       |
    27 | [[module]]
       | ^^^^^^^^^^
       = help: rename it, or give both `inputs`, of other names: dispatch picks by them
    ");
    let again = message(&format!("{GOOD}{variant}{variant}"));
    assert!(
        again.contains(" can't be told from the one in line 27\n  --> precast.toml:31:1\n"),
        "{again}"
    );
}

#[test]
fn every_problem_is_reported_at_once_and_the_first_in_one_line() {
    let text = GOOD
        .replace("mode =", "modee =")
        .replace("int64", "int65")
        .replace("model:load", "load");
    let error = parse(&text).unwrap_err();
    insta::assert_snapshot!(error, @"precast.toml:5:9: `entry` in [model] must be `module:callable`, not `load` (and 4 more)");
    let SpecError::Invalid(problems) = error else {
        panic!("{error}")
    };
    assert_eq!(problems.len(), 5, "{problems:#?}");
}

#[test]
fn files_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("precast.toml");
    assert!(matches!(Spec::load(&file), Err(SpecError::Read { .. })));
    std::fs::write(&file, b"schema = 1\n\xff").unwrap();
    let error = Spec::load(&file).unwrap_err();
    assert!(matches!(error, SpecError::NotText { offset: 11, .. }));
    let text = GOOD.replace("[target]", "weights = \"w.safetensors\"\n[target]");
    std::fs::write(&file, text).unwrap();
    let spec = Spec::load(&file).unwrap();
    assert_eq!(spec.root, folder.path());
    let weights = folder.path().join("w.safetensors");
    assert_eq!(spec.model.weights, WeightsFrom::File(weights));
}

mod mutated {
    use proptest::prelude::*;

    use super::*;

    /// Text that is likely to reach deep: tokens of specs, not only noise.
    fn token() -> impl Strategy<Value = String> {
        let words = "[ ] { } = , . ' # - 1 0 9223372036854775807 1e999 nan true points inputs buckets dynamic options shape pad \
                     range int8 bool min max seq batch [[module]] [compile] \u{feff} é \0";
        let words = words.split(' ').chain(["\n", "\"", "\t", "schema = 1"]);
        let words: Vec<String> = words.map(str::to_owned).collect();
        prop_oneof![4 => prop::sample::select(words), 1 => ".{0,6}"]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn text_never_panics(edits in prop::collection::vec((any::<prop::sample::Index>(), 0..30_usize, token()), 1..6)) {
            let mut text: Vec<char> = GOOD.chars().collect();
            for (at, len, token) in edits {
                let start = at.index(text.len() + 1);
                let end = (start + len).min(text.len());
                text.splice(start..end, token.chars());
            }
            let text: String = text.into_iter().collect();
            match parse(&text) {
                Ok(spec) => for module in &spec.modules {
                    prop_assert!(!module.buckets.is_empty());
                    for sizes in &module.buckets {
                        module.sized_inputs(sizes);
                    }
                },
                Err(error) => {
                    prop_assert!(error.render().starts_with("error: "));
                    let SpecError::Invalid(problems) = error else { panic!("{error}") };
                    prop_assert!(!problems.is_empty());
                }
            }
        }
    }
}

#[test]
fn a_file_that_is_no_spec_by_its_size_is_not_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(300 << 20).unwrap();
    let error = Spec::load(file.path()).unwrap_err();
    let name = file.path().display();
    assert_eq!(
        error.to_string(),
        format!("the spec `{name}` has more than 1048576 bytes")
    );
    assert!(error.render().contains("= help: no spec is as long"));
}

#[test]
fn of_a_thousand_mistakes_only_the_first_are_reported() {
    let text: String = (0..50_000).map(|n| format!("k{n} = 1\n")).collect();
    let started = std::time::Instant::now();
    let Err(SpecError::Invalid(problems)) = Spec::parse(&text, Path::new("precast.toml")) else {
        panic!("it is no spec");
    };
    assert_eq!(problems.len(), 100);
    assert!(started.elapsed().as_secs() < 20);
}
