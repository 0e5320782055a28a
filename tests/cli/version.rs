//! `--version`, alone and with `-v`.

use std::fs;

use crate::{sandbox::Sandbox, schemas::check, wheels::wheels};

#[test]
fn the_version_is_one_line_unless_more_is_asked_for() {
    let sandbox = Sandbox::new();
    let line = format!("precast {}\n", env!("CARGO_PKG_VERSION"));
    for args in [&["-V"][..], &["--version"]] {
        let ran = sandbox.run(args);
        assert_eq!((ran.code, &ran.stdout), (0, &line), "{}", ran.text());
    }
    // That of a command has nothing to add.
    let ran = sandbox.ok(&["build", "-V", "-v"]);
    assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.text());
}

#[test]
fn more_is_what_this_host_has() {
    let sandbox = Sandbox::built();
    let torch = wheels(&sandbox);
    let text = "__version__ = '2.13.0+cpu'\ncuda = None\ngit_version = 'abc'\n";
    fs::write(torch.join("version.py"), text).unwrap();
    for args in [["--version", "-v"], ["-v", "-V"], ["-V", "--verbose"]] {
        let mut command = sandbox.command(&args);
        command.env_remove("PRECAST_WORKER").env("LIBTORCH", &torch);
        let ran = sandbox.output(command.env("PRECAST_PYTHON", "/nowhere/python"));
        let lines: Vec<&str> = ran.stdout.lines().collect();
        let [version, torch, python, gpu, store, target] = lines[..] else {
            panic!("{}", ran.text());
        };
        assert_eq!(version, concat!("precast ", env!("CARGO_PKG_VERSION")));
        assert_eq!(torch, "torch   2.13.0+cpu, [ROOT]/site-packages/torch/lib");
        assert_eq!(store, "store   `artifacts`, 1 model");
        for (line, start) in [
            (python, "Python  `/nowhere/python` can't be started"),
            (gpu, "GPU     "),
            (target, "target  torch213-cxx11-cpu-"),
        ] {
            assert!(line.starts_with(start), "{line}");
        }
    }
    let document = sandbox.json(&["-V", "-v", "--libtorch", "nowhere", "--store", "nowhere"]);
    check("version", &document);
    assert_eq!(document["torch"], serde_json::Value::Null);
    assert_eq!(document["targets"], serde_json::json!([]));
    assert_eq!(document["store"], "`nowhere` is not there");
}
