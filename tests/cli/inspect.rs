//! `ls` and `show`, as text and as JSON.

use crate::sandbox::{Sandbox, assert_run};

#[test]
fn a_store_without_anything() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["ls"], @"
    exit code 2
    ----- stderr
    error: `artifacts` is not a store: there is no such folder
    hint: `precast build` makes one; `--store` says where it is
    ");
}

#[test]
fn programs_are_listed_and_shown() {
    let sandbox = Sandbox::built();
    assert_run!(sandbox, ["ls"], @"
    exit code 0
    ----- stdout
    ID  MODEL  MODULE  BUCKET  STATE  TARGET  STEPS  SIZE  AGE  USED
    [ID]  fake  affine  batch=1  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  batch=4  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  eager  failed  [TIME]
    ");
    let listed = sandbox.json(&["ls"]);
    assert_eq!(listed["schema"], 1);
    let programs = listed["programs"].as_array().unwrap();
    assert_eq!(programs.len(), 2, "{listed}");
    let id = programs[0]["id"].as_str().unwrap();
    // Any unique prefix is accepted.
    for id in [id, &id[..12], &id[..6]] {
        assert_eq!(sandbox.run(&["show", id]).code, 0);
    }
    assert_run!(sandbox, ["show", &id[..12]], @r#"
    exit code 0
    ----- stdout
    program [DIGEST]
    fake affine batch=1
    for [TARGET]
    smaller requests are padded

    in  x: float32[batch=1, 3]
     └─ (whole) [ID]  (x) -> (%1), 1 weights
    out  out: float32[batch=1, 3] = %1

    artifact [ID]  [SIZE], 1 steps

    receipt
      seconds
        capture [NUMBER]
      gate
        outputs
          -
            name out
            max_abs 0.0
            max_rel 0.0
            cosine [NUMBER]
            rtol 0.0001
            atol 0.00002377687454223633
        deterministic true
        seconds_per_run [NUMBER]

    key
      kind request
      format 1
      protocol 1
      common
        model fake
        entry model:load
        samples null
        sources
          model.py [DIGEST]
        packages
          torch [TORCH]
        target
          os linux
          arch x86_64
          isa native
          features [FEATURES]
          device cpu
          sm null
          torch [TORCH]
          torch_git [GIT]
          cuda 13.0
          cxx11_abi true
      module affine
      path
      method forward
      inputs
        -
          name x
          dtype float32
          shape [1,3]
          stride [3,1]
          dims ["batch",null]
          pad 0.0
          range null
      sizes
        batch 1
      regions []
      compiles true
      dynamic false
      backend inductor
      mode default
      options {}
      passes []

    provenance
      precast 0.1.0
      created [TIME]
    "#);
}

#[test]
fn help_and_version_are_data() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["--version"], @"
    exit code 0
    ----- stdout
    precast 0.1.0
    ");
    assert_run!(sandbox, ["frobnicate"], @"
    exit code 2
    ----- stderr
    error: unrecognized subcommand 'frobnicate'

    Usage: precast [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
    assert_eq!(sandbox.run(&["--help"]).code, 0);
    assert_eq!(sandbox.run(&["build", "--help"]).code, 0);
}
