// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layout of the help: commands in groups, examples before options, and a brief form for `-h`.

use whylate_model::sources;

use crate::cli::generate::EXAMPLES;
use crate::render::text::fit::terminal_columns;
use crate::render::text::pad::Spaces;
use crate::terminal::wrapped;

/// Help template with the examples before the list of options.
const EXAMPLES_FIRST: &str = "{about}{after-help}\n\n{usage-heading} {usage}\n\n{all-args}";
/// Column at which the descriptions of commands begin, and the maximum width of the help, which is clap's.
const ABOUT_COLUMN: usize = 14;
const MAX_COLUMNS: usize = 100;
/// Number of examples that `-h` has.
const BRIEF_EXAMPLES: usize = 2;
/// Maximum length of the description of a command in `whylate -h`, and of an option in `-h` of a command.
const BRIEF_ABOUT: usize = 66;
/// Maximum length of the first line of `whylate -h`.
const BRIEF_TITLE: usize = 30;
const BRIEF_HELP: usize = 50;
/// Options that `-h` has, of commands with many.
const MAIN_OPTIONS: [(&str, &[&str]); 13] = [
    ("wq", &["table", "by", "slower", "why", "worst", "rank_by", "duration", "json", "output"]),
    ("timerlat", &["auto", "thread", "cpus", "duration", "worst", "why"]),
    ("timerlat top", &["quiet", "auto", "irq", "thread", "cpus", "duration", "worst", "why", "json"]),
    ("timerlat hist", &["bucket_size", "entries", "thread", "cpus", "duration", "percentiles", "worst", "why"]),
    ("irqsoff", &["histogram", "slower", "why", "worst", "timers", "preempt", "cpus", "duration", "json"]),
    ("offcpu", &["duration", "output", "pid", "comm", "blocked", "why", "worst"]),
    ("sqpoll", &["pid", "why", "worst", "rank_by", "duration", "json", "output"]),
    ("sqpoll sweep", &["filename", "iodepth", "bs", "rw", "runtime", "json"]),
    ("block", &["table", "by", "disk", "slower", "why", "worst", "rank_by", "duration", "json"]),
    ("top", &["every", "sources", "from", "to", "at", "pid", "comm", "cgroup", "history"]),
    ("import", &["files", "output", "json", "pid", "comm", "slower", "worst", "by"]),
    ("record", &["output", "duration", "sources", "why", "every", "keep", "max_size", "ring", "on_late"]),
    ("serve", &["listen", "sources", "why", "every", "duration", "record", "keep", "max_size", "ring", "on_late"]),
];
/// Commands that are not sources, grouped for the help.
const OTHERS: [(&str, &[&str]); 8] = [
    ("Live screen", &["top"]),
    ("Programs", &["run"]),
    ("Recordings", &["record", "replay", "report", "diff", "export"]),
    ("Fleets", &["serve"]),
    ("Other tools", &["import"]),
    ("Self-test", &["selftest", "inject"]),
    ("Machine", &["doctor"]),
    ("Help", &["help", "completions"]),
];

/// Adds help templates: commands in groups, and each command's examples before its options. `-h` is brief.
pub fn arranged(command: clap::Command, is_brief: bool) -> clap::Command {
    let about = |command: &clap::Command| command.get_about().map(ToString::to_string).unwrap_or_default();
    let shown = || command.get_subcommands().filter(|command| !command.is_hide_set());
    if is_brief {
        let line =
            |command: &clap::Command| format!("  {:<12}{}\n", command.get_name(), brief(&about(command), BRIEF_ABOUT));
        // Completions matter only once, at installation: the long help lists them.
        let lines: String = shown().filter(|command| command.get_name() != "completions").map(line).collect();
        let template =
            format!("{{about}}\n\n{{usage-heading}} {{usage}}\n\n{lines}Options and examples: whylate --help");
        let first = brief(&about(&command), BRIEF_TITLE).to_owned();
        return command.about(first).help_template(template).mut_subcommands(|command| briefly(command, ""));
    }
    let columns = terminal_columns().map_or(MAX_COLUMNS, |columns| columns.min(MAX_COLUMNS));
    let line = |command: &clap::Command| {
        let about = wrapped(&about(command), columns.saturating_sub(ABOUT_COLUMN));
        let indent = format!("\n{}", Spaces(ABOUT_COLUMN));
        format!("  {:<12}{}\n", command.get_name(), about.join(&indent))
    };
    let mut groups = "Overview:\n  (none)      Watch this machine for 10 s with every available source\n  \
                      -p PID      Show what a program does with its time (also --comm, --cgroup)\n"
        .to_owned();
    groups += "\nSources:\n";
    groups.extend(shown().filter(|command| sources::named(command.get_name()).is_some()).map(line));
    for (heading, names) in OTHERS {
        groups += &format!("\n{heading}:\n");
        groups.extend(names.iter().filter_map(|name| command.find_subcommand(name)).map(line));
    }
    let template =
        format!("{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}\nOptions:\n{{options}}{{after-help}}");
    command.help_template(template).mut_subcommands(with_examples_first)
}

