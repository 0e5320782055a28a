//! Models that can't be made at all: the build ends with the line of the user's code and the Python stack in the store.

use tempfile::TempDir;

use crate::lab::{Lab, precast, project, said, well};

const SPEC: &str = r#"schema = 1
[model]
name = "broken"
entry = "model:load"
[[module]]
name = "forward"
path = ""
inputs.x = { dtype = "float32", shape = [3, 4] }
"#;

/// Builds this model and asserts that it ended with exit code 1, these lines and this in the log that they name.
fn fails(model: &str, message: &str, place: &str, in_log: &str) {
    let folder = TempDir::new().unwrap();
    let spec = project(folder.path(), SPEC, model);
    let lab = Lab::at(folder.path());
    let built = said(&mut precast(&lab.store, &["build", "-j", "1", "-f", &spec]));
    let errors = built.err;
    assert_eq!(built.code, Some(1), "{errors}");
    let told = format!("error: {message}\n  --> {place}\n");
    assert!(errors.contains(&told), "{errors}");
    let named = errors.split("`precast log ").nth(1);
    let named = named.unwrap_or_else(|| panic!("{errors}"));
    let log = well(&mut precast(&lab.store, &["log", &named[..12]])).out;
    assert!(log.starts_with(message) && log.contains(in_log), "{log}");
    let listed = lab.json(&["ls"]);
    assert_eq!(listed["programs"].as_array().unwrap().len(), 0, "{listed}");
}

/// Runs `build` or `check` on a model that disturbs its worker, and asserts that the error says how.
fn disturbs(command: &str, body: &str, what: &str) {
    let folder = TempDir::new().unwrap();
    let model =
        format!("import os, torch\n\ndef load():\n{body}    return torch.nn.Linear(4, 4)\n");
    let spec = project(folder.path(), SPEC, &model);
    let store = folder.path().join("store");
    let ran = said(&mut precast(&store, &[command, "-f", &spec]));
    let errors = ran.err;
    let wanted = format!("the model disturbed its worker: {what}");
    assert!(errors.contains(&wanted), "{command}\n{errors}");
    assert!(!errors.contains("bug of precast"), "{command}\n{errors}");
    assert_eq!(ran.code, Some(1), "{command}\n{errors}");
}

#[test]
fn an_entry_that_writes_to_descriptors_of_the_worker() {
    let all = "    for fd in range(3, 64):\n        try: os.write(fd, BYTES)\n        except OSError: pass\n";
    let body = |bytes: &str| all.replace("BYTES", bytes);
    let what = "it wrote to a descriptor that it did not open: an answer begins with `";
    disturbs("build", &body("b'hello'"), &format!("{what}hello{{"));
    disturbs("check", &body("b'\\xff\\n'"), what);
}

#[test]
fn an_entry_that_forks_its_worker() {
    // The worker waits for its copy, so that the copy speaks first.
    let body = "    child = os.fork()\n    if child: os.waitpid(child, 0)\n";
    let what = "it forked, and the copy of the worker went on";
    disturbs("build", body, what);
}

/// A model's text, the message, its place, and a part of the log.
#[rustfmt::skip]
const FAILURES: [[&str; 4]; 4] = [
    [
        "import torch\n\ndef find():\n    raise OSError('no weights here')\n\nWEIGHTS = find()\n\ndef load():\n    pass\n",
        "can't import `model`: OSError: no weights here",
        "model.py:4",
        "line 6, in <module>\n    WEIGHTS = find()",
    ],
    [
        "import sys\n\ndef load():\n    sys.exit('usage: train.py')\n",
        "`model:load` raised SystemExit: usage: train.py",
        "model.py:4",
        "sys.exit('usage: train.py')",
    ],
    [
        "import torch\n\ndef load():\n    return torch.nn.Linear(4, 4).state_dict()\n",
        "`model:load` returned a dict whose `weight` is a Tensor, not a torch.nn.Module",
        "model.py:3",
        "Failure: ",
    ],
    // It changes while it is imported.
    [
        "import pathlib, subprocess, torch\n\ndef load():\n    \
         subprocess.run(['sh', '-c', 'echo WIDTH = 8 >> model.py'], cwd=pathlib.Path(__file__).parent)\n    \
         return torch.nn.Linear(4, 4)\n",
        "`model.py` changed while the model was made from it",
        "model.py:1",
        "Failure: ",
    ],
];

#[test]
fn each_entry_that_makes_no_model_fails_with_its_message_and_line() {
    for [model, message, place, in_log] in FAILURES {
        fails(model, message, place, in_log);
    }
}
