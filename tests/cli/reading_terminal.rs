//! Output on narrow and wide terminals, with and without colours, and in a pipe.

use std::process::Command;

use crate::{
    pty,
    sample::{self, Sample, sample},
};

fn command(sample: &Sample, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command
        .args(args)
        .env_clear()
        .env("TERM", "xterm-256color")
        .env("PRECAST_STORE", &sample.path)
        .current_dir(sample.dir.path());
    command
}

/// Runs precast in a terminal.
fn shown(sample: &Sample, args: &[&str], columns: u16) -> String {
    let shown = pty::run(&mut command(sample, args), columns);
    assert_eq!(shown.code, 0, "{}", shown.text);
    shown.text
}

fn piped(sample: &Sample, args: &[&str]) -> String {
    let output = command(sample, args).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{args:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Every command that only prints, with arguments for the sample.
fn looks(sample: &Sample) -> Vec<Vec<String>> {
    let counts = sample::counts(sample.dir.path()).display().to_string();
    let (program, artifact) = (sample.program.short(), sample.artifact.short());
    let all = format!(
        "ls; ls --artifacts; ls --ids; ls --objects; du -q; du --by release -q; show {program}; show {artifact}; \
         show {}; log {program}; why encode; diff minilm@1 minilm@2; stats {counts}; release ls; --help; ls --format json",
        sample.failure.short()
    );
    let words = |line: &str| line.split(' ').map(str::to_owned).collect();
    all.split("; ").map(words).collect()
}

fn filtered(body: impl FnOnce()) {
    let mut settings = insta::Settings::clone_current();
    // Ages, right-aligned in their columns.
    settings.add_filter(r" +\d+[smhd]\b", " AGE");
    // The width of the column follows the ages.
    settings.add_filter(r" +(\S*AGE\b)", " $1");
    settings.add_filter(
        "  (this host has|‹red›not on this host:).*(\n    .*)*",
        "  HOST",
    );
    settings.bind(body);
}

#[test]
fn lists_and_drawings_in_terminals() {
    let sample = sample();
    let id = sample.program.short();
    for columns in [60, 160] {
        let ls = shown(&sample, &["ls"], columns);
        let du = shown(&sample, &["du", "-q"], columns);
        let show = shown(&sample, &["show", &id], columns);
        let plain = anstream::adapter::strip_str(&format!("{ls}{du}{show}")).to_string();
        for line in plain.lines() {
            assert!(line.chars().count() <= columns.into(), "{line}");
        }
        filtered(|| {
            insta::assert_snapshot!(format!("ls-{columns}"), pty::visible(&ls));
            insta::assert_snapshot!(format!("du-{columns}"), pty::visible(&du));
            insta::assert_snapshot!(format!("show-{columns}"), pty::visible(&show));
        });
    }
}

#[test]
fn colours_are_for_terminals_that_want_them_and_change_nothing_else() {
    let sample = sample();
    // Ages change while this runs, and their width moves the columns.
    let is_age = |word: &str| {
        let number = word.strip_suffix(['s', 'm', 'h', 'd']);
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let words = |line: &str| -> Vec<String> {
        let words = line.split_whitespace();
        words
            .map(|word| if is_age(word) { "AGE" } else { word }.to_owned())
            .collect()
    };
    let rows = |text: &str| text.lines().map(words).collect::<Vec<_>>();
    for args in looks(&sample) {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let coloured = shown(&sample, &args, 200);
        let plain = piped(&sample, &args);
        assert!(!plain.contains('\x1b'), "{args:?}");
        let stripped = anstream::adapter::strip_str(&coloured).to_string();
        assert_eq!(rows(&stripped), rows(&plain), "{args:?}");
        let ways = [("NO_COLOR", "1"), ("TERM", "dumb"), ("CLICOLOR", "0")];
        // They all come to one switch.
        let ways = if args == ["ls"] {
            &ways[..]
        } else {
            &ways[..1]
        };
        for (name, value) in ways {
            let mut command = command(&sample, &args);
            let shown = pty::run(command.env(name, value), 200).text;
            let visible = pty::visible(&shown);
            assert!(!shown.contains('\x1b'), "{name}: {args:?}: {visible}");
        }
        let never = shown(&sample, &[&args[..], &["--color", "never"]].concat(), 200);
        assert!(!never.contains('\x1b'), "{args:?}");
    }
    let forced = piped(&sample, &["ls", "--color", "always"]);
    assert!(forced.contains("\x1b[32mlive"), "{forced}");
}
