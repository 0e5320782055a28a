//! `run`: dispatch of saved inputs, refused inputs, and damaged stores.

use std::{fs, io::Write};

use precast::{Store, record::Release};
use safetensors::{SafeTensors, tensor::TensorView};

use crate::{
    sandbox::{RUN, Sandbox, assert_run, wait_until},
    scene::damage,
};

#[test]
fn the_smallest_bucket_that_covers_answers() {
    let sandbox = Sandbox::built();
    for (rows, how) in [(4, "exact"), (3, "padded from batch=3")] {
        sandbox.rows(rows);
        let ran = sandbox.ok(&RUN);
        let (program, outputs) = ran.stdout.split_once(", ").unwrap();
        assert!(program.starts_with("affine batch=4 "), "{}", ran.text());
        assert_eq!(outputs, format!("{how}\nout: float32 [{rows}, 3]\n"));
        // Padding is sliced off.
        let values = (0..3 * rows).map(|i| 2.0 * i as f32 + 1.0).collect();
        assert_eq!(sandbox.tensor("y.safetensors"), (vec![rows, 3], values));
    }
}

#[test]
fn warnings_of_libtorch_are_printed_on_request() {
    let sandbox = Sandbox::steered(&["run warns"]);
    let built = sandbox.ok(&["build"]);
    assert!(!built.text().contains("fake artifact warns"));
    sandbox.rows(4);
    let ran = sandbox.ok(&RUN);
    assert!(!ran.text().contains("fake artifact warns"));
    sandbox.run(&loud()).says("fake artifact warns");
}

#[test]
fn a_file_of_weights_alone_makes_another_release_without_python() {
    let sandbox = Sandbox::new();
    let weights = |name, values: &[f32]| {
        let shape = [values.len()];
        sandbox.tensors("w.safetensors", &[(name, &shape[..], values)]);
    };
    let answer = || sandbox.answer(&[]);
    sandbox.weights_file();
    weights("scale", &[10.0]);
    sandbox.ok(&["build", "-q"]);
    sandbox.rows(1);
    assert_eq!(answer(), [1.0, 11.0, 21.0]);
    let worker = std::fs::read_to_string(sandbox.path("worker")).unwrap();
    sandbox.script("worker", "exit 1");
    weights("scale", &[3.0]);
    sandbox.ok(&["build"]).says("its weights changed: ");
    assert_eq!(answer(), [1.0, 4.0, 7.0]);
    let ran = sandbox.run(&loud());
    for line in [
        "loaded `fake` from",
        "input x: float32 [1, 3]",
        "asked for batch=1, answered by batch=1 (exact)",
    ] {
        ran.says(line);
    }
    // The model refuses other tensors.
    sandbox.script("worker", worker.trim_start_matches("#!/bin/sh\n"));
    weights("scale", &[3.0, 4.0]);
    let ran = sandbox.run(&["build", "-q"]).exits(1);
    let why = "error: tensor `scale` of `w.safetensors` is [2], not [1]\nhint: export it again\n";
    assert_eq!(ran.stderr, why);
    weights("skale", &[3.0]);
    let ran = sandbox.run(&["build", "-q"]).exits(1);
    assert_eq!(
        ran.stderr,
        "error: `w.safetensors` has no tensor `scale`\nhint: add it\n"
    );
    assert_eq!(answer(), [1.0, 4.0, 7.0]);
    assert_eq!(sandbox.releases(), 2);
}

#[test]
fn a_file_of_weights_is_distinguished_from_the_models_own() {
    let sandbox = Sandbox::new();
    sandbox.tensors("w.safetensors", &[("scale", &[1], &[10.0])]);
    sandbox.rows(1);
    let answer = || {
        sandbox.ok(&["build", "-q"]);
        sandbox.answer(&[])
    };
    assert_eq!(answer(), [1.0, 3.0, 5.0]);
    sandbox.weights_file();
    assert_eq!(answer(), [1.0, 11.0, 21.0]);
    // Both are there by now, and neither needs Python.
    sandbox.script("worker", "exit 1");
    sandbox.edit("precast.toml", "weights = \"w.safetensors\"\n", "");
    assert_eq!(answer(), [1.0, 3.0, 5.0]);
    sandbox.weights_file();
    assert_eq!(answer(), [1.0, 11.0, 21.0]);
}

