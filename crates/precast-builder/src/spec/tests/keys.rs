//! Problems of keys, types, words and names.

use super::{GOOD, brief, brief_of, broken, parse};

#[test]
fn unknown_keys() {
    insta::assert_snapshot!(brief("mode = \"default\"", "modee = \"default\""), @"11:1+5 unknown key `modee` in [compile] = did you mean `mode`?");
    insta::assert_snapshot!(brief("mode = \"default\"", "zzz = 1"), @"11:1+3 unknown key `zzz` in [compile] = known keys: `enabled`, `backend`, `mode`, `dynamic`, `fullgraph`, `passes`, `allowlist`, `blocklist`, `healthcheck`, `smoketest_steps`, `fail_policy`, `options`");
    insta::assert_snapshot!(brief("name = \"minilm\"", "name = \"minilm\"\ndevice = \"cuda\""), @"5:1+6 unknown key `device` in [model] = `device` belongs in [target]");
    insta::assert_snapshot!(brief("pad = 1", "padd = 1"), @"19:58+4 unknown key `padd` in input `input_ids` = did you mean `pad`?");
    insta::assert_snapshot!(brief("[compile]", "[compiler]"), @"10:2+8 unknown key `compiler` in the spec = did you mean `compile`?");
    insta::assert_snapshot!(brief("mode = \"max-autotune\"", "compile = {}"), @"17:1+7 unknown key `compile` in [[module]] = `compile` belongs in [[module]], key by key: write `mode = …` here");
}

