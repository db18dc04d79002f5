// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line for clap. The arguments of each command are in the module of the command.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write as _};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::cli::help_layout::arranged;
use crate::cli::{
    SUCCESS, block, completions, diff, doctor, exit_status, export, foreign, generate, help, import, inject, irqsoff,
    offcpu, overview, record, replay, report, run, selftest, serve, sqpoll, timerlat, top, wq,
};
use crate::render::color::When;

const USAGE: &str = "whylate [DURATION] [OPTIONS]\n       whylate COMMAND [OPTIONS]";

/// Find out why Linux is slow: what waited, for how long, and what caused it
///
/// Without a command, whylate watches this machine for 10 s with every available source; with -p, --comm or --cgroup, it
/// shows what one program does with its time.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, disable_help_subcommand = true)]
#[command(override_usage = USAGE)]
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

/// Help that was asked for, or a usage error.
#[derive(Debug)]
pub struct Refusal {
    error: clap::Error,
    /// Name of the command of the command line, if it has one.
    command: Option<String>,
}

impl Refusal {
    /// Returns whether the command line is wrong.
    pub fn is_error(&self) -> bool {
        self.error.use_stderr()
    }

    /// Returns the exit status.
    pub fn status(&self) -> u8 {
        if self.is_error() { exit_status::of_usage_error(self.command.as_deref()) } else { SUCCESS }
    }

    /// Returns the refusal of a command behind `whylate replay FILE`: options that select a span precede the command.
    pub fn in_replay(self) -> Refusal {
        const OF_SPANS: [&str; 3] = ["--at", "--from", "--to"];
        let given = match self.error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(given)) if self.error.kind() == ErrorKind::UnknownArgument => given.clone(),
            _ => return self,
        };
        let (Some(option), Some(command)) = (OF_SPANS.into_iter().find(|option| *option == given), &self.command)
        else {
            return self;
        };
        let message = format!("{option} selects a span of the recording: write it before {command}\n");
        Refusal { error: clap::Error::raw(ErrorKind::UnknownArgument, message), ..self }
    }

    /// Prints the help or the error. Escapes words of the command line that are not printable.
    ///
    /// # Errors
    /// Fails if the output cannot be written.
    pub fn print(&self) -> io::Result<()> {
        // Only what is late is colored.
        let plain = self.error.render().to_string();
        if self.is_error() {
            plain.lines().for_each(|line| say!("{line}"));
            return Ok(());
        }
        let mut out = io::stdout().lock();
        out.write_all(plain.as_bytes())?;
        out.flush()
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

pub fn parse() -> Result<Cli, Refusal> {
    parse_words(&std::env::args_os().skip(1).collect::<Vec<_>>())
}

/// Parses the words after the program's name: of this command line, or of one that `whylate replay` shows a recording as.
pub fn parse_words(words: &[OsString]) -> Result<Cli, Refusal> {
    let first = words.first().and_then(|word| word.to_str()).unwrap_or_default();
    if let Some(advice) = foreign::advice(first) {
        let error = clap::Error::raw(ErrorKind::InvalidSubcommand, format!("{advice}\n"));
        return Err(Refusal { error, command: None });
    }
    let line = || [OsString::from("whylate")].into_iter().chain(words.iter().cloned());
    let is_brief = words.iter().take_while(|word| *word != "--").any(|word| word == "-h");
    let parsed = arranged(Cli::command(), is_brief).try_get_matches_from(line());
    let parsed = parsed.and_then(|matches| {
        let mut command = Cli::command();
        command.build();
        refuse_options_before_commands(&matches, &mut command)?;
        Cli::from_arg_matches(&matches)
    });
    parsed.map_err(|error| {
        // What can be parsed of the line has its command.
        let partly = Cli::command().ignore_errors(true).try_get_matches_from(line()).ok();
        let command = partly.and_then(|matches| matches.subcommand_name().map(str::to_owned));
        let unknown = command.is_none().then(|| unknown_command(&error, words)).flatten();
        let takes_any_word = command.as_deref() == Some("run");
        let error = if takes_any_word { error } else { without_advice(error) };
        Refusal { error: unknown.unwrap_or(error), command }
    })
}

/// Refuses options before a command that are not global: they would be without effect.
fn refuse_options_before_commands(matches: &ArgMatches, command: &mut clap::Command) -> Result<(), clap::Error> {
    let Some((name, below)) = matches.subcommand() else { return Ok(()) };
    let is_given = |arg: &&clap::Arg| {
        let id = arg.get_id().as_str();
        !arg.is_global_set()
            && matches.try_contains_id(id).is_ok()
            && matches.value_source(id) == Some(ValueSource::CommandLine)
    };
    let given = command.get_arguments().find(is_given).map(ToString::to_string);
    if let Some(arg) = given {
        let message = format!("'{arg}' is given before the command: write it after '{name}'");
        return Err(command.error(ErrorKind::ArgumentConflict, message));
    }
    command.find_subcommand_mut(name).map_or(Ok(()), |command| refuse_options_before_commands(below, command))
}

/// Returns the error about an unknown command: a word that is no number is not meant as the duration of the overview,
/// also if other words follow that no command has taken.
fn unknown_command(error: &clap::Error, words: &[OsString]) -> Option<clap::Error> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let word = match error.kind() {
        ErrorKind::UnknownArgument => first_word(words)?,
        _ => {
            context(ContextKind::InvalidValue).filter(|_| context(ContextKind::InvalidArg) == Some(overview::LENGTH))?
        }
    };
    let is_command = !word.starts_with(|c: char| c.is_ascii_digit());
    let commands: Vec<clap::Command> =
        Cli::command().get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    let without_options =
        clap::Command::new("whylate").override_usage(USAGE).disable_help_subcommand(true).subcommands(commands);
    is_command.then(|| without_options.try_get_matches_from(["whylate", word]).err()).flatten()
}

