//! `deps`: the libraries of a tree of tiny ones, and of the checkout's own torch.

use std::fs;

use crate::{
    sandbox::{LIBTORCH, Sandbox, assert_run},
    schemas::check,
    wheels::{link, wheels},
};

const DEPS: [&str; 5] = ["deps", "fake", "-q", "--libtorch", "site-packages/torch"];

#[test]
fn libraries_are_listed_with_sizes_users_and_folders() {
    let sandbox = Sandbox::built();
    let torch = wheels(&sandbox);
    assert_run!(sandbox, DEPS, @"
    LIBRARY  SIZE  NEEDED BY  FOLDER
    libtorch_cpu.so  [SIZE]  precast  torch/lib
    libc10.so  [SIZE]  libtorch_cpu.so  torch/lib
    libcudart.so.13  [SIZE]  libtorch_cpu.so  nvidia/cu13/lib
    total  [SIZE]  3 files

    of the host: ld-linux-x86-64.so.2, libc.so.6, libgcc_s.so.1, libm.so.6, libstdc++.so.6
    ");
    let document = sandbox.json(&DEPS);
    check("deps", &document);
    assert_eq!(document["releases"][0]["model"], "fake");
    assert_eq!(document["releases"][0]["seq"], 1);
    assert_eq!(document["cuda"], false);
    let files = document["files"].as_array().unwrap();
    let size = |file: &serde_json::Value| {
        let path = file["path"].as_str().unwrap();
        let path = path.strip_prefix("[ROOT]/").unwrap();
        fs::metadata(sandbox.path(path)).unwrap().len()
    };
    let sizes: u64 = files.iter().map(size).sum();
    assert_eq!(document["bytes"], sizes);
    let all = document["environment"]["bytes"].as_u64().unwrap();
    assert!(all > sizes, "{document:#}");
    // All models where none is named.
    let plain = sandbox.json(&["deps", "-q", "--libtorch", "site-packages/torch"]);
    assert_eq!(plain["files"], document["files"]);
    let other = ["deps", "other", "--libtorch", "site-packages/torch"];
    sandbox.run(&other).exits(3);
    let nowhere = sandbox
        .run(&["deps", "fake", "--libtorch", "nowhere"])
        .exits(2);
    nowhere.says("there is no `libtorch_cpu.so` in `nowhere/lib` or `nowhere`");
    // A torch that the release is not for.
    let text = "__version__ = '2.99.0'\ncuda = None\ngit_version = 'abc'\n";
    fs::write(torch.join("version.py"), text).unwrap();
    let ran = sandbox.ok(&DEPS);
    ran.says("warning: torch 2.99.0 in `[ROOT]/site-packages/torch/lib` is not the one of the release: 2.");
}

#[test]
fn a_missing_library_is_named_with_its_user_and_where_it_was_looked_for() {
    let sandbox = Sandbox::built();
    let torch = wheels(&sandbox);
    fs::remove_file(sandbox.path("site-packages/nvidia/cu13/lib/libcudart.so.13")).unwrap();
    let ran = sandbox.run(&DEPS).exits(1);
    ran.prints(
        "\nmissing: libcudart.so.13, needed by libtorch_cpu.so; it is not in \
         `[ROOT]/site-packages/nvidia/cu13/lib`, `[ROOT]/site-packages/torch/lib`, the folders of the system\n",
    );
    check("deps", &sandbox.json(&DEPS));
    // A file that is no library.
    fs::write(torch.join("lib/libc10.so"), "text").unwrap();
    let ran = sandbox.run(&DEPS).exits(2);
    ran.says("torch/lib/libc10.so` is not a sound 64-bit shared object");
}

#[test]
fn a_library_of_the_system_is_not_a_file_to_give() {
    let sandbox = Sandbox::built();
    let torch = wheels(&sandbox);
    let needed = ["libstdc++.so.6", "libown.so", "libc.so.6"];
    link(&torch.join("lib/libc10.so"), &needed, &["-rpath,$ORIGIN"]);
    // Its folder is named by LD_LIBRARY_PATH.
    link(&sandbox.path("own/libown.so"), &[], &[]);
    let mut command = sandbox.command(&[&DEPS[..], &["--format", "json"]].concat());
    command.env("LD_LIBRARY_PATH", sandbox.path("own"));
    let document = sandbox.output(&mut command).json();
    let has = |list: &str, name: &str| {
        let mut all = document[list].as_array().unwrap().iter();
        all.any(|one| one["name"] == name)
    };
    assert!(has("files", "libown.so"), "{document:#}");
    assert!(!has("files", "libstdc++.so.6"), "{document:#}");
    assert!(has("host", "libstdc++.so.6"), "{document:#}");
}

/// The torch of the checkout, of which nothing is copied.
#[test]
fn the_checkouts_own_torch_has_all_that_a_cpu_release_needs() {
    let sandbox = Sandbox::built();
    let document = sandbox.json(&["deps", "fake", "-q", "--libtorch", LIBTORCH]);
    assert_eq!(document["missing"], serde_json::json!([]), "{document:#}");
    let files = document["files"].as_array().unwrap();
    for (name, is_needed) in [
        ("libtorch_cpu.so", true),
        ("libc10.so", true),
        ("libtorch_cuda.so", false),
        ("libtorch_python.so", false),
    ] {
        let is_there = files.iter().any(|file| file["name"] == name);
        assert_eq!(is_there, is_needed, "{name}: {document:#}");
    }
    let bytes = document["bytes"].as_u64().unwrap();
    assert!(bytes > 100 << 20 && bytes < document["environment"]["bytes"].as_u64().unwrap());
    assert!(
        files.iter().all(|file| file["opened"] == false),
        "{document:#}"
    );
}

#[test]
fn a_gpu_release_needs_the_cuda_half() {
    let sandbox = Sandbox::built();
    let torch = wheels(&sandbox);
    let store = precast::Store::open(sandbox.path("artifacts")).unwrap();
    let mut release = store.releases().get("fake", None).unwrap().unwrap();
    let program = store.records().program(&release.programs[0]);
    let mut program = program.unwrap().unwrap();
    program.id = precast::Digest::of(b"on a GPU");
    program.target.device = precast::target::DeviceKind::Cuda;
    store.records().put_program(&program).unwrap();
    release.programs = vec![program.id];
    store.releases().put(&release).unwrap();
    let ran = sandbox.run(&DEPS).exits(1);
    ran.prints("missing: libtorch_cuda.so, needed by precast;");
    let lib = torch.join("lib");
    let needed = ["libtorch_cpu.so", "libcuda.so.1"];
    link(&lib.join("libtorch_cuda.so"), &needed, &[]);
    link(&lib.join("libtorch_cuda_linalg.so"), &[], &[]);
    let ran = sandbox.ok(&DEPS);
    let lines: Vec<&str> = ran.stdout.lines().skip(4).collect();
    assert!(lines[0].starts_with("libtorch_cuda.so "), "{}", ran.text());
    assert!(
        lines[1].starts_with("libtorch_cuda_linalg.so "),
        "{}",
        ran.text()
    );
    assert!(
        lines[1].contains("  libtorch_cuda.so, while it runs  "),
        "{}",
        ran.text()
    );
    // The driver is the host's own, be it there or not.
    ran.prints("libcuda.so.1");
    assert_eq!(sandbox.json(&DEPS)["cuda"], true);
}
