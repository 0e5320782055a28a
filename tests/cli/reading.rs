//! The commands that read a store, on the real binary.

use std::{fs, process::Command};

use precast::Store;

use crate::sample::{self, Sample, sample};

/// Runs precast over the sample's store and returns stdout, stderr and exit code, with the folder's name replaced.
fn precast(sample: &Sample, args: &[&str]) -> (String, String, i32) {
    run(sample, args, None)
}

fn run(sample: &Sample, args: &[&str], columns: Option<u16>) -> (String, String, i32) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command
        .args(args)
        .env_clear()
        .env("PRECAST_STORE", &sample.path);
    if let Some(columns) = columns {
        command.env("COLUMNS", columns.to_string());
    }
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).unwrap();
        text.replace(&sample.dir.path().display().to_string(), "DIR")
    };
    (
        text(output.stdout),
        text(output.stderr),
        output.status.code().unwrap(),
    )
}

fn filtered(body: impl FnOnce()) {
    let mut settings = insta::Settings::clone_current();
    // Ages, right-aligned in their columns.
    settings.add_filter(r" +\d+[smhd]\b", " AGE");
    // The width of the column follows the ages.
    settings.add_filter(r" +(\S*AGE\b)", " $1");
    settings.bind(body);
}

#[test]
fn ls_in_wide_and_narrow_terminals() {
    let sample = sample();
    let (wide, _, code) = precast(&sample, &["ls"]);
    assert_eq!(code, 0);
    let (narrow, _, _) = run(&sample, &["ls", "--sort", "bucket-"], Some(60));
    assert!(
        narrow.lines().all(|line| line.chars().count() <= 60),
        "{narrow}"
    );
    filtered(|| {
        insta::assert_snapshot!("ls-wide", wide);
        insta::assert_snapshot!("ls-narrow", narrow);
    });
}

