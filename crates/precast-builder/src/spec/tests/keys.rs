//! Problems of keys, types, words and names.

use std::path::Path;

use super::{super::Spec, GOOD, broken, message};

#[test]
fn unknown_keys() {
    insta::assert_snapshot!(broken("mode = \"default\"", "modee = \"default\""), @r#"
    error: unknown key `modee` in [compile]
      --> precast.toml:11:1
       |
    11 | modee = "default"
       | ^^^^^
       = help: did you mean `mode`?
    "#);
    insta::assert_snapshot!(broken("mode = \"default\"", "zzz = 1"), @r"
    error: unknown key `zzz` in [compile]
      --> precast.toml:11:1
       |
    11 | zzz = 1
       | ^^^
       = help: known keys: `enabled`, `backend`, `mode`, `dynamic`, `fullgraph`, `passes`, `allowlist`, `blocklist`, `healthcheck`, `smoketest_steps`, `fail_policy`, `options`
    ");
    insta::assert_snapshot!(broken("name = \"minilm\"", "name = \"minilm\"\ndevice = \"cuda\""), @r#"
    error: unknown key `device` in [model]
     --> precast.toml:5:1
      |
    5 | device = "cuda"
      | ^^^^^^
      = help: `device` belongs in [target]
    "#);
    insta::assert_snapshot!(broken("pad = 1", "padd = 1"), @r#"
    error: unknown key `padd` in input `input_ids`
      --> precast.toml:19:58
       |
    19 | input_ids = { dtype = "int64", shape = ["batch", "seq"], padd = 1, range = [0, 30522] }
       |                                                          ^^^^
       = help: did you mean `pad`?
    "#);
    insta::assert_snapshot!(broken("[compile]", "[compiler]"), @r"
    error: unknown key `compiler` in the spec
      --> precast.toml:10:2
       |
    10 | [compiler]
       |  ^^^^^^^^
       = help: did you mean `compile`?
    ");
    insta::assert_snapshot!(broken("mode = \"max-autotune\"", "compile = {}"), @r"
    error: unknown key `compile` in [[module]]
      --> precast.toml:17:1
       |
    17 | compile = {}
       | ^^^^^^^
       = help: `compile` belongs in [[module]], key by key: write `mode = …` here
    ");
}

#[test]
fn wrong_types_and_words() {
    insta::assert_snapshot!(broken("mode = \"default\"", "mode = 3"), @"
    error: `mode` in [compile] must be a string, not an integer
      --> precast.toml:11:8
       |
    11 | mode = 3
       |        ^
       = help: text stands in quotes
    ");
    insta::assert_snapshot!(broken("mode = \"default\"", "mode = \"max-autotun\""), @r#"
    error: unknown mode `max-autotun`
      --> precast.toml:11:8
       |
    11 | mode = "max-autotun"
       |        ^^^^^^^^^^^^^
       = help: did you mean `max-autotune`? known: `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`
    "#);
    insta::assert_snapshot!(broken("epilogue_fusion = true", "attention = \"efficent\""), @r#"
    error: unknown attention `efficent`
      --> precast.toml:12:54
       |
    12 | options = { "triton.cudagraphs" = false, attention = "efficent" }
       |                                                      ^^^^^^^^^^
       = help: did you mean `efficient`? known: `auto`, `flash`, `efficient`, `cudnn`, `math`
    "#);
    insta::assert_snapshot!(broken("epilogue_fusion = true", "attention = true"), @r#"
    error: `attention` in `options` in [compile] must be a string, not a boolean
      --> precast.toml:12:54
       |
    12 | options = { "triton.cudagraphs" = false, attention = true }
       |                                                      ^^^^
       = help: text stands in quotes
    "#);
    insta::assert_snapshot!(broken("epilogue_fusion = true", "attention = \"one_tile\", matmul = \"split_k\""), @r#"
    error: option `attention = "one_tile"` is a graph pass now
      --> precast.toml:12:42
       |
    12 | options = { "triton.cudagraphs" = false, attention = "one_tile", matmul = "split_k" }
       |                                          ^^^^^^^^^
       = help: install `precast-kernels` and write `passes = ["precast_kernels:single_tile_attention"]` beside `options`

    error: option `matmul` is a graph pass now
      --> precast.toml:12:66
       |
    12 | options = { "triton.cudagraphs" = false, attention = "one_tile", matmul = "split_k" }
       |                                                                  ^^^^^^
       = help: install `precast-kernels` and write `passes = ["precast_kernels:split_k"]` beside `options`
    "#);
    insta::assert_snapshot!(broken("device = \"cpu\"", "device = \"tpu\"\nisa = \"sse\""), @r#"
    error: unknown device `tpu`
     --> precast.toml:8:10
      |
    8 | device = "tpu"
      |          ^^^^^
      = help: did you mean `cpu`? known: `cpu`, `cuda`

    error: unknown isa `sse`
     --> precast.toml:9:7
      |
    9 | isa = "sse"
      |       ^^^^^
      = help: known: `native`, `x86-64-v2`, `x86-64-v3`, `x86-64-v4`
    "#);
    insta::assert_snapshot!(broken("\"int64\", shape = [\"batch\", \"seq\"], pad", "\"long\", shape = [\"batch\", \"seq\"], pad"), @r#"
    error: unknown dtype `long`
      --> precast.toml:19:23
       |
    19 | input_ids = { dtype = "long", shape = ["batch", "seq"], pad = 1, range = [0, 30522] }
       |                       ^^^^^^
       = help: known: `float32`, `float64`, `float16`, `bfloat16`, `int64`, `int32`, `int16`, `int8`, `uint8`, `bool`
    "#);
    insta::assert_snapshot!(broken("[[module]]", "[module]"), @r"
    error: `module` is one table, not a list
      --> precast.toml:14:1
       |
    14 | [module]
       | ^^^^^^^^
       = help: write `[[module]]`
    ");
    insta::assert_snapshot!(broken("mode = \"default\"", "enabled = \"yes\"\nsmoketest_steps = -1\npasses = \"p:q\"\ndynamic = 1"), @r#"
    error: `enabled` in [compile] must be true or false, not a string
      --> precast.toml:11:11
       |
    11 | enabled = "yes"
       |           ^^^^^
       = help: write `true` or `false`, without quotes

    error: `smoketest_steps` in [compile] must be between 0 and 1000, not -1
      --> precast.toml:12:19
       |
    12 | smoketest_steps = -1
       |                   ^^
       = help: 3 is what is taken without it

    error: `passes` in [compile] must be an array of strings, not a string
      --> precast.toml:13:10
       |
    13 | passes = "p:q"
       |          ^^^^^
       = help: put it in brackets, as in `[1, 8]` or `["a", "b"]`

    error: `dynamic` in [compile] must be a boolean or a table
      --> precast.toml:14:11
       |
    14 | dynamic = 1
       |           ^
       = help: write true, false, or dimensions with their sizes: `{ seq = { min = 1, max = 512 } }`
    "#);
    insta::assert_snapshot!(broken("epilogue_fusion = true", "when = 1979-05-27, big = 9223372036854775808, x = nan"), @r#"
    error: `when` in `options` in [compile] must be a string, a number, true, false, an array or a table, not a date or time
      --> precast.toml:12:49
       |
    12 | options = { "triton.cudagraphs" = false, when = 1979-05-27, big = 9223372036854775808, x = nan }
       |                                                 ^^^^^^^^^^
       = help: write it as text, in quotes

    error: `big` in `options` in [compile] does not fit 64 bits
      --> precast.toml:12:67
       |
    12 | options = { "triton.cudagraphs" = false, when = 1979-05-27, big = 9223372036854775808, x = nan }
       |                                                                   ^^^^^^^^^^^^^^^^^^^
       = help: write a smaller number

    error: `x` in `options` in [compile] must be a finite number
      --> precast.toml:12:92
       |
    12 | options = { "triton.cudagraphs" = false, when = 1979-05-27, big = 9223372036854775808, x = nan }
       |                                                                                            ^^^
       = help: write a smaller number
    "#);
}

#[test]
fn missing_keys() {
    insta::assert_snapshot!(message(""), @r"
    error: missing key `schema` in the spec
     --> precast.toml:1:1
      |
    1 |
      | ^
      = help: add `schema = 1`

    error: missing key `model` in the spec
     --> precast.toml:1:1
      |
    1 |
      | ^
      = help: add `[model]`

    error: missing key `module` in the spec
     --> precast.toml:1:1
      |
    1 |
      | ^
      = help: add `[[module]]`
    ");
    insta::assert_snapshot!(message("schema = 1\nmodule = []\n[model]\n"), @r#"
    error: the spec has no module
     --> precast.toml:2:10
      |
    2 | module = []
      |          ^^
      = help: add `[[module]]`

    error: missing key `name` in [model]
     --> precast.toml:3:1
      |
    3 | [model]
      | ^^^^^^^
      = help: add `name = "my-model"`

    error: missing key `entry` in [model]
     --> precast.toml:3:1
      |
    3 | [model]
      | ^^^^^^^
      = help: add `entry = "model:load"`
    "#);
    insta::assert_snapshot!(broken("dtype = \"int64\", ", ""), @r#"
    error: missing key `dtype` in input `input_ids`
      --> precast.toml:19:13
       |
    19 | input_ids = { shape = ["batch", "seq"], pad = 1, range = [0, 30522] }
       |             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
       = help: add `dtype = "float32"`
    "#);
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
    insta::assert_snapshot!(broken("\"model:load\"", "\"src/model.py:load\""), @r#"
    error: `entry` in [model] must be `module:callable`, not `src/model.py:load`
     --> precast.toml:5:9
      |
    5 | entry = "src/model.py:load"
      |         ^^^^^^^^^^^^^^^^^^^
      = help: write `src.model:load`
    "#);
    insta::assert_snapshot!(broken("\"model:load\"", "\"model.load\"\nweights = \"w.bin\"\nsamples = \"a:b:c\""), @r#"
    error: `entry` in [model] must be `module:callable`, not `model.load`
     --> precast.toml:5:9
      |
    5 | entry = "model.load"
      |         ^^^^^^^^^^^^
      = help: write `model:load` for the function `load` in `model.py`

    error: `w.bin` is not a weight set
     --> precast.toml:6:11
      |
    6 | weights = "w.bin"
      |           ^^^^^^^
      = help: write `auto` or the path of a `.safetensors` file

    error: `samples` in [model] must be `module:callable`, not `a:b:c`
     --> precast.toml:7:11
      |
    7 | samples = "a:b:c"
      |           ^^^^^^^
      = help: write `model:load` for the function `load` in `model.py`
    "#);
    insta::assert_snapshot!(broken("\"encode\"", "\"en code\"\npath = \"a..b\"\nmethod = \"f()\""), @r#"
    error: `name` in [[module]] is not a name
      --> precast.toml:15:8
       |
    15 | name = "en code"
       |        ^^^^^^^^^
       = help: a name has 1 to 100 letters, digits, `_`, `-` or `.`, and starts with none of the last two

    error: `a..b` is not the name of a submodule
      --> precast.toml:16:8
       |
    16 | path = "a..b"
       |        ^^^^^^
       = help: write it as `named_modules()` does: `encoder.layer.0`

    error: `f()` is not the name of a method
      --> precast.toml:17:10
       |
    17 | method = "f()"
       |          ^^^^^
       = help: write the name alone, as `encode_text`
    "#);
}

#[test]
fn checkpoints_in_several_files() {
    let weights = |name: &str| {
        broken(
            "\"model:load\"",
            &format!("\"model:load\"\nweights = \"{name}\""),
        )
    };
    insta::assert_snapshot!(weights("big/model.safetensors.index.json"), @r#"
    error: `big/model.safetensors.index.json` is the index of a checkpoint in several files
     --> precast.toml:6:11
      |
    6 | weights = "big/model.safetensors.index.json"
      |           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      = help: several files are loaded by the entry, as `from_pretrained` does, with `weights = "auto"`; or make one file of them: `safetensors.torch.save_model(model, "model.safetensors")`
    "#);
    let said = weights("model-00002-of-00003.safetensors");
    assert!(
        said.contains("is one file of a checkpoint in several"),
        "{said}"
    );
    for whole in [
        "model-00001-of-00001.safetensors",
        "one-of-many.safetensors",
    ] {
        assert!(
            Spec::parse(
                &GOOD.replacen(
                    "\"model:load\"",
                    &format!("\"model:load\"\nweights = \"{whole}\""),
                    1
                ),
                Path::new("p.toml")
            )
            .is_ok()
        );
    }
}

#[test]
fn globs() {
    insta::assert_snapshot!(broken("[\"encoder.layer.*\"]", "[\"encoder..x\"]\nblocklist = [\"a[0]\"]"), @r#"
    error: the glob `encoder..x` has an empty component
      --> precast.toml:16:12
       |
    16 | regions = ["encoder..x"]
       |            ^^^^^^^^^^^^
       = help: `*` is one component of a name, `**` any number of them, as in `encoder.layer.*`

    error: the glob `a[0]` has the character `[`
      --> precast.toml:17:14
       |
    17 | blocklist = ["a[0]"]
       |              ^^^^^^
       = help: `*` is one component of a name, `**` any number of them, as in `encoder.layer.*`
    "#);
}

#[test]
fn options_that_are_ours() {
    insta::assert_snapshot!(broken("epilogue_fusion = true", "aot_inductor.package_constants_in_so = true"), @r#"
    error: option `aot_inductor.package_constants_in_so` is precast's own and can't be set
      --> precast.toml:12:55
       |
    12 | options = { "triton.cudagraphs" = false, aot_inductor.package_constants_in_so = true }
       |                                                       ^^^^^^^^^^^^^^^^^^^^^^^
       = help: leave it out
    "#);
    insta::assert_snapshot!(broken("epilogue_fusion = true", "triton.cudagraphs = true"), @r#"
    error: option `triton.cudagraphs` is set twice
      --> precast.toml:12:49
       |
    12 | options = { "triton.cudagraphs" = false, triton.cudagraphs = true }
       |                                                 ^^^^^^^^^^
       = help: leave one of them out
    "#);
}

#[test]
fn tolerances() {
    insta::assert_snapshot!(broken("rtol = 1e-4", "rtol = -1\nttol = 1"), @"
    error: `rtol` in [module.gate] must not be negative
      --> precast.toml:25:8
       |
    25 | rtol = -1
       |        ^^
       = help: 0 asks for equal numbers

    error: unknown key `ttol` in [module.gate]
      --> precast.toml:26:1
       |
    26 | ttol = 1
       | ^^^^
       = help: did you mean `atol`?
    ");
}

#[test]
fn broken_toml() {
    insta::assert_snapshot!(broken("[compile]", "[compile\nx = \n"), @"
    error: invalid TOML: unclosed table, expected `]`
      --> precast.toml:10:9
       |
    10 | [compile
       |         ^
       = help: this is no TOML: strings are in quotes, tables are under `[name]`
    ");
    insta::assert_snapshot!(broken("device = \"cpu\"", "device = \"cpu\"\ndevice = \"cuda\""), @r#"
    error: invalid TOML: duplicate key
     --> precast.toml:9:1
      |
    9 | device = "cuda"
      | ^^^^^^
      = help: this is no TOML: strings are in quotes, tables are under `[name]`
    "#);
}
