// SPDX-License-Identifier: MIT OR Apache-2.0
//! What watching I/O requests costs, with whylate and with biolatency and biosnoop, on the same load of fio.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::child::{Running, Tool, wait_until};
use crate::figures::{self, Check, Spread, median_of};
use crate::programs::{self, Counts};
use crate::{floor, kernel, machine, results, whylate};

/// BPF per request, with all phases, without what counting its time takes.
const LIMIT_NS: f64 = 400.0;
/// Of biolatency and biosnoop together, on the same load.
const RATIO_LIMIT: f64 = 0.7;
/// How many requests fewer a second there may be.
const SLOWDOWN_LIMIT_PERCENT: f64 = 2.0;
const DEPTH: u32 = 128;
const SECONDS: u32 = 4;
const FILE_MIB: u32 = 256;

struct Subject {
    name: &'static str,
    tool: Option<(&'static str, &'static [&'static str])>,
}

const ALONE: usize = 0;
const WHYLATE: usize = 1;
const BIOLATENCY: usize = 2;
const BIOSNOOP: usize = 3;

const SUBJECTS: [Subject; 5] = [
    Subject { name: "nothing", tool: None },
    Subject { name: "`whylate block --table`", tool: Some(("whylate", &["block", "--table"])) },
    Subject { name: "`biolatency`", tool: Some(("biolatency", &[])) },
    Subject { name: "`biosnoop`", tool: Some(("biosnoop", &[])) },
    Subject { name: "`whylate block`", tool: Some(("whylate", &["block"])) },
];

/// One subject in one round.
#[derive(Clone, Debug, Default)]
struct Sample {
    requests_per_second: f64,
    /// Of all BPF programs, for one request.
    bpf_ns: f64,
    /// The same without what counting takes: the mean run time of an empty program beside them, for each of their runs.
    own_ns: f64,
    programs: Vec<Counts>,
}

/// A file that is written once, and goes with this.
struct Load(tempfile::NamedTempFile);

impl Load {
    fn make() -> Result<Load> {
        let load = Load(tempfile::NamedTempFile::new_in(".").context("cannot make a file here")?);
        load.fio(&["--rw=write", "--bs=1m"])?;
        Ok(load)
    }

    fn fio(&self, options: &[&str]) -> Result<serde_json::Value> {
        let output = Command::new("fio")
            .arg("--name=load")
            .arg(format!("--filename={}", self.0.path().display()))
            .args([&format!("--size={FILE_MIB}m"), "--direct=1", "--output-format=json"])
            .args(options)
            .output()
            .context("cannot run fio")?;
        ensure!(output.status.success(), "fio failed: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).context("fio tells nothing")
    }

    /// Requests a second, and all of them.
    fn read(&self) -> Result<(f64, f64)> {
        let (depth, seconds) = (format!("--iodepth={DEPTH}"), format!("--runtime={SECONDS}"));
        let options = ["--rw=randread", "--bs=4k", "--ioengine=libaio", "--time_based", &depth, &seconds];
        let told = self.fio(&options)?;
        let read = &told["jobs"][0]["read"];
        let figure = |name: &str| read[name].as_f64().with_context(|| format!("fio does not tell {name}"));
        Ok((figure("iops")?, figure("total_ios")?))
    }
}

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if machine::is_skipped(&[("fio", "no fio to make requests"), ("biolatency", "no biolatency to compare with")]) {
        return Ok(true);
    }
    let whylate = whylate::build("bench-block")?;
    let load = Load::make()?;
    let mut subjects: Vec<usize> = (0..SUBJECTS.len()).collect();
    let (mut refused, mut rounds) = (String::new(), Vec::new());
    if let Err(error) = start(&SUBJECTS[BIOSNOOP], &whylate).and_then(|running| running.map_or(Ok(()), Running::end)) {
        refused = format!("- `biosnoop` does not run here, and is left out: {error:#}\n");
        subjects.retain(|&subject| subject != BIOSNOOP);
    }
    for round in 0..=arguments.rounds as usize {
        eprintln!("round {round} of {}{}", arguments.rounds, if round == 0 { " (not timed)" } else { "" });
        let mut samples = vec![Sample::default(); SUBJECTS.len()];
        for turn in 0..subjects.len() {
            let which = subjects[(round + turn) % subjects.len()];
            samples[which] = sample(&SUBJECTS[which], &whylate, &load)
                .with_context(|| format!("cannot measure {}", SUBJECTS[which].name))?;
        }
        if round > 0 {
            rounds.push(samples);
        }
    }
    let checks = checks(&rounds, &subjects);
    let heading = results::heading("`whylate block`", "bench-block", &format!("block --rounds {}", arguments.rounds));
    arguments.publish("block", &markdown(&rounds, &subjects, &checks, &format!("{heading}{refused}")))?;
    Ok(checks.iter().all(Check::is_within))
}

fn start(subject: &Subject, whylate: &Path) -> Result<Option<Running>> {
    let Some((program, arguments)) = subject.tool else { return Ok(None) };
    let program = if program == "whylate" { whylate.to_owned() } else { PathBuf::from(program) };
    let running = Running::Theirs(Tool::start(program, arguments)?);
    wait_until("it does not attach", || Ok(!running.programs()?.is_empty()))?;
    Ok(Some(running))
}

/// Requests are counted without the kernel's own counting of BPF's time, which costs more than some programs.
fn sample(subject: &Subject, whylate: &Path, load: &Load) -> Result<Sample> {
    let running = start(subject, whylate)?;
    let (requests_per_second, _) = load.read()?;
    let mut sample = Sample { requests_per_second, ..Sample::default() };
    if let Some(running) = running {
        let empty = floor::attach_to_switches().context("cannot attach the empty program")?;
        let counting = kernel::count_run_times()?;
        let count = || anyhow::Ok((running.programs()?, programs::of_process(std::process::id())?));
        let before = count()?;
        let (_, requests) = load.read()?;
        let after = count()?;
        drop((counting, empty));
        let floor = programs::difference(&before.1, &after.1);
        let floor_ns = floor.iter().find(|program| program.runs > 0).map_or(0.0, Counts::mean_ns);
        sample.programs = programs::difference(&before.0, &after.0);
        let each = |ns: &dyn Fn(&Counts) -> f64| sample.programs.iter().map(ns).sum::<f64>() / requests.max(1.0);
        sample.bpf_ns = each(&|program| program.run_ns as f64);
        sample.own_ns = sample.bpf_ns - each(&|program| program.runs as f64 * floor_ns);
        running.end()?;
    }
    Ok(sample)
}

fn slowdown_percent(round: &[Sample], subject: usize) -> f64 {
    (1.0 - round[subject].requests_per_second / round[ALONE].requests_per_second.max(1.0)) * 100.0
}

fn checks(rounds: &[Vec<Sample>], subjects: &[usize]) -> Vec<Check> {
    let slower = median_of(rounds, |round| slowdown_percent(round, WHYLATE));
    let mut checks = vec![
        Check::new(
            "BPF for one request, with all phases, less counting",
            median_of(rounds, |round| round[WHYLATE].own_ns),
            "ns",
            LIMIT_NS,
        ),
        Check::new("fewer requests a second", slower, "%", SLOWDOWN_LIMIT_PERCENT),
    ];
    if subjects.contains(&BIOSNOOP) {
        let ratio = median_of(rounds, |round| {
            round[WHYLATE].bpf_ns / (round[BIOLATENCY].bpf_ns + round[BIOSNOOP].bpf_ns).max(1.0)
        });
        checks.push(Check::new("of biolatency and biosnoop together", ratio, "times", RATIO_LIMIT));
    }
    checks
}

fn markdown(rounds: &[Vec<Sample>], subjects: &[usize], checks: &[Check], heading: &str) -> String {
    let mut text = format!(
        "{heading}\nLoad: fio, random direct reads of 4 KiB, depth {DEPTH}, {SECONDS} s. BPF for one request is the run time of all programs of a \
         subject, as the kernel counts it, by the requests of fio; less counting is without the time of an empty program \
         for each run, nearly all of which the counting takes; fewer requests a second are without that counting, beside \
         nothing in the same round. Medians of {} rounds, the smallest and the largest in brackets.\n\n\
         | subject | BPF ns a request | less counting | requests/s | fewer % |\n|---|--:|--:|--:|--:|\n",
        rounds.len()
    );
    let spread = |figure: &dyn Fn(&Vec<Sample>) -> f64, digits: usize| {
        let Spread { median, min, max } = Spread::of(&rounds.iter().map(figure).collect::<Vec<_>>());
        format!("{median:.digits$} ({min:.digits$} to {max:.digits$})")
    };
    for &subject in subjects {
        text += &format!(
            "| {} | {} | {} | {} | {} |\n",
            SUBJECTS[subject].name,
            spread(&|round| round[subject].bpf_ns, 0),
            spread(&|round| round[subject].own_ns, 0),
            spread(&|round| round[subject].requests_per_second, 0),
            spread(&|round| slowdown_percent(round, subject), 2)
        );
    }
    if let Some(last) = rounds.last() {
        text += "\nEach program of `whylate block --table` in the last round, mean ns:";
        for program in &last[WHYLATE].programs {
            text += &format!(" `{}` {:.0} ({} runs)", program.name, program.mean_ns(), program.runs);
        }
        text.push('\n');
    }
    text + &figures::table(checks, [2, 1])
}