#[test]
fn colour_is_only_there_when_asked_for() {
    let sample = sample();
    let (piped, _, _) = precast(&sample, &["ls"]);
    assert!(!piped.contains('\x1b'));
    let (coloured, _, _) = precast(&sample, &["ls", "--color", "always"]);
    assert!(coloured.contains("\x1b[32mlive"), "{coloured}");
    let strip = |text: &str| anstream::adapter::strip_str(text).to_string();
    let rows = |text: &str| {
        text.lines()
            .map(|line| line.split("  ").next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(rows(&strip(&coloured)), rows(&piped));
}

#[test]
fn ls_filters_by_every_column() {
    let sample = sample();
    let ids = |args: &[&str]| {
        let (out, _, code) = precast(&sample, &[&["ls", "--ids"], args].concat());
        assert_eq!(code, 0);
        out.lines().count()
    };
    assert_eq!(ids(&[]), 6);
    assert_eq!(ids(&["enc*"]), 6);
    assert_eq!(ids(&["dec*"]), 0);
    assert_eq!(ids(&["--state", "live"]), 3);
    assert_eq!(ids(&["--state", "old"]), 2);
    assert_eq!(ids(&["--state", "failed"]), 1);
    assert_eq!(ids(&["--bucket", "batch=8 *"]), 3);
    assert_eq!(ids(&["--model", "minilm", "--device", "cpu"]), 5);
    assert_eq!(ids(&["--older", "300d"]), 6);
    assert_eq!(ids(&["--newer", "300d"]), 0);
    let (_, errors, code) = precast(&sample, &["ls", "--sort", "colour"]);
    assert_eq!(code, 2);
    assert!(errors.contains("expected one of id, model"), "{errors}");
    let (_, errors, code) = precast(&sample, &["ls", "--older", "soon"]);
    assert_eq!(code, 2);
    assert!(errors.contains("`30d`"), "{errors}");
    let (_, errors, code) = precast(&sample, &["ls", "["]);
    assert_eq!(code, 2);
    assert!(errors.contains("hint:"), "{errors}");
}

#[test]
fn du_adds_up_by_model_module_and_release() {
    let sample = sample();
    let (by_model, _, _) = precast(&sample, &["du"]);
    let (by_release, _, _) = precast(&sample, &["du", "--by", "release"]);
    filtered(|| {
        insta::assert_snapshot!("du-model", by_model);
        insta::assert_snapshot!("du-release", by_release);
    });
}

#[test]
fn du_and_the_report_give_one_number_with_the_unpacked_copies() {
    let sample = sample();
    let store = Store::open(&sample.path).unwrap();
    let object = store.objects().put_bytes(&[7; 300_000]).unwrap();
    drop(store.objects().map(&object).unwrap());
    drop(store);
    let (du, _, _) = precast(&sample, &["du"]);
    let columns = |row: &str| {
        let line = du.lines().find(|line| line.starts_with(row)).unwrap();
        let columns = line.split("  ").map(str::trim);
        let columns: Vec<_> = columns.filter(|text| !text.is_empty()).collect();
        columns.join("|")
    };
    let unpacked = columns("(unpacked)");
    let unpacked = unpacked.split('|').nth(1).unwrap();
    let total = columns("total");
    let total = total.split('|').nth(4).unwrap();
    let page = sample.dir.path().join("report.html");
    let (_, errors, code) = precast(&sample, &["report", "-o", page.to_str().unwrap()]);
    assert_eq!(code, 0, "{errors}");
    let page = fs::read_to_string(page).unwrap();
    let sentence = format!("On disk the store takes {total} for ");
    assert!(
        page.contains(&sentence),
        "`{sentence}` is not in the report\n{du}"
    );
    let sentence = format!(", of which {unpacked} are unpacked copies");
    assert!(
        page.contains(&sentence),
        "`{sentence}` is not in the report\n{du}"
    );
}

#[test]
fn show_draws_a_program_with_its_receipt_and_tuning() {
    let sample = sample();
    let (program, _, code) = precast(&sample, &["show", &sample.program.short()]);
    assert_eq!(code, 0);
    let (bound, _, _) = precast(&sample, &["show", "-v", &sample.program.short()]);
    assert!(
        bound.contains("weight = layers.3.weight  float32[8, 8]"),
        "{bound}"
    );
    let mut settings = insta::Settings::clone_current();
    settings.add_filter("(  this host has .*|  not on this host: .*)", "  HOST");
    settings.bind(|| insta::assert_snapshot!("show-program", program));
}

#[test]
fn why_and_diff_name_changes() {
    let sample = sample();
    let (why, _, code) = precast(&sample, &["why", &sample.program.short()]);
    assert_eq!(code, 0);
    assert!(
        why.contains("`model.py` changed") || why.contains("model.py"),
        "{why}"
    );
    let (of_module, _, _) = precast(&sample, &["why", "encode"]);
    assert_eq!(of_module.matches("encode batch=").count(), 3, "{of_module}");
    let (keys, _, _) = precast(
        &sample,
        &["diff", &sample.before.short(), &sample.program.short()],
    );
    assert!(keys.contains("model.py"), "{keys}");
    let (releases, _, _) = precast(&sample, &["diff", "minilm@1", "minilm"]);
    insta::assert_snapshot!("diff-releases", releases);
    let (stores, _, _) = precast(
        &sample,
        &[
            "diff",
            &sample.path.display().to_string(),
            &sample.path.display().to_string(),
        ],
    );
    assert!(
        stores.contains("3 programs the same, 0 changed"),
        "{stores}"
    );
    let (_, errors, code) = precast(&sample, &["diff", "minilm", &sample.program.short()]);
    assert_eq!(code, 2);
    assert!(errors.contains("hint:"), "{errors}");
    let (_, errors, code) = precast(&sample, &["why", "nothing"]);
    assert_eq!(code, 3);
    assert!(errors.contains("hint:"), "{errors}");
}

#[test]
fn logs_reach_the_terminal_without_their_escapes() {
    let sample = sample();
    let (of_artifact, _, _) = precast(
        &sample,
        &["log", &sample.artifact.short(), "--color", "always"],
    );
    assert_eq!(
        of_artifact,
        "compiling blocks 1 32\n\\u{1b}[31mnote\\u{1b}[0m: autotuning skipped\n"
    );
    let (of_program, _, _) = precast(&sample, &["log", &sample.program.short()]);
    assert_eq!(
        of_program.matches("==> artifact ").count(),
        2,
        "{of_program}"
    );
    let (of_failure, _, _) = precast(&sample, &["log", &sample.failure.short()]);
    assert_eq!(of_failure, "Traceback: no kernel\n");
    let (_, errors, code) = precast(&sample, &["log", "feedfeed"]);
    assert_eq!(code, 3, "{errors}");
}

#[test]
fn looking_changes_nothing() {
    let sample = sample();
    let state = || {
        let files = walkdir::WalkDir::new(&sample.path)
            .into_iter()
            .map(Result::unwrap);
        let mut all: Vec<_> = files
            .filter(|entry| entry.file_type().is_file())
            .map(|entry| (entry.path().to_owned(), fs::read(entry.path()).unwrap()))
            .collect();
        all.sort();
        all
    };
    let before = state();
    let (id, artifact) = (sample.program.short(), sample.artifact.short());
    let out = sample.dir.path().join("r.html").display().to_string();
    for args in [
        &["ls"][..],
        &["ls", "--artifacts"],
        &["du"],
        &["show", &id],
        &["show", &artifact],
        &["log", &id],
        &["why", "encode"],
        &["diff", "minilm@1", "minilm@2"],
        &["report", "-o", &out],
    ] {
        let (_, errors, code) = precast(&sample, args);
        assert_eq!(code, 0, "{args:?}: {errors}");
    }
    assert!(
        before == state(),
        "a command that only looks wrote to the store"
    );
}

#[test]
fn stats_add_up_counts_of_services() {
    let sample = sample();
    let counts = sample::counts(sample.dir.path()).display().to_string();
    let (out, _, code) = precast(&sample, &["stats", &counts, &counts]);
    assert_eq!(code, 0);
    insta::assert_snapshot!("stats", out);
    let (_, errors, code) = precast(&sample, &["stats", "Cargo.toml"]);
    assert_eq!(code, 2);
    assert!(errors.contains("not a file of counts"), "{errors}");
}

#[test]
fn a_damaged_index_is_an_error_and_the_records_are_listed() {
    let sample = sample();
    fs::write(
        sample.path.join("index.sqlite"),
        b"this is no database at all",
    )
    .unwrap();
    let shard = fs::read_dir(sample.path.join("programs"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let record = fs::read_dir(shard).unwrap().next().unwrap().unwrap().path();
    let mut text = fs::read(&record).unwrap();
    text[20] ^= 1;
    fs::remove_file(&record).unwrap();
    fs::write(&record, text).unwrap();
    let (out, errors, code) = precast(&sample, &["ls", "--ids"]);
    assert_eq!(code, 1, "{errors}");
    assert_eq!(out.lines().count(), 5, "{out}{errors}");
    assert!(
        errors.contains("index")
            && errors.contains(&*record.file_name().unwrap().to_string_lossy()),
        "{errors}"
    );
    assert!(errors.contains("hint:"), "{errors}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let sample = sample();
    for args in [
        "ls",
        "ls --format json",
        "show minilm",
        "--help",
        "completions bash",
    ] {
        let script = format!(
            "'{}' {args} 2>err | true; cat err",
            env!("CARGO_BIN_EXE_precast")
        );
        let mut command = Command::new("bash");
        command
            .args(["-o", "pipefail", "-c", &script])
            .env("PRECAST_STORE", &sample.path);
        let output = command.current_dir(sample.dir.path()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            !errors.contains("panicked") && !errors.contains("Broken pipe"),
            "{args}: {errors}"
        );
    }
}

#[test]
fn help_is_grouped_and_completions_and_pages_are_made() {
    let sample = sample();
    let (help, _, code) = precast(&sample, &["--help"]);
    assert_eq!(code, 0);
    for heading in [
        "Building, at deploy time:",
        "Looking, at what is there and why:",
        "Keeping house:",
        "Options:",
    ] {
        assert!(help.contains(heading), "{help}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let (script, _, code) = precast(&sample, &["completions", shell]);
        assert_eq!(code, 0);
        assert!(
            script.contains("precast") && script.contains("inspect"),
            "{shell}"
        );
    }
    let pages = sample.dir.path().join("man");
    let (_, _, code) = precast(&sample, &["man", &pages.display().to_string()]);
    assert_eq!(code, 0);
    let page = fs::read_to_string(pages.join("precast-ls.1")).unwrap();
    assert!(
        page.contains(".TH precast") && page.contains("older"),
        "{page}"
    );
    assert!(!pages.join("precast-help.1").exists());
}

#[test]
fn a_store_that_is_not_there_is_an_error_with_a_hint() {
    let sample = sample();
    for args in [
        &["ls"][..],
        &["du"],
        &["show", "abcd"],
        &["log", "abcd"],
        &["why", "x"],
        &["report"],
    ] {
        let nowhere = ["--store", "nowhere"];
        let (_, errors, code) = precast(&sample, &[args, &nowhere].concat());
        assert_eq!(code, 2, "{args:?}: {errors}");
        assert!(errors.contains("hint:"), "{args:?}: {errors}");
    }
}

#[test]
fn programs_go_by_their_names() {
    let sample = sample();
    let json = |words: &str| {
        let args: Vec<&str> = words.split(' ').chain(["--format", "json"]).collect();
        let (out, errors, code) = precast(&sample, &args);
        assert_eq!(code, 0, "{words}: {errors}");
        serde_json::from_str::<serde_json::Value>(&out).unwrap()
    };
    // A program of the newest release comes before others of its name.
    let live = json("ls --state live");
    let ids: Vec<_> = (live["programs"].as_array().unwrap().iter())
        .filter(|row| row["bucket"] == "batch=1 seq=32")
        .map(|row| row["id"].clone())
        .collect();
    let [id] = &ids[..] else { panic!("{live}") };
    assert_eq!(&json("show encode batch=1 seq=32")["id"], id);
    assert_eq!(&json("show minilm encode batch=1 seq=32")["id"], id);
    assert_eq!(&json("why encode batch=1 seq=32")["why"][0]["id"], id);
    let log = json("log encode batch=8 seq=128");
    assert!(
        log["logs"][0]["of"]
            .as_str()
            .unwrap()
            .starts_with("failure"),
        "{log}"
    );
    let (_, errors, code) = precast(&sample, &["show", "encode"]);
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("names 3 programs"), "{errors}");
    assert!(errors.contains("`encode batch=1 seq=128` is "), "{errors}");
    let (_, errors, code) = precast(&sample, &["show", "encode", "batch=2"]);
    assert_eq!(code, 3, "{errors}");
    assert!(errors.contains("no ID `encode batch=2`"), "{errors}");
    let (_, errors, code) = precast(
        &sample,
        &["diff", "encode batch=1 seq=32", "encode batch=8 seq=32"],
    );
    assert_eq!(code, 0, "{errors}");
}
