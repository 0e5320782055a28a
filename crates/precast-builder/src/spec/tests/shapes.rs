//! Problems of buckets, shapes, padding and dimensions.

use super::{broken, message};

#[test]
fn buckets_and_dimensions() {
    insta::assert_snapshot!(broken("seq = [128, 32]", "seq = []"), @"
    error: `seq` in [module.buckets] has no size, which leaves no bucket
      --> precast.toml:22:7
       |
    22 | seq = []
       |       ^^
       = help: as in `seq = [1, 8]`
    ");
    insta::assert_snapshot!(broken("seq = [128, 32]", "seq = [32, 0, 32]"), @"
    error: each item of `seq` in [module.buckets] must be at least 1, not 0
      --> precast.toml:22:12
       |
    22 | seq = [32, 0, 32]
       |            ^
       = help: a bucket of no size computes nothing

    error: size 32 is twice in `seq` in [module.buckets]
      --> precast.toml:22:15
       |
    22 | seq = [32, 0, 32]
       |               ^^
       = help: leave one of them out
    ");
    insta::assert_snapshot!(broken("seq = [128, 32]\n", ""), @r#"
    error: dimension `seq` of input `input_ids` has no buckets
      --> precast.toml:19:50
       |
    19 | input_ids = { dtype = "int64", shape = ["batch", "seq"], pad = 1, range = [0, 30522] }
       |                                                  ^^^^^
       = help: add `seq = [1, 8]` to [module.buckets], or write its size
    "#);
    insta::assert_snapshot!(broken("seq = [128, 32]", "seq = [32]\nimage = [1]"), @r#"
    error: no input has the dimension `image`
      --> precast.toml:23:1
       |
    23 | image = [1]
       | ^^^^^
       = help: a `shape` in [module.inputs] uses it, as `shape = ["batch", 3]`
    "#);
    insta::assert_snapshot!(broken("seq = [128, 32]", "points = [{ batch = 1, seq = 2 }]"), @r"
    error: `batch` stands beside `points` in [module.buckets]
      --> precast.toml:23:1
       |
    23 | batch = [8, 1]
       | ^^^^^
       = help: give a grid or points, not both
    ");
    insta::assert_snapshot!(
        broken("seq = [128, 32]\nbatch = [8, 1]", "points = [{ batch = 1, seq = 2 }, { batch = 1 }, { seq = 2, batch = 1 }]"),
        @"
    error: this point has other dimensions than the first one, `batch seq`
      --> precast.toml:22:35
       |
    22 | points = [{ batch = 1, seq = 2 }, { batch = 1 }, { seq = 2, batch = 1 }]
       |                                   ^^^^^^^^^^^^^
       = help: give each point a size for every dimension

    error: the bucket batch=1 seq=2 is listed twice
      --> precast.toml:22:50
       |
    22 | points = [{ batch = 1, seq = 2 }, { batch = 1 }, { seq = 2, batch = 1 }]
       |                                                  ^^^^^^^^^^^^^^^^^^^^^^
       = help: leave one of them out
    "
    );
    insta::assert_snapshot!(broken("seq = [128, 32]\nbatch = [8, 1]", "points = []"), @"
    error: `points` in [module.buckets] is empty, which leaves no bucket
      --> precast.toml:22:10
       |
    22 | points = []
       |          ^^
       = help: as in `points = [{ batch = 1, seq = 512 }]`
    ");
    let many: Vec<String> = (1..=101).map(|size| size.to_string()).collect();
    let many = format!("seq = [{0}]\nbatch = [{0}]", many.join(","));
    insta::assert_snapshot!(broken("seq = [128, 32]\nbatch = [8, 1]", &many), @r"
    error: the grid has 10201 buckets, more than 10000
      --> precast.toml:21:1
       |
    21 | [module.buckets]
       | ^^^^^^^^^^^^^^^^
       = help: list the ones that are needed as `points`
    ");
    insta::assert_snapshot!(broken("seq = [128, 32]", "seq = [4611686018427387904]"), @"
    error: input `input_ids` is larger than memory can be at batch=1 seq=4611686018427387904
      --> precast.toml:21:1
       |
    21 | [module.buckets]
       | ^^^^^^^^^^^^^^^^
       = help: take out the sizes that are too large

    error: input `attention_mask` is larger than memory can be at batch=1 seq=4611686018427387904
      --> precast.toml:21:1
       |
    21 | [module.buckets]
       | ^^^^^^^^^^^^^^^^
       = help: take out the sizes that are too large
    ");
}

#[test]
fn shapes() {
    insta::assert_snapshot!(broken("[\"batch\", \"seq\"], pad", "[\"batch\", \"seq+1\", 0, 1.5], pad"), @r#"
    error: each item of `shape` in input `input_ids` must be a size or the name of a dimension
      --> precast.toml:19:50
       |
    19 | input_ids = { dtype = "int64", shape = ["batch", "seq+1", 0, 1.5], pad = 1, range = [0, 30522] }
       |                                                  ^^^^^^^
       = help: as in `shape = ["batch", 3, 224, 224]`

    error: each item of `shape` in input `input_ids` must be at least 1, not 0
      --> precast.toml:19:59
       |
    19 | input_ids = { dtype = "int64", shape = ["batch", "seq+1", 0, 1.5], pad = 1, range = [0, 30522] }
       |                                                           ^
       = help: a bucket of no size computes nothing

    error: each item of `shape` in input `input_ids` must be a size or the name of a dimension
      --> precast.toml:19:62
       |
    19 | input_ids = { dtype = "int64", shape = ["batch", "seq+1", 0, 1.5], pad = 1, range = [0, 30522] }
       |                                                              ^^^
       = help: as in `shape = ["batch", 3, 224, 224]`
    "#);
    insta::assert_snapshot!(message("schema = 1\nmodel = { name = \"m\", entry = \"m:f\" }\nmodule = [{ name = \"f\", inputs = {} }]\n"), @r#"
    error: [module.inputs] names no input
     --> precast.toml:3:34
      |
    3 | module = [{ name = "f", inputs = {} }]
      |                                  ^^
      = help: leave `inputs` out to capture them from sample inputs
    "#);
}

#[test]
fn padding_and_ranges_fit_the_dtype() {
    let input = |rest: &str| {
        broken(
            "{ dtype = \"int64\", shape = [\"batch\", \"seq\"], pad = 1, range = [0, 30522] }",
            rest,
        )
    };
    insta::assert_snapshot!(input("{ dtype = \"uint8\", shape = [\"batch\", \"seq\"], pad = 256 }"), @r#"
    error: `pad` in input `input_ids` does not fit uint8
      --> precast.toml:19:64
       |
    19 | input_ids = { dtype = "uint8", shape = ["batch", "seq"], pad = 256 }
       |                                                                ^^^
       = help: write a value that the dtype has, or give the input another dtype
    "#);
    insta::assert_snapshot!(input("{ dtype = \"int32\", shape = [\"batch\", \"seq\"], pad = 0.5 }"), @r#"
    error: `pad` in input `input_ids` must be an integer, not a float
      --> precast.toml:19:64
       |
    19 | input_ids = { dtype = "int32", shape = ["batch", "seq"], pad = 0.5 }
       |                                                                ^^^
       = help: write its digits, without quotes
    "#);
    insta::assert_snapshot!(input("{ dtype = \"float16\", shape = [\"batch\", \"seq\"], pad = 1e5 }"), @r#"
    error: `pad` in input `input_ids` does not fit float16
      --> precast.toml:19:66
       |
    19 | input_ids = { dtype = "float16", shape = ["batch", "seq"], pad = 1e5 }
       |                                                                  ^^^
       = help: write a value that the dtype has, or give the input another dtype
    "#);
    insta::assert_snapshot!(input("{ dtype = \"float32\", shape = [\"batch\", \"seq\"], pad = -inf }"), @r#"
    error: `pad` in input `input_ids` must be a finite number
      --> precast.toml:19:66
       |
    19 | input_ids = { dtype = "float32", shape = ["batch", "seq"], pad = -inf }
       |                                                                  ^^^^
       = help: write a smaller number
    "#);
    insta::assert_snapshot!(input("{ dtype = \"bool\", shape = [\"batch\", \"seq\"], pad = 1 }"), @r#"
    error: `pad` in input `input_ids` must be true or false, not an integer
      --> precast.toml:19:63
       |
    19 | input_ids = { dtype = "bool", shape = ["batch", "seq"], pad = 1 }
       |                                                               ^
       = help: write `true` or `false`, without quotes
    "#);
    insta::assert_snapshot!(input("{ dtype = \"int8\", shape = [\"batch\", \"seq\"], range = [0, 200] }"), @r#"
    error: `range` in input `input_ids` does not fit int8
      --> precast.toml:19:65
       |
    19 | input_ids = { dtype = "int8", shape = ["batch", "seq"], range = [0, 200] }
       |                                                                 ^^^^^^^^
       = help: write a value that the dtype has, or give the input another dtype
    "#);
    insta::assert_snapshot!(input("{ dtype = \"int8\", shape = [\"batch\", \"seq\"], range = [5, 5] }"), @r#"
    error: `range` in input `input_ids` is empty
      --> precast.toml:19:65
       |
    19 | input_ids = { dtype = "int8", shape = ["batch", "seq"], range = [5, 5] }
       |                                                                 ^^^^^^
       = help: the first value is included, the second is not, as in `range(0, 10)`
    "#);
    insta::assert_snapshot!(input("{ dtype = \"float32\", shape = [\"batch\", \"seq\"], range = [0, 1] }"), @r#"
    error: `range` in input `input_ids` is for integers, and the input is float32
      --> precast.toml:19:68
       |
    19 | input_ids = { dtype = "float32", shape = ["batch", "seq"], range = [0, 1] }
       |                                                                    ^^^^^^
       = help: leave it out
    "#);
}

#[test]
fn dynamic_dimensions_must_exist_and_have_room() {
    let with = |value: &str| broken("mode = \"max-autotune\"", value);
    insta::assert_snapshot!(with("dynamic.sequence = { min = 1, max = 8 }"), @r#"
    error: no input has the dynamic dimension `sequence`
      --> precast.toml:17:1
       |
    17 | dynamic.sequence = { min = 1, max = 8 }
       | ^^^^^^^
       = help: a `shape` in [module.inputs] uses it, as `shape = ["batch", 3]`
    "#);
    insta::assert_snapshot!(with("dynamic = { seq = { min = 8, max = 8 }, batch = { max = 0 } }"), @"
    error: `dynamic.seq` goes from 8 to 8, which leaves nothing dynamic
      --> precast.toml:17:13
       |
    17 | dynamic = { seq = { min = 8, max = 8 }, batch = { max = 0 } }
       |             ^^^
       = help: as in `seq = { min = 2, max = 512 }`

    error: missing key `min` in `dynamic.batch`
      --> precast.toml:17:49
       |
    17 | dynamic = { seq = { min = 8, max = 8 }, batch = { max = 0 } }
       |                                                 ^^^^^^^^^^^
       = help: add `min = 1`

    error: `max` in `dynamic.batch` must be at least 1, not 0
      --> precast.toml:17:57
       |
    17 | dynamic = { seq = { min = 8, max = 8 }, batch = { max = 0 } }
       |                                                         ^
       = help: a bucket of no size computes nothing
    ");
}
