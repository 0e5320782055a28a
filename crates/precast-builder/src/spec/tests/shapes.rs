//! Problems of buckets, shapes, padding and dimensions.

use super::{FirstValue, GOOD, brief, brief_of, parse};

#[test]
fn buckets_and_dimensions() {
    insta::assert_snapshot!(brief("seq = [128, 32]", "seq = []"), @"22:7+2 `seq` in [module.buckets] has no size, which leaves no bucket = as in `seq = [1, 8]`");
    insta::assert_snapshot!(brief("seq = [128, 32]", "seq = [32, 0, 32]"), @"
    22:12+1 each item of `seq` in [module.buckets] must be at least 1, not 0 = a bucket of no size computes nothing
    22:15+2 size 32 is twice in `seq` in [module.buckets] = leave one of them out
    ");
    insta::assert_snapshot!(brief("seq = [128, 32]\n", ""), @"19:50+5 dimension `seq` of input `input_ids` has no buckets = add `seq = [1, 8]` to [module.buckets], or write its size");
    insta::assert_snapshot!(brief("seq = [128, 32]", "seq = [32]\nimage = [1]"), @r#"23:1+5 no input has the dimension `image` = a `shape` in [module.inputs] uses it, as `shape = ["batch", 3]`"#);
    insta::assert_snapshot!(brief("seq = [128, 32]", "points = [{ batch = 1, seq = 2 }]"), @"23:1+5 `batch` stands beside `points` in [module.buckets] = give a grid or points, not both");
    insta::assert_snapshot!(brief("seq = [128, 32]\nbatch = [8, 1]", "points = [{ batch = 1, seq = 2 }, { batch = 1 }, { seq = 2, batch = 1 }]"), @"
    22:35+13 this point has other dimensions than the first one, `batch seq` = give each point a size for every dimension
    22:50+22 the bucket batch=1 seq=2 is listed twice = leave one of them out
    ");
    insta::assert_snapshot!(brief("seq = [128, 32]\nbatch = [8, 1]", "points = []"), @"22:10+2 `points` in [module.buckets] is empty, which leaves no bucket = as in `points = [{ batch = 1, seq = 512 }]`");
    let many: Vec<String> = (1..=101).map(|size| size.to_string()).collect();
    let many = format!("seq = [{0}]\nbatch = [{0}]", many.join(","));
    insta::assert_snapshot!(brief("seq = [128, 32]\nbatch = [8, 1]", &many), @"21:1+16 the grid has 10201 buckets, more than 10000 = list the ones that are needed as `points`");
    insta::assert_snapshot!(brief("seq = [128, 32]", "seq = [4611686018427387904]"), @"
    21:1+16 input `input_ids` is larger than memory can be at batch=1 seq=4611686018427387904 = take out the sizes that are too large
    21:1+16 input `attention_mask` is larger than memory can be at batch=1 seq=4611686018427387904 = take out the sizes that are too large
    ");
}

#[test]
fn shapes() {
    insta::assert_snapshot!(brief("[\"batch\", \"seq\"], pad", "[\"batch\", \"seq+1\", 0, 1.5], pad"), @r#"
    19:50+7 each item of `shape` in input `input_ids` must be a size or the name of a dimension = as in `shape = ["batch", 3, 224, 224]`
    19:59+1 each item of `shape` in input `input_ids` must be at least 1, not 0 = a bucket of no size computes nothing
    19:62+3 each item of `shape` in input `input_ids` must be a size or the name of a dimension = as in `shape = ["batch", 3, 224, 224]`
    "#);
    insta::assert_snapshot!(brief_of("schema = 1\nmodel = { name = \"m\", entry = \"m:f\" }\nmodule = [{ name = \"f\", inputs = {} }]\n"), @"3:34+2 [module.inputs] names no input = leave `inputs` out to capture them from sample inputs");
}

#[test]
fn states() {
    let state = |rest: &str| {
        let with = format!("[module.state]\n{rest}\n[module.buckets]");
        brief("[module.buckets]", &with)
    };
    insta::assert_snapshot!(state("input_ids = \"own\""), @r#"22:1+9 state `input_ids` is an input, with its shape in [module.inputs] = write `input_ids = "zeros"`, or the name of a module that fills it"#);
    insta::assert_snapshot!(state("input_ids = { shape = [1, \"seq\"] }"), @r#"22:1+9 state `input_ids` is an input, with its shape in [module.inputs] = write `input_ids = "zeros"`, or the name of a module that fills it"#);
    insta::assert_snapshot!(state("cache = \"ones\""), @"22:9+6 unknown first value `ones` = known: `zeros`, `own`");
    let text = |first: &str, more: &str| {
        let base = "schema = 1\nmodel = { name = \"m\", entry = \"m:f\" }\n[[module]]\nname = \"f\"\n[module.inputs]\n\
                    x = { dtype = \"float32\", shape = [2] }\n[module.state]\nkept = ";
        format!("{base}{first}\n[[module]]\nname = \"start\"\n{more}")
    };
    let filled = |first: &str, more: &str| brief_of(&text(first, more));
    let given = "[module.inputs]\ny = { dtype = \"float32\", shape = [2] }\n";
    for first in ["\"start\"", "{ first = \"start\", shape = [3] }"] {
        let spec = parse(&text(first, given)).unwrap();
        let filler = FirstValue::Module("start".to_owned());
        assert_eq!(spec.modules[0].state[0].first, filler);
    }
    insta::assert_snapshot!(filled("\"begin\"", given), @"8:8+7 unknown first value `begin` = known: `zeros`, `own`, `start`");
    insta::assert_snapshot!(filled("{ first = \"f\" }", given), @"8:18+3 module `f` can't fill state `kept`: it has the state itself = name another module");
    insta::assert_snapshot!(filled("\"start\"", ""), @"8:8+7 module `start` can't fill state `kept`: it has no [module.inputs] = write its inputs: the build calls it for samples");
    insta::assert_snapshot!(filled("\"start\"", &format!("{given}[module.state]\ny = \"zeros\"\n")), @"8:8+7 module `start` can't fill state `kept`: it has states = its outputs are the first values; leave out its [module.state]");
    insta::assert_snapshot!(filled("{ first = \"start\", shape = [\"n\"] }\n[module.buckets]\nn = [3]", given), @"8:18+7 module `start` can't fill state `kept`: the state has bucketed dimensions = write its sizes");
    insta::assert_snapshot!(filled("3", given), @"8:8+1 `kept` in [module.state] must be a table, not an integer = as in `{ key = value }`, or under a heading of its own");
    insta::assert_snapshot!(filled("{ }", given), @r#"8:8+3 missing key `shape` in state `kept` = add `shape = [1, 8, "context", 64]`"#);
    insta::assert_snapshot!(state("cache = { shape = [1, \"context\"] }"), @"22:23+9 dimension `context` of state `cache` has no buckets = add `context = [1, 8]` to [module.buckets], or write its size");
}

#[test]
fn padding_and_ranges_fit_the_dtype() {
    let input = |rest: &str| {
        let ids =
            "{ dtype = \"int64\", shape = [\"batch\", \"seq\"], pad = 1, range = [0, 30522] }";
        brief(ids, rest)
    };
    insta::assert_snapshot!(input("{ dtype = \"uint8\", shape = [\"batch\", \"seq\"], pad = 256 }"), @"19:64+3 `pad` in input `input_ids` does not fit uint8 = write a value that the dtype has, or give the input another dtype");
    insta::assert_snapshot!(input("{ dtype = \"int32\", shape = [\"batch\", \"seq\"], pad = 0.5 }"), @"19:64+3 `pad` in input `input_ids` must be an integer, not a float = write its digits, without quotes");
    insta::assert_snapshot!(input("{ dtype = \"float16\", shape = [\"batch\", \"seq\"], pad = 1e5 }"), @"19:66+3 `pad` in input `input_ids` does not fit float16 = write a value that the dtype has, or give the input another dtype");
    insta::assert_snapshot!(input("{ dtype = \"float32\", shape = [\"batch\", \"seq\"], pad = -inf }"), @"19:66+4 `pad` in input `input_ids` must be a finite number = write a smaller number");
    insta::assert_snapshot!(input("{ dtype = \"bool\", shape = [\"batch\", \"seq\"], pad = 1 }"), @"19:63+1 `pad` in input `input_ids` must be true or false, not an integer = write `true` or `false`, without quotes");
    insta::assert_snapshot!(input("{ dtype = \"int8\", shape = [\"batch\", \"seq\"], range = [0, 200] }"), @"19:65+8 `range` in input `input_ids` does not fit int8 = write a value that the dtype has, or give the input another dtype");
    insta::assert_snapshot!(input("{ dtype = \"int8\", shape = [\"batch\", \"seq\"], range = [5, 5] }"), @"19:65+6 `range` in input `input_ids` is empty = the first value is included, the second is not, as in `range(0, 10)`");
    insta::assert_snapshot!(input("{ dtype = \"float32\", shape = [\"batch\", \"seq\"], range = [0, 1] }"), @"19:68+6 `range` in input `input_ids` is for integers, and the input is float32 = leave it out");
    insta::assert_snapshot!(input("{ dtype = \"int8\", shape = [1], range = [1, 51], default = 60 }"), @"19:71+2 `default` in input `input_ids` is 60, and the range is [1, 51] = write a value that the input may have");
    insta::assert_snapshot!(input("{ dtype = \"float32\", shape = [\"batch\"], default = true }"), @"19:63+4 `default` in input `input_ids` must be a number, not a boolean = write its digits, without quotes");
    insta::assert_snapshot!(input("{ dtype = \"float32\", shape = [\"batch\", \"seq\"], default = 0.5 }"), @"19:70+3 `default` in input `input_ids` is for inputs of one size, and this has `batch` = leave it out");
}

#[test]
fn dynamic_dimensions_must_exist_and_have_room() {
    let with = |value: &str| brief("mode = \"max-autotune\"", value);
    insta::assert_snapshot!(with("dynamic.sequence = { min = 1, max = 8 }"), @r#"17:1+7 no input has the dynamic dimension `sequence` = a `shape` in [module.inputs] uses it, as `shape = ["batch", 3]`"#);
    insta::assert_snapshot!(with("dynamic = { seq = { min = 8, max = 8 }, batch = { max = 0 } }"), @"
    17:13+3 `dynamic.seq` goes from 8 to 8, which leaves nothing dynamic = as in `seq = { min = 2, max = 512 }`
    17:49+11 missing key `min` in `dynamic.batch` = add `min = 1`
    17:57+1 `max` in `dynamic.batch` must be at least 1, not 0 = a bucket of no size computes nothing
    ");
}

#[test]
fn names_of_inputs() {
    let named = |name: &str| GOOD.replacen("attention_mask =", &format!("\"{name}\" ="), 1);
    assert!(parse(&named("past.0.key")).is_ok());
    for wrong in ["0", "past.", "past.-1", "past.0x", "a b"] {
        let text = brief_of(&named(wrong));
        let expected = format!("`{wrong}` is not the name of a parameter");
        assert!(text.contains(&expected), "{text}");
    }
}
