// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line for clap. The arguments of each command are in the module of the command.

use std::ffi::OsString;
use std::io::{self, Write as _};

use clap::error::ErrorKind;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use whylate_model::sources;
use whylate_model::units::is_printable;

use crate::cli::generate::EXAMPLES;
use crate::cli::values::seconds_ns;
use crate::cli::{
    block, completions, diff, doctor, export, foreign, generate, help, import, inject, irqsoff, offcpu, overview,
    record, replay, report, run, selftest, serve, sqpoll, timerlat, top, wq,
};
use crate::render::color::When;

/// Shows why Linux is late: which work items, timers, interrupts and threads wait, for how long, and who made them
/// wait.
///
/// Without a command, it watches this machine for 10 s with every available source; with -p, --comm or --cgroup, it
/// shows what one program does with its time.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
#[command(override_usage = "whylate [DURATION] [OPTIONS]\n       whylate COMMAND [OPTIONS]")]
#[command(after_help = "\
examples:
    # what is late on this machine, and who causes it, in 10 s
    whylate
    # the same in a minute, with the culprits ranked by pod or service
    whylate 1m --rank-by cgroup
    # what one program does with its time
    whylate --comm postgres -d 30s
    # for cron: mail only if something was late
    whylate 1m --fail-if-late")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub look: overview::Arguments,
    #[arg(long, global = true, value_enum, value_name = "WHEN", hide_short_help = true, hide_possible_values = true)]
    #[arg(long_help = "Color what is late: auto (on a terminal, unless NO_COLOR is set), always or never")]
    pub color: Option<When>,
    /// Former name of `whylate help lost`
    #[arg(long, global = true, hide = true)]
    pub help_lost: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Wq(wq::Arguments),
    Timerlat(Box<timerlat::Arguments>),
    Irqsoff(irqsoff::Arguments),
    Offcpu(Box<offcpu::Arguments>),
    Sqpoll(sqpoll::Arguments),
    Block(block::Arguments),
    Top(Box<top::Arguments>),
    Run(run::Arguments),
    Record(record::Arguments),
    Serve(serve::Arguments),
    Replay(replay::Arguments),
    Diff(Box<diff::Arguments>),
    Export(export::Arguments),
    Import(import::Arguments),
    Report(report::Arguments),
    Inject(inject::Arguments),
    Selftest(selftest::Arguments),
    Doctor(doctor::Arguments),
    Help(help::Arguments),
    Completions(completions::Arguments),
    #[command(hide = true)]
    Generate(generate::Arguments),
}

/// Help template with the examples before the list of options.
const EXAMPLES_FIRST: &str = "{about}{after-help}\n\n{usage-heading} {usage}\n\n{all-args}";
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

pub fn parse() -> Result<Cli, clap::Error> {
    parse_words(&std::env::args_os().skip(1).collect::<Vec<_>>())
}

/// Parses the words after the program's name: of this command line, or of one that `whylate replay` shows a recording as.
pub fn parse_words(words: &[OsString]) -> Result<Cli, clap::Error> {
    let first = words.first().and_then(|word| word.to_str()).unwrap_or_default();
    if let Some(advice) = foreign::advice(first) {
        return Err(clap::Error::raw(ErrorKind::InvalidSubcommand, format!("{advice}\n")));
    }
    let mut line = vec![OsString::from("whylate")];
    match seconds_ns(first) {
        // `whylate 10` is `whylate -d 10s`.
        Ok(_) => {
            let unit = if first.ends_with(|c: char| c.is_ascii_digit() || c == '.') { "s" } else { "" };
            line.extend(["-d".into(), format!("{first}{unit}").into()]);
            line.extend_from_slice(&words[1..]);
        }
        Err(_) => line.extend_from_slice(words),
    }
    let is_brief = words.iter().take_while(|word| *word != "--").any(|word| word == "-h");
    arranged(Cli::command(), is_brief).try_get_matches_from(line).and_then(|matches| Cli::from_arg_matches(&matches))
}

/// Returns the command line with the help of each command.
pub fn command() -> clap::Command {
    arranged(Cli::command(), false)
}

/// Prints help or a usage error. Escapes words of the command line that are not printable.
///
/// # Errors
/// Fails if the output cannot be written.
pub fn print(error: &clap::Error) -> io::Result<()> {
    let is_safe = |word: OsString| word.to_string_lossy().chars().all(is_printable);
    if error.use_stderr() && !std::env::args_os().all(is_safe) {
        error.render().to_string().lines().for_each(|line| say!("{line}"));
        return Ok(());
    }
    error.print().and_then(|()| io::stdout().flush())
}

