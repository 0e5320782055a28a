//! `precast --help`, shell completions and man pages: all of them from the same definition of the command line.
//!
//! The commands are grouped by task. A test checks that every command is in exactly one group.

use std::{fs, io::Write, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::builder::StyledStr;
use clap_complete::Shell;

use super::text::count;

/// Headings and the commands under them.
const GROUPS: [(&str, &[&str]); 4] = [
    (
        "Building, at deploy time",
        &["doctor", "init", "check", "build", "plan"],
    ),
    (
        "Running, in production",
        &["deps", "export", "run", "train", "bench", "stats"],
    ),
    (
        "Looking, at what is there and why",
        &[
            "ls", "show", "du", "log", "why", "diff", "verify", "report", "inspect",
        ],
    ),
    (
        "Keeping house",
        &[
            "release",
            "push",
            "pull",
            "remote",
            "gc",
            "completions",
            "man",
        ],
    ),
];

/// Common questions, each with its commands.
const QUESTIONS: [(&str, &str); 9] = [
    ("Can this machine build and run?", "doctor"),
    ("Will my model compile?", "check"),
    ("What is in this store?", "ls, du, show ID"),
    ("Will it run on this host?", "show ID, under `target`"),
    ("What does a host need?", "deps MODEL, export DIR MODEL"),
    ("Why was this rebuilt?", "why MODULE, diff MODEL@1 MODEL@2"),
    ("What did it cost?", "show ID, under `receipt`; report"),
    ("What is it worth?", "bench MODULE, stats FILE, report"),
    ("What can be deleted?", "du, gc --dry-run"),
];

#[derive(clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell to complete in
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct ManArgs {
    /// The folder to write the pages to, as `/usr/local/share/man/man1`
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Returns the command line with its commands grouped.
pub(super) fn command(plain: clap::Command) -> clap::Command {
    let template = template(&plain);
    plain.help_template(template)
}

fn template(command: &clap::Command) -> StyledStr {
    let styles = command.get_styles();
    let (head, literal) = (styles.get_header(), styles.get_literal());
    let width = GROUPS
        .iter()
        .flat_map(|(_, names)| *names)
        .map(|name| name.len())
        .max();
    let width = width.unwrap_or(0);
    let mut text = String::from("{about}\n\n{usage-heading} {usage}\n");
    for (heading, names) in GROUPS {
        text += &format!("\n{head}{heading}:{head:#}\n");
        for name in names.iter().copied() {
            let about = command
                .find_subcommand(name)
                .and_then(clap::Command::get_about);
            let about = about.map(StyledStr::to_string).unwrap_or_default();
            text += &format!("  {literal}{name:<width$}{literal:#}  {about}\n");
        }
    }
    text.push_str(&format!(
        "\n{head}Questions, and what answers them:{head:#}\n"
    ));
    for (question, answer) in QUESTIONS {
        text.push_str(&format!("  {question:<31} {answer}\n"));
    }
    text.push_str(&format!(
        "\n{head}Options:{head:#}\n{{options}}\n\n`precast help COMMAND` says more about one command. Exit codes: 0 done, \
         1 a check failed,\n2 wrong usage or spec, 3 not in the store, 4 wrong target, 70 a bug, 130 interrupted."
    ));
    StyledStr::from(text)
}

/// Writes a completion script to stdout.
pub(super) fn completions(args: &CompletionsArgs, mut command: clap::Command) -> Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "precast", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(0)
}

/// Writes a page for the program and one for each command.
pub(super) fn man(args: &ManArgs, mut root: clap::Command) -> Result<u8> {
    let folder = &args.folder;
    fs::create_dir_all(folder).with_context(|| format!("can't make `{}`", folder.display()))?;
    root.build();
    let mut pages = vec![("precast.1".to_owned(), root.clone())];
    for command in root
        .get_subcommands()
        .filter(|c| !c.is_hide_set() && c.get_name() != "help")
    {
        let name = format!("precast-{}", command.get_name());
        // clap borrows names for the life of the program.
        let leaked: &'static str = Box::leak(name.clone().into_boxed_str());
        pages.push((format!("{name}.1"), command.clone().name(leaked)));
    }
    let written = pages.len() as u64;
    for (name, command) in pages {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        let path = folder.join(&name);
        fs::write(&path, page).with_context(|| format!("can't write `{}`", path.display()))?;
    }
    note!("wrote {} to `{}`", count(written, "page"), folder.display());
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::{super::Cli, *};

    #[test]
    fn every_command_is_in_one_group() {
        let command = Cli::command();
        let known = command.get_subcommands();
        for known in known.filter(|command| !command.is_hide_set()) {
            let name = known.get_name();
            let groups = GROUPS.iter().filter(|(_, names)| names.contains(&name));
            assert_eq!(
                groups.count(),
                1,
                "`{name}` must be in one group of `precast --help`"
            );
        }
    }

    #[test]
    fn the_definition_is_sound() {
        command(Cli::command()).debug_assert();
    }
}
