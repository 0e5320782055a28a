use std::process::Command;

use super::*;

/// Links an empty shared object that needs `needed`, with the further options `flags`.
fn link(path: &Path, needed: &[&str], flags: &[&str]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let stubs = tempfile::tempdir().unwrap();
    let run = |to: &Path, args: &[String]| {
        let name = to.file_name().unwrap().to_str().unwrap();
        let soname = format!("-Wl,--no-as-needed,-soname,{name}");
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-nostdlib", &soname, "-o"]).arg(to);
        gcc.args(["-x", "c", "/dev/null", "-x", "none"]).args(args);
        let done = gcc.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let mut args: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    for name in needed {
        let stub = stubs.path().join(name);
        run(&stub, &[]);
        args.push(stub.display().to_string());
    }
    run(path, &args);
}

/// The search path of the loader's newer kind, which does not inherit others.
const NEW: &str = "-Wl,--enable-new-dtags,-rpath,$ORIGIN";

/// A tree as wheels have it, with a CUDA half.
fn wheels() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let site = root.path().canonicalize().unwrap().join("site-packages");
    fs::create_dir(&site).unwrap();
    let lib = site.join("torch/lib");
    let old = "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../nvidia/cudnn/lib:$ORIGIN";
    // The places, the names, what they need, and their search path.
    for (folder, name, needed, flags) in [
        (
            "torch/lib",
            CPU,
            &["libc10.so", "libcudart.so.13", "libc.so.6", "libz.so.1"][..],
            &[old][..],
        ),
        ("torch/lib", "libc10.so", &["libm.so.6"], &[old]),
        (
            "torch/lib",
            CUDA,
            &[CPU, "libcudnn.so.9", "libcublasLt.so.13", "libcuda.so.1"],
            &[old],
        ),
        (
            "torch/lib",
            "libtorch_cuda_linalg.so",
            &["libcusolver.so.12"],
            &[old],
        ),
        // It has no search path: it inherits the path of the library that needs it.
        ("nvidia/cu13/lib", "libcudart.so.13", &[], &[]),
        ("nvidia/cu13/lib", "libcublasLt.so.13", &[], &[NEW]),
        (
            "nvidia/cu13/lib",
            "libcusolver.so.12",
            &["libinner.so"],
            &[],
        ),
        ("nvidia/cu13/lib", "libinner.so", &[], &[]),
        ("nvidia/cu13/lib", "libnvrtc.so.13", &[], &[]),
        ("nvidia/cu13/lib", "libnvrtc-builtins.so.13.0", &[], &[]),
        ("nvidia/cu13/lib", "libnvrtc.alt.so.13", &[], &[]),
        ("nvidia/cudnn/lib", "libcudnn.so.9", &[], &[]),
        ("nvidia/cudnn/lib", "libcudnn_ops.so.9", &[], &[]),
        // The system of the tests.
        ("../system", "libz.so.1", &[], &[]),
        ("../system", "libc.so.6", &[], &[]),
    ] {
        link(&site.join(folder).join(name), needed, flags);
    }
    (root, lib)
}

/// What a release for a GPU asks for.
fn cuda() -> Asked {
    Asked {
        cuda: true,
        ..Asked::default()
    }
}

/// What a release asks for that has this object.
fn of_object(path: &Path, name: &str) -> Asked {
    let name = name.to_owned();
    let dynamic = dynamic::of_bytes(&fs::read(path).unwrap(), &name).unwrap();
    Asked {
        objects: vec![Object { name, dynamic }],
        ..Asked::default()
    }
}

fn names(files: &[Library]) -> Vec<&str> {
    files.iter().map(|file| file.name.as_str()).collect()
}

fn search(root: &Path) -> Search {
    Search {
        system: vec![root.join("system")],
        ..Search::default()
    }
}

fn walked(root: &Path, lib: &Path, asked: &Asked) -> Needs {
    needs(lib, asked, &search(root)).unwrap()
}