/// Returns the first word if it is no option, after the options of every command.
fn first_word(words: &[OsString]) -> Option<&str> {
    let mut words = words.iter().map(|word| word.to_str().unwrap_or_default());
    loop {
        match words.next()? {
            "--color" => {
                words.next();
            }
            word if word.starts_with("--color=") => {}
            word => return (!word.starts_with('-')).then_some(word),
        }
    }
}

/// Removes clap's advice to pass an unknown option as a value: no value begins with a dash.
fn without_advice(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::StyledStrs(mut advice)) = error.remove(ContextKind::Suggested) {
        advice.retain(|advice| !advice.to_string().starts_with("to pass "));
        if !advice.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(advice));
        }
    }
    error
}

/// Returns the command line with the help of each command.
pub fn command() -> clap::Command {
    arranged(Cli::command(), false)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::cli::help_layout::each_command;
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
        parse_words(&words).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn culprits_are_ranked_by_the_same_option_everywhere() {
        for line in [
            "-d 1s",
            "wq --why 1ms",
            "irqsoff --why 1ms",
            "offcpu --why 1ms",
            "sqpoll --why 1ms",
            "block --why 1ms",
            "top",
            "report F",
        ] {
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
    fn only_global_options_precede_a_command() {
        for line in [
            "--color always wq",
            "--color=never timerlat --color always hist -d 1s",
            "--help-lost offcpu",
            "sqpoll --color always sweep --filename /dev/null",
        ] {
            assert!(parsed(line).is_ok_and(|cli| cli.command.is_some()), "{line}");
        }
        for (line, option, command) in [
            ("-d 5s wq", "--duration <DURATION>", "wq"),
            ("10 wq", "[DURATION]", "wq"),
            ("--json --color never doctor", "--json", "doctor"),
            ("timerlat -q hist", "--quiet", "hist"),
            ("sqpoll --why 1ms sweep --filename /dev/null", "--why <THRESHOLD>", "sweep"),
        ] {
            let refused = parsed(line).expect_err(line);
            let message = format!("'{option}' is given before the command: write it after '{command}'");
            assert!(refused.contains(&message), "{line}: {refused}");
        }
    }

    #[test]
    fn a_span_behind_the_command_of_a_replay_is_refused_with_advice() {
        let refused = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let refusal = parse_words(&words).expect_err(line).in_replay();
            (refusal.status(), refusal.to_string())
        };
        let (status, message) = refused("wq --at 10:00..10:05");
        assert_eq!(status, 2);
        assert!(message.contains("--at selects a span of the recording: write it before wq"), "{message}");
        assert!(refused("block --from=10:00").1.contains("write it before block"));
        assert!(refused("wq --nonsense").1.contains("unexpected argument '--nonsense'"));
    }

    #[test]
    fn an_error_has_the_status_of_its_command() {
        for (line, status) in [
            ("timerlat --nonsense", 1),
            ("--color never timerlat --nonsense", 1),
            ("timerlat hist --color never --nonsense", 1),
            ("timerlat -q hist", 1),
            ("--color never wq --nonsense", 2),
            ("wq timerlat", 2),
            ("--nonsense timerlat", 2),
            ("run --user timerlat", 2),
            ("timerlatt", 2),
            ("timerlat --help", 0),
            ("--version", 0),
        ] {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(parse_words(&words).err().map(|refusal| refusal.status()), Some(status), "{line}");
        }
    }

    #[test]
    fn unknown_option_is_not_taken_for_a_value() {
        for (line, advises) in [("wq --wy 5ms", false), ("-z", false), ("run --wy make", true)] {
            assert_eq!(parsed(line).expect_err(line).contains("as a value"), advises, "{line}");
        }
    }

    #[test]
    fn an_unknown_command_is_no_duration() {
        for (line, message) in [
            ("offcpuu", "a similar subcommand exists: 'offcpu'"),
            ("offcpuu 10", "a similar subcommand exists: 'offcpu'"),
            ("blok 1 10", "a similar subcommand exists: 'block'"),
            ("offcpuu --why 5ms", "a similar subcommand exists: 'offcpu'"),
            ("--color never nonsense", "unrecognized subcommand 'nonsense'"),
            ("--color never nonsense 1", "unrecognized subcommand 'nonsense'"),
            ("10 --nonsense", "unexpected argument '--nonsense'"),
            ("10x", "invalid value '10x' for '[DURATION]'"),
            ("offcpu x", "invalid value 'x' for '[DURATION]'"),
        ] {
            let refused = parsed(line).expect_err(line);
            assert!(refused.contains(message), "{line}: {refused}");
        }
    }

    #[test]
    fn a_number_is_a_duration() {
        for (line, seconds) in [
            ("10", 10.0),
            ("10s", 10.0),
            ("1.5 --json", 1.5),
            ("--json 1m", 60.0),
            ("-p 1 10", 10.0),
            ("--color never 10", 10.0),
            ("-d 10s", 10.0),
        ] {
            let ns = parsed(line).map(|cli| cli.look.duration_ns());
            assert_eq!(ns, Ok(Some((seconds * 1e9) as u64)), "{line}");
        }
        for line in ["offcpu 10", "offcpu 10s", "offcpu --why 5ms 10"] {
            assert!(parsed(line).is_ok(), "{line}");
        }
        for line in [
            "10 -d 5s",
            "10x",
            "0",
            "10 20",
            "10 wq",
            "offcpu 10 -d 5s",
            "offcpu x",
            "-d 10",
            "offcpu -d 10",
            "offcpu 0",
        ] {
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
}