#[test]
fn a_disk_that_is_full_when_outputs_are_written() {
    let sandbox = Sandbox::built();
    sandbox.rows(1);
    let mut full = RUN.to_vec();
    let last = full.len() - 2;
    full[last] = "/dev/full";
    assert_run!(sandbox, full, @"
    exit code 2, stderr
    error: can't write `/dev/full`
      caused by: the operating system refused to write it
      caused by: No space left on device (os error 28)
    hint: the disk is full: free some space, or write to another one
    ");
    full[last] = "no/such/folder/y.safetensors";
    let ran = sandbox.run(&full).exits(2);
    ran.says("error: can't write `no/such/folder/y.safetensors`");
    ran.says("hint: its folder must be there already");
}

#[test]
fn a_shape_that_no_bucket_covers() {
    let sandbox = Sandbox::built();
    sandbox.rows(5);
    assert_run!(sandbox, RUN, @"
    exit code 3, stderr
    error: module `affine` has no bucket for batch=5; it has batch=1, batch=4
    hint: the nearest is batch=4
    ");
    sandbox.tensors("x.safetensors", &[("x", &[1, 4], &[0.0; 4])]);
    assert_run!(sandbox, RUN, @"
    exit code 2, stderr
    error: module `affine`, input `x`: expected size 3 on axis 1, got 4
    hint: `precast show ID` draws a program with the shapes of its inputs
    ");
}

#[test]
fn inputs_that_are_not_safetensors() {
    let sandbox = Sandbox::built();
    sandbox.write("x.safetensors", "hello");
    assert_run!(sandbox, RUN, @"
    exit code 2, stderr
    error: can't use `x.safetensors`
      caused by: not a safetensors file: header too small
    hint: `safetensors.torch.save_file` writes such a file; `precast inspect FILE` says what is in it
    ");
    assert_run!(sandbox, ["run", "affine", "--inputs", "nowhere.safetensors"], @"
    exit code 2, stderr
    error: can't read `nowhere.safetensors`
      caused by: No such file or directory (os error 2)
    hint: check the path: it is looked up from the current folder
    ");
}

#[test]
fn an_object_with_a_flipped_byte_is_never_run() {
    let sandbox = Sandbox::built();
    sandbox.rows(1);
    // Without unpacked files every object is read again. Each is damaged in turn, in its middle.
    let objects = sandbox.files("artifacts/objects");
    assert!(!objects.is_empty());
    let (mut refused, mut set_aside) = (0, 0);
    for object in objects {
        let bytes = fs::read(&object).unwrap();
        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 1;
        replace(&object, &damaged);
        for file in sandbox.files("artifacts/ready") {
            fs::remove_file(file).unwrap();
        }
        let ran = sandbox.run(&RUN);
        if ran.code != 0 {
            refused += 1;
            ran.says(&short_name(&object));
        } else {
            // An object that this run does not need, or an artifact that another bucket stands in for.
            let padded = ran.stdout.contains("padded from batch=1");
            let named = format!("is set aside: object `{}`", short_name(&object));
            assert_eq!(padded, ran.stderr.contains(&named), "{}", ran.text());
            set_aside += usize::from(padded);
            assert_eq!(sandbox.tensor("y.safetensors").1, [1.0, 3.0, 5.0]);
        }
        replace(&object, &bytes);
    }
    assert!(refused >= 1, "the weights are needed");
    assert_eq!(set_aside, 1, "one artifact is needed");
    sandbox.ok(&RUN);
}

/// Returns the command with `-v`.
fn loud() -> [&'static str; 7] {
    RUN.map(|arg| if arg == "-q" { "-v" } else { arg })
}

/// Objects are not writable; a damaged disk does not ask.
fn replace(path: &std::path::Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::File::create(path).unwrap().write_all(bytes).unwrap();
}

fn short_name(object: &std::path::Path) -> String {
    let name = object.file_name().unwrap().to_str().unwrap();
    name.chars().take(12).collect()
}

#[test]
fn runs_add_up_in_a_file_of_counts() {
    let sandbox = Sandbox::built();
    for count in [4, 3, 3, 5] {
        sandbox.rows(count);
        sandbox.run(&[&RUN[..], &["--counts", "counts.json"]].concat());
    }
    assert_run!(sandbox, ["stats", "counts.json"], @"
    fake affine
      4 calls: 1 exact, 2 padded, 1 refused
      25.0 % had a bucket of their own size
      16.7 % of the work was padding

      ASKED FOR  ANSWERED BY  BUCKET  CALLS  PADDING
      batch=3  padded  batch=4  2  25.0 %
      batch=5  refused  1
    ");
    sandbox.edit("counts.json", "fake", "other");
    let ran = sandbox
        .run(&[&RUN[..], &["--counts", "counts.json"]].concat())
        .exits(2);
    ran.says("`counts.json` counts calls of `other`");
}

#[test]
fn a_bit_of_the_unpacked_weights_that_changed_on_the_disk_is_noticed_unless_they_are_trusted() {
    let sandbox = Sandbox::built();
    sandbox.rows(1);
    sandbox.ok(&RUN);
    let answer = |more| sandbox.answer(more);
    let [file] = &sandbox.files("artifacts/ready")[..] else {
        panic!("the weights are not the only unpacked file")
    };
    let right = [1.0, 3.0, 5.0];
    for _ in 0..2 {
        // The sign of the last tensor's last number, before the footer of 88 bytes.
        let sign = |bytes: &mut Vec<u8>| *bytes.iter_mut().nth_back(88).unwrap() ^= 0x80;
        damage(file, sign);
        assert_ne!(answer(&["--trust-unpacked"]), right);
        assert_eq!(answer(&["--copy-weights"]), right);
        assert_eq!(answer(&[]), right);
        assert_eq!(answer(&["--trust-unpacked"]), right);
    }
}

#[test]
fn of_large_weights_a_start_checks_the_tensors_that_it_reads() {
    let sandbox = Sandbox::built();
    sandbox.rows(1);
    sandbox.ok(&RUN);
    let right = sandbox.answer(&[]);
    // A release with the same weights and one more, which is large, random and not used.
    let store = Store::open(sandbox.path("artifacts")).unwrap();
    let model = &store.releases().models().unwrap()[0];
    let newest = store.releases().get(model, None).unwrap().unwrap();
    let old = store.objects().map(&newest.weights.unwrap()).unwrap();
    let mut random = 1_u64;
    let words = (0..34 << 17).flat_map(|_| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.to_le_bytes()
    });
    let more: Vec<u8> = words.collect();
    let file = SafeTensors::deserialize(&old).unwrap();
    let unused = TensorView::new(safetensors::Dtype::U8, vec![more.len()], &more).unwrap();
    let views = file.iter().chain([("unused", unused)]);
    let content = safetensors::serialize(views, None).unwrap();
    let write = &mut |file: &mut fs::File| file.write_all(&content);
    let put = store.objects().put_unpacked("weights".as_ref(), write);
    let weights = put.unwrap().0;
    let release = Release {
        weights: Some(weights),
        ..newest
    };
    store.releases().put(&release).unwrap();

    let object = store.objects().unpacked_file(&weights).unwrap();
    assert!(object.starts_with(sandbox.path("artifacts/objects")));
    let flip = |at: usize| damage(&object, |bytes| bytes[at] ^= 0x80);
    // float32 comes before uint8: the tensors that are used are in the first part, the last parts have none.
    let (first, last) = (content.len() - more.len() - 1, content.len() - 1);
    assert_eq!(sandbox.answer(&[]), right);
    flip(last);
    assert_eq!(sandbox.answer(&[]), right);
    sandbox.run(&["verify"]).shows(&weights.short());
    flip(last);
    for at in [9, first, content.len() + 1] {
        flip(at);
        let ran = sandbox.run(&RUN);
        assert_ne!(ran.code, 0, "{at}");
        ran.shows(&weights.short());
        ran.shows("verify --repair");
        flip(at);
    }
    assert_eq!(sandbox.answer(&[]), right);
}

#[test]
fn a_first_load_is_tried_once_and_gated_objects_are_known() {
    let sandbox = Sandbox::built();
    sandbox.rows(4);
    let memory = sandbox.path("artifacts/cache/loads");
    let gated = fs::read_to_string(&memory).unwrap();
    let store = Store::open(sandbox.path("artifacts")).unwrap();
    let release = store.releases().get("fake", None).unwrap().unwrap();
    let shim = release.shims[0].object.hex();
    let all_load = gated.lines().all(|line| line.contains(" loads "));
    assert!(all_load, "{gated}");
    let run = || {
        sandbox.ok(&RUN);
        fs::read_to_string(&memory).unwrap()
    };
    assert_eq!(run(), gated, "the gate loaded it in a process of its own");
    fs::remove_file(&memory).unwrap();
    let tried = run();
    let object = |line: &str| line.split(' ').nth(1).unwrap().to_owned();
    let lines: Vec<String> = tried.lines().map(object).collect();
    assert_eq!((lines.len(), &lines[0]), (2, &shim), "{tried}");
    for line in lines {
        assert!(gated.lines().any(|known| object(known) == line), "{line}");
    }
    assert_eq!(run(), tried, "once");
}

#[test]
fn a_program_without_a_file_handle_says_so_and_not_that_there_is_no_bucket() {
    let sandbox = Sandbox::built();
    sandbox.rows(4);
    let mut codes = Vec::new();
    for files in 6..=16 {
        let ran = sandbox.run_after(&format!("ulimit -n {files}"), sandbox.command(&RUN));
        let text = ran.text();
        assert!(!text.contains("has no bucket"), "{files}: {text}");
        let told = ["Too many open files", "os error 24", "file handles"];
        let said = told.iter().any(|words| text.contains(words));
        assert!(ran.code == 0 || said, "{files}: {text}");
        codes.push(ran.code);
    }
    assert_eq!(codes.last(), Some(&0), "{codes:?}");
}

#[cfg(feature = "sync-points")]
#[test]
fn a_load_that_meets_gc_takes_the_release_that_is_the_newest_then() {
    for (named, code) in [(None, 0), (Some("fake@1"), 3)] {
        let sandbox = Sandbox::built();
        sandbox.rows(1);
        let sync = tempfile::tempdir().unwrap();
        let at = |end: &str| sync.path().join(format!("lease:before-hold.{end}"));
        fs::write(at("stop"), "").unwrap();
        let mut args = RUN.to_vec();
        args.extend(named.iter().flat_map(|name| ["--model", name]));
        let mut command = sandbox.command(&args);
        command.env("PRECAST_SYNC", sync.path());
        let waiting = std::thread::scope(|scope| {
            let running = scope.spawn(|| sandbox.output(&mut command));
            // It has read release 1, which it does not hold yet.
            wait_until("the load comes to its lease", || at("here").exists());
            sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 10.0");
            sandbox.ok(&["build", "-q"]);
            let gc = sandbox.run(&["gc", "--keep-releases", "1"]);
            gc.prints("deleted 1 release");
            fs::write(at("go"), "").unwrap();
            running.join().unwrap()
        });
        assert_eq!(waiting.code, code, "{}", waiting.text());
        match named {
            None => assert_eq!(sandbox.tensor("y.safetensors").1, [1.0, 11.0, 21.0]),
            Some(_) => waiting.says("there is no release `fake@1`"),
        }
    }
}

#[test]
fn a_missing_lease_is_reported() {
    let sandbox = Sandbox::built();
    sandbox.rows(1);
    let lock = sandbox.path("artifacts/locks/use");
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    let said = "no lease on release 1 of `fake`: gc may delete what this process reads: can't open the lock";
    sandbox.ok(&loud()).says(said);
}