fn with_examples_first(command: clap::Command) -> clap::Command {
    let has_examples = command.get_after_help().is_some_and(|help| help.to_string().starts_with(EXAMPLES));
    let command = if has_examples { command.help_template(EXAMPLES_FIRST) } else { command };
    command.disable_help_subcommand(true).mut_subcommands(with_examples_first)
}

/// Leaves out all but the first examples, the main options, and the first clauses of their descriptions.
fn briefly(command: clap::Command, parents: &str) -> clap::Command {
    let path = format!("{parents} {}", command.get_name()).trim_start().to_owned();
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples: Vec<&str> = after.lines().take(1 + 2 * BRIEF_EXAMPLES).collect();
    let main = MAIN_OPTIONS.iter().find(|(name, _)| *name == path).map(|(_, main)| *main);
    let command = command.mut_args(|arg| {
        let is_main = main.map_or(!arg.is_hide_short_help_set(), |main| main.contains(&arg.get_id().as_str()));
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let help = brief(&help, BRIEF_HELP).to_owned();
        let has_value = arg.get_action().takes_values();
        arg.help(help).hide_short_help(!is_main).hide_default_value(has_value)
    });
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let about = brief(&about, BRIEF_ABOUT).to_owned();
    let command = command.about(about).after_help(examples.join("\n")).help_template(EXAMPLES_FIRST);
    command.disable_help_subcommand(true).mut_subcommands(|command| briefly(command, &path))
}

/// Returns the first clauses of a text: as many as fit, but at least one. A condition (`With FILE: ...`) is no clause, and
/// parentheses stay whole.
fn brief(text: &str, most: usize) -> &str {
    let (mut depth, mut ends) = (0, Vec::new());
    for (at, c) in text.char_indices() {
        let is_end = match c {
            ':' => text[at..].starts_with(": ") && !text.starts_with("With"),
            ';' | ',' => text[at + 1..].starts_with(' '),
            c => matches!(c, '(' | '['),
        };
        ends.extend((is_end && depth == 0).then_some(at));
        depth += i32::from(matches!(c, '(' | '[')) - i32::from(matches!(c, ')' | ']'));
    }
    ends.push(text.len());
    let end = ends.iter().rfind(|&&end| end <= most).unwrap_or(&ends[0]);
    text[..*end].trim_end()
}

/// Calls `check` with each visible command, its name with those of its parents, and its examples.
#[cfg(test)]
pub fn each_command(mut command: clap::Command, check: &mut dyn FnMut(&mut clap::Command, &str, &str)) {
    fn each(command: &mut clap::Command, parents: &str, check: &mut dyn FnMut(&mut clap::Command, &str, &str)) {
        let path = format!("{parents} {}", command.get_name()).trim_start().to_owned();
        let after = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
        let after = after.unwrap_or_default();
        let examples = after.strip_prefix(EXAMPLES).unwrap_or_default();
        check(command, &path, examples.split("\n\n").next().unwrap_or_default());
        for command in command.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            each(command, &path, check);
        }
    }
    command.build();
    each(&mut command, "", check);
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::parser::{Cli, command};

    #[test]
    fn brief_text_ends_with_a_clause() {
        for (text, most, shown) in [
            ("Width (us, or ns) of a step", 10, "Width"),
            ("With FILE: start, e.g. 10:00, 10m ago", 30, "With FILE: start, e.g. 10:00"),
            ("Only this span, e.g. ..10:05 or now", 80, "Only this span, e.g. ..10:05 or now"),
            ("No clause fits; none", 3, "No clause fits"),
        ] {
            assert_eq!(brief(text, most), shown);
        }
    }

    #[test]
    fn short_help_fits_a_screen() {
        let mut wrong = String::new();
        each_command(arranged(Cli::command(), true), &mut |command, path, _| {
            let help = command.clone().term_width(80).render_help().to_string();
            let (lines, is_wide) =
                (help.trim_end().lines().count(), help.lines().any(|line| line.chars().count() > 80));
            if lines > 25 || is_wide {
                wrong += &format!("{path}: {lines} lines\n{help}\n");
            }
        });
        assert!(wrong.is_empty(), "{wrong}");
    }

    #[test]
    fn every_command_is_in_a_help_group() {
        let help = command().render_help().to_string();
        for command in Cli::command().get_subcommands() {
            let lines = help.lines().filter(|line| line.split_whitespace().next() == Some(command.get_name()));
            assert_eq!(lines.count(), usize::from(!command.is_hide_set()), "{}: {help}", command.get_name());
        }
    }

    #[test]
    fn help_of_each_command_starts_with_examples() {
        fn check(command: &mut clap::Command) {
            for command in
                command.get_subcommands_mut().filter(|command| !command.is_hide_set() && command.get_name() != "help")
            {
                let help = command.render_long_help().to_string();
                let (examples, usage) = (help.find("examples:"), help.find("Usage:"));
                assert!(examples.is_some() && examples < usage, "{help}");
                check(command);
            }
        }
        let mut command = command();
        command.build();
        check(&mut command);
    }
}