/// Adds help templates: commands in groups, and each command's examples before its options. `-h` is brief.
fn arranged(command: clap::Command, is_brief: bool) -> clap::Command {
    let about = |command: &clap::Command| command.get_about().map(ToString::to_string).unwrap_or_default();
    let shown = || command.get_subcommands().filter(|command| !command.is_hide_set());
    if is_brief {
        let line =
            |command: &clap::Command| format!("  {:<12}{}\n", command.get_name(), brief(&about(command), BRIEF_ABOUT));
        let lines: String = shown().map(line).collect();
        let template =
            format!("{{about}}\n\n{{usage-heading}} {{usage}}\n\n{lines}Options and examples: whylate --help");
        let first = brief(&about(&command), BRIEF_TITLE).to_owned();
        return command.about(first).help_template(template).mut_subcommands(|command| briefly(command, ""));
    }
    let line = |command: &clap::Command| format!("  {:<12}{}\n", command.get_name(), about(command));
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
        let is_main = main.is_none_or(|main| main.contains(&arg.get_id().as_str()));
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let help = brief(&help, BRIEF_HELP).to_owned();
        let has_value = arg.get_action().takes_values();
        arg.help(help).hide_short_help(!is_main).hide_default_value(has_value).hide_possible_values(has_value)
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::render::extension::EXTENSIONS;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn rejects_import_options_with_command() {
        let accepts = |line: &str| Cli::try_parse_from(line.split(' ')).is_ok();
        for line in
            ["run true", "run --help-lost", "run --import x --pid 5", "run --import x --comm y", "run true --pid 5"]
        {
            assert!(accepts(&format!("whylate {line}")), "{line}");
        }
        for line in
            ["run", "run --pid 5", "run --pid 5 true", "run --comm x -- true", "run --import x --pid 5 --comm y"]
        {
            assert!(!accepts(&format!("whylate {line}")), "{line}");
        }
    }

    #[test]
    fn options_before_the_command_of_run_are_ours() {
        let command_of = |line: &str| parsed(line).map(|cli| format!("{:?}", cli.command));
        let run = command_of("run -v make -v --tree").expect("a command");
        assert!(run.contains("verbose: true") && run.contains(r#"["make", "-v", "--tree"]"#), "{run}");
        let run = command_of("run -- -v make").expect("a command");
        assert!(run.contains("verbose: false") && run.contains(r#"["-v", "make"]"#), "{run}");
        assert!(parsed("run -x make").is_err_and(|error| error.contains("unexpected argument '-x'")));
    }

    fn parsed(line: &str) -> Result<Cli, String> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        parse_words(&words).map_err(|error| error.to_string())
    }

    #[test]
    fn culprits_are_ranked_by_the_same_option_everywhere() {
        for line in ["-d 1s", "wq --why 1ms", "offcpu --why 1ms", "sqpoll --why 1ms", "block --why 1ms"] {
            for by in ["culprit", "name", "cgroup"] {
                assert!(parsed(&format!("{line} --rank-by {by}")).is_ok(), "{line}");
            }
        }
        // Former spellings.
        for line in ["-d 1s --by name", "sqpoll --why 1ms --by cgroup", "wq --why 1ms --by cgroup"] {
            assert!(parsed(line).is_ok(), "{line}");
        }
        for line in ["wq --by name", "offcpu --by culprit", "block --by name", "-d 1s --rank-by process"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_number_is_a_duration() {
        let length = |line: &str| parsed(line).map(|cli| format!("{:?}", cli.look));
        for (line, same) in [("10", "-d 10s"), ("10s", "-d 10s"), ("1.5 --json", "-d 1.5s --json"), ("1m", "-d 1m")] {
            assert_eq!(length(line), length(same), "{line}");
        }
        for line in ["offcpu 10", "offcpu 10s", "offcpu --why 5ms 10"] {
            assert!(parsed(line).is_ok(), "{line}");
        }
        for line in ["10 -d 5s", "10x", "0", "offcpu 10 -d 5s", "offcpu x", "-d 10", "offcpu -d 10", "offcpu 0"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn times_select_a_span_in_every_command_that_reads_a_recording() {
        for command in ["replay F", "top F", "report F", "export F --csv d"] {
            for span in ["--from 10:00 --to 10:05", "--at 10:00..10:05", "--at 10:00..", "--at 10:00"] {
                assert!(parsed(&format!("{command} {span}")).is_ok(), "{command} {span}");
            }
            assert!(parsed(&format!("{command} --at 10:00..10:05 --from 10:00")).is_err(), "{command}");
        }
        for command in ["top", "report"] {
            assert!(parsed(&format!("{command} --at 10:00..10:05")).is_err(), "{command}");
        }
    }

    /// Splits a line as a shell does, without substitutions.
    fn shell_words(line: &str) -> Vec<OsString> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for c in line.chars() {
            match (quote, c) {
                (Some(open), c) if open == c => quote = None,
                (None, '\'' | '"') => (quote, word) = (Some(c), Some(word.unwrap_or_default())),
                (None, ' ') => words.extend(word.take().map(OsString::from)),
                _ => word.get_or_insert_default().push(c),
            }
        }
        words.extend(word.map(OsString::from));
        words
    }

    /// Calls `check` with each visible command, its name with those of its parents, and its examples.
    fn each_command(mut command: clap::Command, check: &mut dyn FnMut(&mut clap::Command, &str, &str)) {
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

    /// Returns the commands of whylate in an example, each with its words.
    fn commands_in(line: &str) -> impl Iterator<Item = Vec<OsString>> {
        let parts = line.split(&['|', ';', '&', '>']);
        let parts = parts.map(|part| part.trim().trim_start_matches("sudo ").to_owned());
        parts.filter_map(|part| part.strip_prefix("whylate").map(|rest| shell_words(rest.trim())))
    }

    #[test]
    fn examples_can_be_pasted() {
        each_command(command(), &mut |_, path, examples| {
            let lines: Vec<&str> = examples.lines().collect();
            assert!(lines.len() >= 2, "{path} has no examples");
            for pair in lines.chunks(2) {
                let [comment, command] = pair else { panic!("{path}: no command follows {pair:?}") };
                assert!(comment.starts_with("    # "), "{path}: {comment}");
                let command_line = command.strip_prefix("    ").unwrap_or_default();
                assert!(!command_line.is_empty() && !command_line.starts_with([' ', '#']), "{path}: {command}");
                assert!(comment.len() <= 76 && command.len() <= 76, "{path}: {pair:?}");
                for words in commands_in(command_line) {
                    match parse_words(&words) {
                        Ok(Cli { command: Some(Command::Replay(replay)), .. }) => {
                            let replayed = parse_words(&replay.command);
                            assert!(replayed.is_ok(), "{command}: {:?}", replayed.err());
                        }
                        parsed => assert!(parsed.is_ok(), "{command}: {:?}", parsed.err()),
                    }
                }
            }
            // A page without an example of its own command would be of another.
            let own = path.trim_start_matches("whylate").trim_start();
            assert!(examples.contains(own), "{path}: {examples}");
        });
    }

    const PAGE: &str = include_str!("../../../../docs/command-line.md");

    /// Returns the cells of the table rows below a heading of the page.
    fn rows(heading: &str) -> Vec<Vec<&'static str>> {
        let section = PAGE.split("\n## ").find(|section| section.starts_with(heading)).expect("the heading");
        let rows = section.lines().filter(|line| line.starts_with("| ")).skip(2);
        rows.map(|row| row.trim_matches('|').split(" |").map(str::trim).collect()).collect()
    }

    /// Returns the texts in backquotes.
    fn quoted(text: &'static str) -> impl Iterator<Item = &'static str> {
        text.split('`').skip(1).step_by(2)
    }

    /// Calls `check` with each visible option with a long name, and the top-level name of its command.
    fn each_option(check: &mut dyn FnMut(&str, &str, &clap::Arg)) {
        each_command(command(), &mut |command, path, _| {
            let top = path.split(' ').nth(1).unwrap_or("overview");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_long().is_some()) {
                check(path, top, arg);
            }
        });
    }

    #[test]
    fn page_says_which_commands_have_an_option() {
        const OF_CLAP: [&str; 2] = ["--help", "--version"];
        let mut commands: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        each_option(&mut |_, top, arg| {
            let name = format!("--{}", arg.get_long().unwrap_or_default());
            commands.entry(name).or_default().insert(top.to_owned());
        });
        let mut listed = BTreeSet::new();
        for row in rows("Options of several commands") {
            let named: BTreeSet<String> = quoted(row[2]).chain(quoted(row[3])).map(str::to_owned).collect();
            for option in quoted(row[0]).filter(|option| option.starts_with("--")) {
                assert!(listed.insert(option), "{option} has two rows");
                let has = commands.get(option);
                assert!(row[2] == "all" || has == Some(&named), "{option}: the page has {named:?}, not {has:?}");
            }
        }
        let shared = commands.iter().filter(|(name, of)| of.len() > 1 && !OF_CLAP.contains(&name.as_str()));
        let missing: Vec<_> = shared.filter(|(name, _)| !listed.contains(name.as_str())).collect();
        assert!(missing.is_empty(), "docs/command-line.md lacks {missing:?}");
    }

    #[test]
    fn lengths_of_time_need_a_unit() {
        let units = rows("Units");
        let names: Vec<&str> = quoted(units[0][0]).collect();
        let mut checked = 0;
        each_option(&mut |path, top, arg| {
            let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
            let value = value.unwrap_or_else(|| arg.get_id().as_str().to_uppercase());
            let name = arg.get_long().unwrap_or_default();
            // Other options of timerlat are rtla's.
            let is_length = names.contains(&value.as_str()) && arg.get_action().takes_values();
            if !is_length || top == "timerlat" && name != "why" {
                return;
            }
            let refused = parsed(format!("{path} --{name} 5").trim_start_matches("whylate "));
            let refused = refused.expect_err("a bare number has no unit");
            assert!(refused.contains("add a unit"), "{path} --{name}: {refused}");
            checked += 1;
        });
        assert!(checked > 25, "only {checked} options");
    }

    #[test]
    fn page_has_each_extension() {
        let rows = rows("Output files");
        let of_page: Vec<(&str, &str)> = rows.iter().map(|row| (row[0].trim_matches('`'), row[1])).collect();
        let known: Vec<(&str, &str)> = EXTENSIONS.iter().map(|(_, text, meaning)| (*text, *meaning)).collect();
        assert_eq!(of_page, known);
    }

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
