//! The JSON of the commands that build, run and maintain a store matches docs/schema.

use std::fs;

use crate::{
    sandbox::{Sandbox, count},
    schemas::{check, schema},
};

#[test]
fn plans_builds_and_maintenance() {
    let sandbox = Sandbox::new();
    check("plan", &sandbox.json(&["plan"]));
    sandbox.append("model.py", "# fake: compile fails batch=4");
    let events = |args: &[&str]| {
        let lines = sandbox
            .run(&[&["build", "--format", "json"], args].concat())
            .events();
        lines.iter().for_each(|line| check("build", line));
        let names = lines
            .iter()
            .map(|line| line["event"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    let seen = events(&[]);
    let names = "planned missing worker opened weights begin end captured published failed";
    for event in names.split(' ') {
        assert!(seen.iter().any(|seen| seen == event), "{event}: {seen:?}");
    }
    assert_eq!(seen.last().unwrap(), "finished");
    // One hit and one failure.
    check("plan", &sandbox.json(&["plan"]));
    sandbox.edit("model.py", "# fake: compile fails batch=4", "SCALE = 4.0");
    assert_eq!(events(&[]).last().unwrap(), "finished");
    assert_eq!(events(&[]).first().unwrap(), "planned");
    check("release", &sandbox.json(&["release", "ls"]));
    check("release", &sandbox.json(&["release", "rollback", "fake"]));
    check("verify", &sandbox.json(&["verify"]));
    let loose = sandbox.path("artifacts/objects/loose");
    fs::write(&loose, "no object").unwrap();
    let found = sandbox.json(&["verify"]);
    assert_eq!(count(&found["defects"]), 1, "{found}");
    check("verify", &found);
    check("verify", &sandbox.json(&["verify", "--repair"]));
    check("verify", &sandbox.json(&["verify", "--reindex"]));
    let gc = ["gc", "--unreleased", "--keep-releases", "1"];
    let plan = sandbox.json(&[&gc[..], &["--dry-run"]].concat());
    assert_ne!(count(&plan["plan"]["releases"]), 0, "{plan}");
    check("gc", &plan);
    check("gc", &sandbox.json(&gc));
}

#[test]
fn runs_and_their_programs() {
    let sandbox = Sandbox::built();
    for rows in [1, 3] {
        sandbox.tensors("x.safetensors", &[("x", &[rows, 3], &vec![1.0; rows * 3])]);
        let run = ["run", "affine", "--inputs", "x.safetensors"];
        check("run", &sandbox.json(&run));
    }
    check("show", &sandbox.json(&["show", "affine", "batch=4"]));
}

#[test]
fn every_schema_has_a_title_and_takes_no_unknown_field() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/schema");
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let document: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert!(
            document["title"]
                .as_str()
                .is_some_and(|title| !title.is_empty()),
            "{name}"
        );
        let unknown = serde_json::json!({"schema": 1, "surprise": 1});
        assert!(!schema(&name).is_valid(&unknown), "{name}");
        count += 1;
    }
    assert!(count >= 17, "{count}");
}