#[test]
fn a_cpu_release_needs_the_closure_of_the_cpu_library() {
    let (root, lib) = wheels();
    let needs = walked(root.path(), &lib, &Asked::default());
    assert_eq!(names(&needs.files), [CPU, "libc10.so", "libcudart.so.13"]);
    assert_eq!(needs.files[1].needed_by, [CPU]);
    let cudart = lib.join("../../nvidia/cu13/lib/libcudart.so.13");
    assert_eq!(needs.files[2].path, cudart.canonicalize().unwrap());
    let sizes = needs
        .files
        .iter()
        .map(|file| fs::metadata(&file.path).unwrap().len());
    assert_eq!(needs.bytes(), sizes.sum::<u64>());
    let host = needs
        .host
        .iter()
        .map(|one| (one.name.as_str(), one.path.is_some()));
    let expected = [
        ("libc.so.6", true),
        ("libm.so.6", false),
        ("libz.so.1", true),
    ];
    assert_eq!(host.collect::<Vec<_>>(), expected);
    assert_eq!(needs.missing, []);
}

#[test]
fn objects_of_the_store_get_what_libtorch_has() {
    let (root, lib) = wheels();
    let object = root.path().join("object.so");
    link(&object, &["libcudart.so.13", "libz.so.1", "libown.so"], &[]);
    let asked = of_object(&object, "artifact 0123");
    let needs = walked(root.path(), &lib, &asked);
    assert_eq!(needs.files[2].needed_by, [CPU, "artifact 0123"]);
    assert_eq!(needs.missing[0].name, "libown.so");
    // The loader finds it in a folder that the user names.
    let own = root.path().join("own");
    link(&own.join("libown.so"), &[], &[]);
    let library_path = vec![own];
    let found = Search {
        library_path,
        ..search(root.path())
    };
    let needs = super::needs(&lib, &asked, &found).unwrap();
    assert_eq!(needs.missing, []);
    assert_eq!(needs.files.last().unwrap().name, "libown.so");
}

#[test]
fn a_gpu_release_needs_also_what_is_opened_later() {
    let (root, lib) = wheels();
    let asked = cuda();
    let needs = walked(root.path(), &lib, &asked);
    let (linked, opened): (Vec<_>, Vec<_>) = needs.files.into_iter().partition(|file| !file.opened);
    let cpu = [CPU, "libc10.so", "libcudart.so.13"];
    let gpu = [CUDA, "libcudnn.so.9", "libcublasLt.so.13"];
    assert_eq!(names(&linked), [cpu, gpu].concat());
    let later = "libtorch_cuda_linalg.so libcusolver.so.12 libinner.so libcudnn_ops.so.9 libnvrtc.so.13 \
                 libnvrtc-builtins.so.13.0";
    assert_eq!(names(&opened).join(" "), later);
    assert_eq!(opened[3].needed_by, ["libcudnn.so.9"]);
}

#[test]
fn a_runpath_takes_the_place_of_inherited_folders() {
    let (root, lib) = wheels();
    link(&lib.join("libc10.so"), &["libnvrtc.so.13"], &[NEW]);
    let needs = walked(root.path(), &lib, &Asked::default());
    assert_eq!(needs.missing[0].name, "libnvrtc.so.13");
    assert_eq!(needs.missing[0].searched, [lib]);
}

#[test]
fn a_library_that_is_cut_off_is_damaged() {
    let (_root, lib) = wheels();
    let whole = fs::read(lib.join(CPU)).unwrap();
    for length in [0, 4, 64, 200, 400] {
        let cut = dynamic::of_bytes(&whole[..length], "object");
        assert!(cut.is_err(), "{length}");
    }
}

#[test]
fn a_machine_without_the_folders_of_an_absolute_path_has_no_files_in_them() {
    let (root, lib) = wheels();
    let other = root.path().canonicalize().unwrap().join("other");
    link(&other.join("libown.so"), &[], &[]);
    let rpath = format!("-Wl,-rpath,{}:$ORIGIN", other.display());
    link(&lib.join("libc10.so"), &["libown.so"], &[&rpath]);
    let site = lib.ancestors().nth(2).unwrap().to_owned();
    let here = walked(root.path(), &lib, &Asked::default());
    assert_eq!(here.files.last().unwrap().path, other.join("libown.so"));
    let within = Some(site);
    let there = Search {
        within,
        ..search(root.path())
    };
    let there = needs(&lib, &Asked::default(), &there).unwrap();
    assert_eq!(there.missing[0].name, "libown.so");
    assert_eq!(there.missing[0].searched, [lib]);
}

