//! `plan` and `build` as they are seen in a terminal, and where there is none.

use crate::{
    pty,
    sandbox::{FILTERS, Sandbox},
};

fn shown(sandbox: &Sandbox, args: &[&str], columns: u16, extra: &[(&str, &str)]) -> pty::Shown {
    let mut command = sandbox.command(args);
    command
        .env("TERM", "xterm-256color")
        .envs(extra.iter().copied());
    pty::run(&mut command, columns)
}

macro_rules! assert_screen {
    ($text:expr, @$snapshot:literal) => {
        insta::with_settings!({ filters => FILTERS.to_vec() }, {
            insta::allow_duplicates! { insta::assert_snapshot!($text, @$snapshot) }
        })
    };
}

/// Makes the model one that fails at one of its buckets.
fn failing(sandbox: &Sandbox) {
    sandbox.append("model.py", "# fake: compile fails batch=4");
}

#[test]
fn a_plan_in_terminals() {
    let sandbox = Sandbox::new();
    for columns in [40, 120] {
        let plan = shown(&sandbox, &["plan"], columns, &[]);
        assert_eq!(plan.code, 0);
        assert_screen!(pty::visible(&plan.text), @"
        ‹yellow›build  ‹› affine batch=1  never built
        ‹yellow›build  ‹› affine batch=4  never built
        ‹yellow›build  ‹› affine eager  never built
        3 of 3 programs would be built
        ");
    }
    let plain = shown(&sandbox, &["plan"], 80, &[("NO_COLOR", "1")]).text;
    assert!(!plain.contains('\x1b'), "{plain}");
    assert_eq!(plain, sandbox.run(&["plan"]).stdout);
}

#[test]
fn a_build_draws_bars_and_leaves_only_what_it_did() {
    for columns in [40, 120] {
        let sandbox = Sandbox::new();
        let build = shown(&sandbox, &["build"], columns, &[]);
        assert_eq!(build.code, 0, "{}", build.text);
        // Bars were drawn, in colours, and are gone.
        for part in ["Building", "/3 programs", "starting Python", "\x1b[32m"] {
            assert!(
                build.text.contains(part),
                "`{part}` is not in {:?}",
                build.text
            );
        }
        let words = build
            .screen
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert_screen!(words, @"left out affine eager: the fake model has no dynamic dimensions built 2 programs, 2 artifacts compiled, 0 programs were there already ([TIME]) published fake release 1");
    }
}

#[test]
fn bars_are_not_coloured_where_nobody_wants_it() {
    let sandbox = Sandbox::new();
    failing(&sandbox);
    let build = shown(&sandbox, &["build"], 100, &[("NO_COLOR", "1")]);
    let coloured = |text: &str| {
        text.split("\x1b[").skip(1).any(|rest| {
            let end = rest.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(0);
            rest[end..].starts_with('m')
        })
    };
    assert!(build.text.contains("Building"), "{:?}", build.text);
    assert!(!coloured(&build.text), "{:?}", build.text);
    let sandbox = Sandbox::new();
    let build = shown(&sandbox, &["build", "--color", "never"], 100, &[]);
    assert!(!coloured(&build.text), "{:?}", build.text);
}

#[test]
fn without_a_terminal_a_build_prints_lines() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&["build"]);
    assert!(!ran.stderr.contains(['\x1b', '\r']), "{}", ran.text());
    assert!(
        ran.stderr.contains("published: affine batch=4"),
        "{}",
        ran.text()
    );
}