#[test]
fn wrong_types_and_words() {
    insta::assert_snapshot!(brief("mode = \"default\"", "mode = 3"), @"11:8+1 `mode` in [compile] must be a string, not an integer = text stands in quotes");
    insta::assert_snapshot!(brief("mode = \"default\"", "mode = \"max-autotun\""), @"11:8+13 unknown mode `max-autotun` = did you mean `max-autotune`? known: `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`");
    insta::assert_snapshot!(brief("epilogue_fusion = true", "attention = \"efficent\""), @"12:54+10 unknown attention `efficent` = did you mean `efficient`? known: `auto`, `flash`, `efficient`, `cudnn`, `math`");
    insta::assert_snapshot!(brief("epilogue_fusion = true", "attention = true"), @"12:54+4 `attention` in `options` in [compile] must be a string, not a boolean = text stands in quotes");
    insta::assert_snapshot!(brief("epilogue_fusion = true", "attention = \"one_tile\", matmul = \"split_k\""), @r#"
    12:42+9 option `attention = "one_tile"` is a graph pass now = install `precast-kernels` and write `passes = ["precast_kernels:single_tile_attention"]` beside `options`
    12:66+6 option `matmul` is a graph pass now = install `precast-kernels` and write `passes = ["precast_kernels:split_k"]` beside `options`
    "#);
    insta::assert_snapshot!(brief("device = \"cpu\"", "device = \"tpu\"\nisa = \"sse\""), @"
    8:10+5 unknown device `tpu` = did you mean `cpu`? known: `cpu`, `cuda`
    9:7+5 unknown isa `sse` = known: `native`, `x86-64-v2`, `x86-64-v3`, `x86-64-v4`
    ");
    insta::assert_snapshot!(brief("\"int64\", shape = [\"batch\", \"seq\"], pad", "\"long\", shape = [\"batch\", \"seq\"], pad"), @"19:23+6 unknown dtype `long` = known: `float32`, `float64`, `float16`, `bfloat16`, `int64`, `int32`, `int16`, `int8`, `uint8`, `bool`");
    insta::assert_snapshot!(brief("[[module]]", "[module]"), @"14:1+8 `module` is one table, not a list = write `[[module]]`");
    insta::assert_snapshot!(brief("mode = \"default\"", "enabled = \"yes\"\nsmoketest_steps = -1\npasses = \"p:q\"\ndynamic = 1"), @r#"
    11:11+5 `enabled` in [compile] must be true or false, not a string = write `true` or `false`, without quotes
    12:19+2 `smoketest_steps` in [compile] must be between 0 and 1000, not -1 = 3 is what is taken without it
    13:10+5 `passes` in [compile] must be an array of strings, not a string = put it in brackets, as in `[1, 8]` or `["a", "b"]`
    14:11+1 `dynamic` in [compile] must be a boolean or a table = write true, false, or dimensions with their sizes: `{ seq = { min = 1, max = 512 } }`
    "#);
    insta::assert_snapshot!(brief("epilogue_fusion = true", "when = 1979-05-27, big = 9223372036854775808, x = nan"), @"
    12:49+10 `when` in `options` in [compile] must be a string, a number, true, false, an array or a table, not a date or time = write it as text, in quotes
    12:67+19 `big` in `options` in [compile] does not fit 64 bits = write a smaller number
    12:92+3 `x` in `options` in [compile] must be a finite number = write a smaller number
    ");
}

#[test]
fn missing_keys() {
    insta::assert_snapshot!(brief_of(""), @"
    1:1+1 missing key `schema` in the spec = add `schema = 1`
    1:1+1 missing key `model` in the spec = add `[model]`
    1:1+1 missing key `module` in the spec = add `[[module]]`
    ");
    insta::assert_snapshot!(brief_of("schema = 1\nmodule = []\n[model]\n"), @r#"
    2:10+2 the spec has no module = add `[[module]]`
    3:1+7 missing key `name` in [model] = add `name = "my-model"`
    3:1+7 missing key `entry` in [model] = add `entry = "model:load"`
    "#);
    insta::assert_snapshot!(brief("dtype = \"int64\", ", ""), @r#"19:13+57 missing key `dtype` in input `input_ids` = add `dtype = "float32"`"#);
}

#[test]
fn schema_of_another_version() {
    insta::assert_snapshot!(broken("schema = 1", "schema = 2"), @r"
    error: unknown schema 2
     --> precast.toml:1:10
      |
    1 | schema = 2
      |          ^
      = help: this `precast` reads schema 1
    ");
}

#[test]
fn names_entries_and_paths() {
    insta::assert_snapshot!(brief("\"model:load\"", "\"src/model.py:load\""), @"5:9+19 `entry` in [model] must be `module:callable`, not `src/model.py:load` = write `src.model:load`");
    insta::assert_snapshot!(brief("\"model:load\"", "\"model.load\"\nweights = \"w.bin\"\nsamples = \"a:b:c\""), @"
    5:9+12 `entry` in [model] must be `module:callable`, not `model.load` = write `model:load` for the function `load` in `model.py`
    6:11+7 `w.bin` is not a weight set = write `auto`, or the path of a `.safetensors` file, of a `.safetensors.index.json`, or of their folder
    7:11+7 `samples` in [model] must be `module:callable`, not `a:b:c` = write `model:load` for the function `load` in `model.py`
    ");
    insta::assert_snapshot!(brief("\"encode\"", "\"en code\"\npath = \"a..b\"\nmethod = \"f()\""), @"
    15:8+9 `name` in [[module]] is not a name = a name has 1 to 100 letters, digits, `_`, `-` or `.`, and starts with none of the last two
    16:8+6 `a..b` is not the name of a submodule = write it as `named_modules()` does: `encoder.layer.0`
    17:10+5 `f()` is not the name of a method = write the name alone, as `encode_text`
    ");
}

#[test]
fn checkpoints_in_several_files() {
    let weights = |name: &str| format!("\"model:load\"\nweights = \"{name}\"");
    let one = weights("model-00002-of-00003.safetensors");
    let one = brief("\"model:load\"", &one);
    assert!(
        one.contains("is one file of a checkpoint in several"),
        "{one}"
    );
    let all = "model-00001-of-00001.safetensors one-of-many.safetensors big/model.safetensors.index.json llama-3.1 ..";
    for whole in all.split(' ') {
        parse(&GOOD.replacen("\"model:load\"", &weights(whole), 1)).unwrap();
    }
}

#[test]
fn globs() {
    insta::assert_snapshot!(brief("[\"encoder.layer.*\"]", "[\"encoder..x\"]\nblocklist = [\"a[0]\"]"), @"
    16:12+12 the glob `encoder..x` has an empty component = `*` is one component of a name, `**` any number of them, as in `encoder.layer.*`
    17:14+6 the glob `a[0]` has the character `[` = `*` is one component of a name, `**` any number of them, as in `encoder.layer.*`
    ");
}

#[test]
fn options_that_are_ours() {
    insta::assert_snapshot!(brief("epilogue_fusion = true", "aot_inductor.package_constants_in_so = true"), @"12:55+23 option `aot_inductor.package_constants_in_so` is precast's own and can't be set = leave it out");
    insta::assert_snapshot!(brief("epilogue_fusion = true", "triton.cudagraphs = true"), @"12:49+10 option `triton.cudagraphs` is set twice = leave one of them out");
}

#[test]
fn tolerances() {
    insta::assert_snapshot!(brief("rtol = 1e-4", "rtol = -1\nttol = 1"), @"
    25:8+2 `rtol` in [module.gate] must not be negative = 0 asks for equal numbers
    26:1+4 unknown key `ttol` in [module.gate] = did you mean `atol`?
    ");
}

#[test]
fn broken_toml() {
    insta::assert_snapshot!(brief("[compile]", "[compile\nx = \n"), @"10:9+1 invalid TOML: unclosed table, expected `]` = this is no TOML: strings are in quotes, tables are under `[name]`");
    insta::assert_snapshot!(brief("device = \"cpu\"", "device = \"cpu\"\ndevice = \"cuda\""), @"9:1+6 invalid TOML: duplicate key = this is no TOML: strings are in quotes, tables are under `[name]`");
}