#[test]
fn a_release_asks_for_what_its_objects_need() {
    use precast_store::testing;
    let (dir, store) = testing::store();
    let object = |name: &str, needed: &[&str]| {
        let path = dir.path().join(name);
        link(&path, needed, &[]);
        store.objects().put_file(&path).unwrap().0
    };
    let mut artifact = testing::artifact(&store, "block");
    artifact.object = object("artifact.so", &["libgomp.so.1"]);
    artifact.libraries = vec![object("operators.so", &["libops.so"])];
    let artifact = store.records().put_artifact(&artifact).unwrap();
    let program = testing::put_program(&store, "m", 1, &[artifact.id]);
    let mut release = testing::release("m", None, &[program.id]);
    for torch in ["2.11.0", "2.15.0"] {
        release.shims.push(precast_store::record::Shim {
            object: object(&format!("shim-{torch}.so"), &[&format!("lib{torch}.so")]),
            cuda: None,
            ..testing::shim(&store, torch)
        });
    }
    let needed = |torch| {
        let asked = asked(&store, std::slice::from_ref(&release), torch).unwrap();
        assert!(!asked.cuda);
        assert!(asked.torches.contains(&"2.15.0".to_owned()), "{asked:?}");
        let objects = asked.objects.into_iter();
        let needed = objects.flat_map(|object| object.dynamic.needed);
        needed.collect::<Vec<_>>()
    };
    let all = ["lib2.15.0.so", "libops.so", "libgomp.so.1"];
    assert_eq!(needed(Some("2.15.0")), all);
    assert_eq!(needed(None).len(), 4);
    // An object that is no library has a name in the error.
    let mut broken = artifact.clone();
    broken.id = Digest::of(b"broken");
    broken.object = store.objects().put_bytes(b"text").unwrap();
    store.records().put_artifact(&broken).unwrap();
    let program = testing::put_program(&store, "m", 2, &[broken.id]);
    let release = testing::release("m", None, &[program.id]);
    let error = asked(&store, &[release], None).unwrap_err().to_string();
    let name = format!("artifact {}", broken.object.short());
    assert!(error.starts_with(&name), "{error}");
}

/// The torch of the checkout, with everything that a GPU needs if it has CUDA.
#[test]
fn the_checkouts_own_torch_is_complete() {
    let named = std::env::var_os("LIBTORCH").unwrap_or_default();
    let Some(lib) = torch_folder(Path::new(&named)) else {
        return;
    };
    let asked = Asked {
        cuda: lib.join(CUDA).exists(),
        ..Asked::default()
    };
    let search = Search {
        system: system_folders(),
        ..Search::default()
    };
    let needs = needs(&lib, &asked, &search).unwrap();
    assert_eq!(needs.missing, []);
    let files = names(&needs.files);
    assert!(files.contains(&"libc10.so"), "{files:?}");
    let cudnn = ["libcudnn.so.9", "libcudnn_ops.so.9"].map(|name| files.contains(&name));
    assert_eq!(cudnn[0], cudnn[1], "{files:?}");
    assert!(needs.host.iter().any(|library| library.name == "libc.so.6"));
}

/// The runtime also opens it, for operator libraries that are linked with all of torch.
#[test]
fn an_object_that_names_all_of_libtorch_brings_the_cuda_half() {
    let (root, lib) = wheels();
    link(&lib.join(WHOLE), &[CPU, CUDA], &["-Wl,-rpath,$ORIGIN"]);
    let object = root.path().join("operators.so");
    link(&object, &[WHOLE], &[]);
    let asked = of_object(&object, "operator library 0123");
    let needs = walked(root.path(), &lib, &asked);
    let linked = needs.files.iter().filter(|file| !file.opened);
    let users = |name: &str| {
        let mut files = needs.files.iter();
        &files.find(|file| file.name == name).unwrap().needed_by
    };
    assert_eq!(linked.count(), 7);
    assert_eq!(*users(WHOLE), ["precast", "operator library 0123"]);
    assert_eq!(*users(CUDA), [WHOLE]);
}
