// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exit statuses of every command: those of the table in docs/command-line.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::running::whylate;
use super::terminal::typed;
use super::{RECORDINGS, Unprivileged, output_of, text};

const SUCCESS: i32 = 0;
const FAILURE: i32 = 1;
const USAGE: i32 = 2;
const NOT_POSSIBLE: i32 = 3;
const LATE: i32 = 4;

/// Status, and command lines that end with it. LATE, DISK and QUIET stand for recordings, TRACE for a trace, and OUT for
/// a directory to write to. Lines with status 3 run without privileges. `> /dev/full` redirects the output.
type Lines = &'static [(i32, &'static [&'static str])];

const LINES: [(&str, Lines); 21] = [
    (
        "overview",
        &[
            (SUCCESS, &["--version", "--help", "replay LATE", "replay LATE --json"]),
            (FAILURE, &["replay LATE --at 2001-01-01..2001-01-02", "replay /dev/null"]),
            (USAGE, &["--nonsense", "nonsense", "0", "--json 10x", "--json doctor", "-p 4194303"]),
            (USAGE, &["--comm no-such-program -d 1s", "--cgroup /no/such/cgroup -d 1s"]),
            (NOT_POSSIBLE, &["-d 1s", "--json 1", "-p 1 1"]),
            (LATE, &["replay LATE --fail-if-late", "--color never replay LATE --fail-if-late"]),
        ],
    ),
    (
        "wq",
        &[
            (SUCCESS, &["replay LATE wq", "replay LATE wq --why 1s --fail-if-late", "--color always replay LATE wq"]),
            (FAILURE, &["replay LATE wq -w no_such_handler"]),
            (USAGE, &["wq --nonsense", "wq 0", "-d 1s wq", "replay LATE wq --nonsense", "--color never wq --nonsense"]),
            (NOT_POSSIBLE, &["wq 1 1", "--color always wq 1 1"]),
            (LATE, &["replay LATE wq --fail-if-late"]),
        ],
    ),
    (
        "timerlat",
        &[
            (SUCCESS, &["replay LATE timerlat top -q", "timerlat --color never hist --help"]),
            (FAILURE, &["timerlat --nonsense", "--color never timerlat --nonsense", "timerlat hist -b 0"]),
            (FAILURE, &["replay LATE timerlat --nonsense", "replay LATE timerlat -q -o OUT/x.whylate"]),
            (FAILURE, &["timerlat --backend nonsense -d 1s"]),
            (NOT_POSSIBLE, &["timerlat -d 1", "--color never timerlat hist -d 1"]),
            (LATE, &["replay LATE timerlat top -q --fail-if-late"]),
        ],
    ),
    (
        "irqsoff",
        &[
            (SUCCESS, &["replay LATE irqsoff"]),
            (FAILURE, &["replay LATE --at 2001-01-01..2001-01-02 irqsoff"]),
            (USAGE, &["irqsoff --nonsense", "replay LATE irqsoff --nonsense", "irqsoff --import /no/such/file"]),
            (NOT_POSSIBLE, &["irqsoff 1 1"]),
            (LATE, &["replay LATE irqsoff --fail-if-late"]),
        ],
    ),
    (
        "offcpu",
        &[
            (SUCCESS, &["replay LATE offcpu"]),
            (FAILURE, &["replay LATE offcpu --comm no-such-program"]),
            (USAGE, &["offcpu --nonsense", "replay LATE offcpu --nonsense", "offcpu -p 4194303", "offcpu x"]),
            (USAGE, &["offcpu --cgroup /no/such/cgroup", "offcpu --classes /no/such/file"]),
            (USAGE, &["offcpu import /no/such/file", "offcpu --diff /no/such/a /no/such/b"]),
            (NOT_POSSIBLE, &["offcpu --json -d 1s"]),
            (LATE, &["replay LATE offcpu --why 10ms --fail-if-late"]),
        ],
    ),
    (
        "sqpoll",
        &[
            (SUCCESS, &["replay LATE sqpoll", "replay LATE sqpoll --fail-if-late"]),
            (FAILURE, &["replay LATE sqpoll -p 1"]),
            (USAGE, &["sqpoll --nonsense", "replay LATE sqpoll --nonsense", "sqpoll -p 4194303"]),
            (USAGE, &["sqpoll sweep --filename /no/such/file"]),
            (NOT_POSSIBLE, &["sqpoll --backend bpf 1 1"]),
        ],
    ),
    (
        "block",
        &[
            (SUCCESS, &["replay LATE block", "replay LATE block --fail-if-late"]),
            (FAILURE, &["replay LATE block --disk nosuchdisk"]),
            (USAGE, &["block --nonsense", "replay LATE block --nonsense", "block -d sda"]),
            (NOT_POSSIBLE, &["block 1 1"]),
            (LATE, &["replay DISK block --fail-if-late"]),
        ],
    ),
    (
        "top",
        &[
            // It needs a terminal, and does not end by itself.
            (SUCCESS, &["top --help"]),
            (FAILURE, &["top", "top /dev/null"]),
            (USAGE, &["top --nonsense", "top /no/such/file", "top --every 1ns"]),
            (NOT_POSSIBLE, &["top"]),
        ],
    ),
    (
        "run",
        &[
            (SUCCESS, &["run --import TRACE --comm sh"]),
            (FAILURE, &["run --import /dev/null", "run -o /nowhere/x.svg -- true"]),
            (USAGE, &["run", "run --user no-such-user -- true", "run --import /no/such/file"]),
            (NOT_POSSIBLE, &["run -- true"]),
        ],
    ),
    (
        "record",
        &[
            // It measures.
            (SUCCESS, &["record --help"]),
            (FAILURE, &["record -d 1s -o /nowhere/x.whylate"]),
            (USAGE, &["record --nonsense", "record -d 1", "record -d 1s -o OUT/x.svg"]),
            (NOT_POSSIBLE, &["record -d 1s -o /tmp/whylate-test.whylate"]),
        ],
    ),
    (
        "serve",
        &[
            // It serves until it is stopped.
            (SUCCESS, &["serve --help", "replay LATE serve --listen 127.0.0.1:0 -d 1ms"]),
            (FAILURE, &["replay LATE serve --listen 192.0.2.1:1"]),
            (
                USAGE,
                &[
                    "serve --nonsense",
                    "serve --listen 9797",
                    "serve --every 1ms",
                    "serve --ring 1m",
                    "serve --record OUT/x.whylate --ring 1m",
                    "serve --record OUT/x.svg",
                ],
            ),
            (NOT_POSSIBLE, &["serve --listen 127.0.0.1:0"]),
        ],
    ),
    (
        "replay",
        &[
            (SUCCESS, &["replay QUIET", "replay QUIET wq 10"]),
            (FAILURE, &["replay /dev/null"]),
            (USAGE, &["replay", "replay /no/such/file", "replay LATE doctor", "replay LATE nonsense"]),
            (LATE, &["replay LATE --fail-if-late"]),
        ],
    ),
    (
        "report",
        &[
            (SUCCESS, &["report QUIET -o OUT/a.html", "report QUIET --diff QUIET -o OUT/b.html"]),
            (FAILURE, &["report /dev/null -o OUT/a.html", "report QUIET -o /nowhere/a.html"]),
            (USAGE, &["report --nonsense", "report /no/such/file", "report QUIET -o OUT/a.svg", "report QUIET -d 1s"]),
            (NOT_POSSIBLE, &["report -d 1s -o /tmp/whylate-test.html"]),
        ],
    ),
    (
        "diff",
        &[
            (SUCCESS, &["diff QUIET QUIET", "diff LATE LATE --json"]),
            (FAILURE, &["diff QUIET /dev/null"]),
            (USAGE, &["diff LATE", "diff /no/such/file LATE"]),
        ],
    ),
    (
        "export",
        &[
            (SUCCESS, &["export QUIET -o OUT/a.csv/ -o OUT/a.perfetto-trace"]),
            (FAILURE, &["export /dev/null -o OUT/a.csv/"]),
            (USAGE, &["export LATE", "export /no/such/file --csv x", "export QUIET -o OUT/a.svg"]),
        ],
    ),
    (
        "import",
        &[
            (SUCCESS, &["import TRACE", "import --as switches TRACE --comm sh -o OUT/path.svg"]),
            (FAILURE, &["import /dev/null", "import --as switches /dev/null"]),
            (USAGE, &["import", "import /no/such/file"]),
        ],
    ),
    (
        "inject",
        &[
            // It disturbs the machine.
            (SUCCESS, &["inject --help", "inject hog --help"]),
            (USAGE, &["inject", "inject hog --for 5", "inject nonsense"]),
            (USAGE, &["inject hog --cpu 60000", "inject sqpoll --cpu 60000"]),
            (NOT_POSSIBLE, &["inject irqs-off", "inject work"]),
        ],
    ),
    (
        "selftest",
        &[
            // It disturbs the machine.
            (SUCCESS, &["selftest --help"]),
            (USAGE, &["selftest --nonsense"]),
            (NOT_POSSIBLE, &["selftest --force"]),
        ],
    ),
    (
        "doctor",
        &[(SUCCESS, &["doctor", "doctor --json"]), (FAILURE, &["doctor > /dev/full"]), (USAGE, &["doctor --nonsense"])],
    ),
    (
        "help",
        &[
            (SUCCESS, &["help", "help wq", "help lost"]),
            (FAILURE, &["help wq > /dev/full"]),
            (USAGE, &["help nonsense"]),
        ],
    ),
    (
        "completions",
        &[
            (SUCCESS, &["completions bash"]),
            (FAILURE, &["completions bash > /dev/full"]),
            (USAGE, &["completions", "completions nonsense"]),
        ],
    ),
];

/// Statuses that a command of the table has, but no line above, with the reason.
const WITHOUT_LINE: [(&str, i32, &str); 1] = [("sqpoll", LATE, "no recording has a submission thread that was late")];

/// Names of all commands in `whylate --help`, and of the overview.
pub fn commands() -> Result<BTreeSet<String>> {
    let help = text(&output_of(&["--help"])?.stdout);
    let rows = help
        .lines()
        .filter(|line| line.starts_with("  ") && line.as_bytes().get(2).is_some_and(u8::is_ascii_lowercase));
    let names = rows.filter_map(|row| row.split_whitespace().next());
    Ok(names.map(str::to_owned).chain(["overview".to_owned()]).collect())
}

/// Runs a line, and returns its exit status and what it said; `None` if that is not possible here.
fn outcome(line: &str, status: i32, unprivileged: &Unprivileged) -> Result<Option<(Option<i32>, String)>> {
    if (line, status) == ("top", NOT_POSSIBLE) {
        return typed(&format!("{} {line}", unprivileged.shell_words()), "whylate: ", b"");
    }
    let (line, is_full) = line.strip_suffix(" > /dev/full").map_or((line, false), |line| (line, true));
    let words: Vec<&str> = line.split(' ').collect();
    let output = match status {
        NOT_POSSIBLE => unprivileged.output(&words)?,
        _ if is_full => whylate(&words).stdout(File::options().write(true).open("/dev/full")?).output()?,
        _ => output_of(&words)?,
    };
    Ok(Some((output.status.code(), text(&output.stderr))))
}

#[test]
fn statuses_mean_the_same_in_every_command() -> Result<()> {
    let (out, unprivileged) = (tempfile::tempdir()?, Unprivileged::new()?);
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../whylate-model/tests/traces/tracefs.txt");
    let recording = |name: &str| Path::new(RECORDINGS).join(name).display().to_string();
    let files = [
        ("LATE", recording("sources-6.18.whylate")),
        ("DISK", recording("paths-6.18.whylate")),
        ("QUIET", recording("quiet-6.1.whylate")),
        ("TRACE", trace.to_owned()),
        ("OUT", out.path().display().to_string()),
    ];
    let mut wrong = Vec::new();
    for (status, line) in
        LINES.iter().flat_map(|(_, all)| *all).flat_map(|(status, lines)| lines.iter().map(|line| (*status, *line)))
    {
        let line = files.iter().fold(line.to_owned(), |line, (name, file)| line.replace(name, file));
        match outcome(&line, status, &unprivileged)? {
            Some((ended, said)) if ended != Some(status) => {
                wrong.push(format!("{line}: {ended:?}, not {status}: {said}"))
            }
            _ => {}
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn each_command_has_lines_for_the_statuses_of_the_page() -> Result<()> {
    let all = commands()?;
    let tried: BTreeMap<&str, BTreeSet<i32>> =
        LINES.iter().map(|(name, lines)| (*name, lines.iter().map(|(status, _)| *status).collect())).collect();
    let names: BTreeSet<String> = tried.keys().map(|name| (*name).to_owned()).collect();
    ensure!(names == all, "lines for {names:?}, and commands {all:?}");
    let page = include_str!("../../../../docs/command-line.md");
    let (_, section) = page.split_once("## Exit statuses").context("no table")?;
    let rows =
        section.lines().skip_while(|line| !line.starts_with("| --")).skip(1).take_while(|line| line.starts_with('|'));
    let mut checked = 0;
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let status: i32 = cells[0].parse()?;
        let quoted: BTreeSet<String> = cells[2].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let of_page: BTreeSet<String> = match cells[2].starts_with("all") {
            true => all.difference(&quoted).cloned().collect(),
            false => quoted,
        };
        let left_out = |name: &&str| WITHOUT_LINE.iter().any(|(of, without, _)| (of, *without) == (name, status));
        let of_lines: BTreeSet<String> = tried
            .iter()
            .filter(|(name, statuses)| statuses.contains(&status) || left_out(name))
            .map(|(name, _)| (*name).to_owned())
            .collect();
        // A failure, such as a full disk, cannot be brought about everywhere.
        let has_all = if status == FAILURE { of_lines.is_subset(&of_page) } else { of_lines == of_page };
        ensure!(has_all, "{status}: the page has {of_page:?}, and there are lines for {of_lines:?}");
        checked += 1;
    }
    ensure!(checked == 5, "{checked} rows");
    Ok(())
}
