//! The page about containers: its `Containerfile` is applied to an exported folder, in a `chroot` that has nothing else
//! but the libraries that `precast deps` asks of a host.

use std::{fs, path::Path, process::Command};

use crate::{
    page::{blocks, built},
    sandbox::{LIBTORCH, Sandbox},
};

const FIRST: &str = "docs/src/guide/first-model.md";
const PAGE: &str = "docs/src/guide/container.md";

/// The instructions of a `Containerfile`.
#[derive(Default, Debug)]
struct Image {
    copied: Vec<(String, String)>,
    environment: Vec<String>,
    user: String,
    command: Vec<String>,
}

impl Image {
    fn parse(text: &str) -> Self {
        let mut image = Self::default();
        let list = |text: &str| serde_json::from_str::<Vec<String>>(text).unwrap();
        for line in text.lines() {
            let (instruction, rest) = line.split_once(' ').unwrap();
            match instruction {
                "FROM" => {}
                "COPY" => {
                    let (from, to) = rest.split_once(' ').unwrap();
                    image.copied.push((from.to_owned(), to.to_owned()));
                }
                "ENV" => image.environment.extend(rest.split(' ').map(str::to_owned)),
                "USER" => image.user = rest.to_owned(),
                "ENTRYPOINT" | "CMD" => image.command.extend(list(rest)),
                other => panic!("this test knows no `{other}`"),
            }
        }
        image
    }
}

/// Copies the libraries of the host into an image, where the loader looks for them.
fn base(sandbox: &Sandbox, image: &Path) {
    let deps = sandbox.json(&["deps", "-q"]);
    for library in deps["host"].as_array().unwrap() {
        let from = Path::new(library["path"].as_str().unwrap());
        let name = library["name"].as_str().unwrap();
        let folder = match name.starts_with("ld-linux") {
            true => "lib64",
            false => "usr/lib",
        };
        fs::create_dir_all(image.join(folder)).unwrap();
        fs::copy(from, image.join(folder).join(name)).unwrap();
    }
    for folder in ["dev", "proc", "data", "cache"] {
        fs::create_dir(image.join(folder)).unwrap();
    }
}

#[test]
fn the_containerfile_runs_an_exported_folder() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a chroot needs root");
        return;
    }
    let sandbox = built(FIRST);
    sandbox.tensors("inputs.safetensors", &[("x", &[5, 8], &[0.5; 40])]);
    let console = blocks(PAGE, "console").remove(0);
    let export: Vec<&str> = console.lines().collect();
    sandbox.ok(&["export", "host", "double", "--libtorch", LIBTORCH]);
    // The page's own commands.
    assert_eq!(export[0], "$ precast export host double");
    let mut first = Command::new("sh");
    first
        .args(["-ec", export[1].trim_start_matches("$ ")])
        .env_clear();
    let first = sandbox.output(first.current_dir(sandbox.path(""))).exits(0);
    first.prints("padded from batch=5\n");
    first.prints("float32 [5, 8]\n");
    assert!(!sandbox.files("host/store/ready").is_empty());

    let containerfile = Image::parse(&blocks(PAGE, "dockerfile").remove(0));
    let image = sandbox.path("image");
    fs::create_dir(&image).unwrap();
    base(&sandbox, &image);
    for (from, to) in &containerfile.copied {
        let to = image.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::rename(sandbox.path(from), to).unwrap();
    }
    let inputs = image.join("data/inputs.safetensors");
    fs::copy(sandbox.path("inputs.safetensors"), inputs).unwrap();
    // Read-only but for the cache, as `--read-only --tmpfs /cache:mode=1777` makes it.
    let script = "mount --bind . . && cd . && mount -o remount,bind,ro . && \
        mount --rbind /proc proc && mount --rbind /dev dev && mount -t tmpfs -o mode=1777 cache cache && \
        exec env -i $ENVIRONMENT \"$CHROOT\" --userspec=$OWNER . \"$@\"";
    let run = |more: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        command
            .args(&containerfile.command)
            .args(more)
            .current_dir(&image);
        command.env("ENVIRONMENT", containerfile.environment.join(" "));
        command
            .env("OWNER", &containerfile.user)
            .env("CHROOT", "/usr/sbin/chroot");
        sandbox.output(&mut command)
    };
    let answer = run(&["--format", "json"]).exits(0).json();
    assert_eq!(answer["rung"], "padded");
    assert_eq!(answer["outputs"][0]["shape"], serde_json::json!([5, 8]));
    // It did work as that user: nothing of the image could be written.
    run(&["--outputs", "/opt/host/outputs.safetensors"]).exits(2);
}
